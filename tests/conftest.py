"""For all tests: two speeds, a limit of time, signals, and a last line that says what was not run.

`make test` leaves out what is marked ``grid``: the further cases of a promise that it has seen kept
on at least one; `make test-rest` runs those. Two processes run tests at the same time, so a test
may measure the memory and the CPU time of its own processes, never those of the machine.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from mismatch.training.distributed import World

# The reason of every skip begins with its kind (tests/unit/test_architecture.py looks).
SKIPS = {
    "GPU": "make test-gpu, on a machine with a GPU",
    "hub": "run it where a model hub can be reached",
    "browser": "apt-get install chromium, then make test again",
    "client": "install the package that each reason names; make test-clients has two",
    "engine": "make env env-sglang",
    "machine": "",
    "time": "make test-rest",
    "not applicable": "",
}

# No test starts later than this second of the clock, and the files of tests begin with another one
# each time, so that all have their turn: .ci/run sets both, as machines differ by half in speed.
UNTIL = float(os.environ.get("MISMATCH_TESTS_UNTIL", "inf"))
FIRST = int(os.environ.get("MISMATCH_TESTS_FIRST", "0"))

# A machine under load draws slowly, which is no fault of a test.
settings.register_profile("loaded", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("loaded")

# The real SGLang runs on a CPU with what tests/sglang_cpu adds to its processes.
os.environ.setdefault("MISMATCH_SGLANG_HOOK", str(Path(__file__).with_name("sglang_cpu")))

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every process
# that they start; some tests send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def grid(values: Iterable[Any], *keep: Any) -> list[Any]:
    """Parameters of a test: those of ``keep`` for `make test`, the others marked ``grid``.

    A value that takes several parameters is a tuple.
    """
    listed = list(values)
    unknown = [value for value in keep if value not in listed]
    if unknown or not keep:
        raise ValueError(f"a grid keeps some of its values; not among them: {unknown}")
    return [value if value in keep else _marked(value) for value in listed]


def _marked(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.grid)


def turned(names: Iterable[str], first: int) -> list[str]:
    """Return names in their order, each once, beginning with another for every ``first``."""
    once = list(dict.fromkeys(names))
    start = first % max(1, len(once))
    return once[start:] + once[:start]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not FIRST:
        return
    places = {name: i for i, name in enumerate(turned((str(item.path) for item in items), FIRST))}
    items.sort(key=lambda item: places[str(item.path)])


@pytest.hookimpl(tryfirst=True)  # before the fixtures of the test, which may start an engine
def pytest_runtest_setup() -> None:
    if time.time() > UNTIL:
        pytest.skip("time: the limit of this run has passed")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A training world of one rank."""
    from torch.distributed import destroy_process_group  # not where commands are forked

    from mismatch.training.distributed import World

    yield World.start()
    destroy_process_group()


def last_line(stats: dict[str, list[Any]]) -> str:
    """Return how many tests passed, failed and were skipped, and which command runs the latter."""
    failed = len(stats.get("failed", [])) + len(stats.get("error", []))
    reasons = [str(report.longrepr[2]) for report in stats.get("skipped", [])]
    kinds = Counter(reason.removeprefix("Skipped: ").partition(":")[0] for reason in reasons)
    by_kind = [
        f"{count} {kind}" + (f" ({SKIPS[kind]})" if SKIPS.get(kind) else "")
        for kind, count in kinds.most_common()
    ]
    counts = f"{len(stats.get('passed', []))} passed, {failed} failed, {len(reasons)} skipped"
    return f"{counts}: {'; '.join(by_kind)}" if by_kind else counts


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Print the last line, once: not in the processes of pytest-xdist, nor for a list of tests."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput") and reporter.stats:
        reporter.ensure_newline()
        reporter.write_line(last_line(reporter.stats))
