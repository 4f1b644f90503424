"""Damaged JSON of a run: every command says so in a sentence, with exit code 2 or a verdict."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mismatch.errors import MismatchError
from mismatch.run import manifest
from mismatch.run.directory import at_work, load_spec
from mismatch.run.messages import pass_label, write_error

from ..command import ROOT, mismatch
from ..foreign import INPUTS
from ..made_run import make_run

pytestmark = pytest.mark.slow

WHOLE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[: len(data) // 2],
    "deep list": lambda data: b"[" * 100_000 + b"]" * 100_000,
    "deep object": lambda data: b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    "no number": lambda data: data.replace(b": ", b': NaN, "x": ', 1),
    "key twice": lambda data: data.replace(b"{", b'{"schema": 3, "schema": [], ', 1),
    "long number": lambda data: b"1" * 5000,
    "list": lambda data: b"[]",
    "null": lambda data: b"null",
    "no text": lambda data: b"\xff\xfe" + data,
    "empty": lambda data: b"",
}
FIRST = ("cut", "deep list", "null")
PARTS: list[Any] = [None, [], {}, "x", -1, 10**400, 1e308, True, [[1]], {"a": 1}, "\n::error::x"]
# Each command that reads a run, by its first row.
COMMANDS = {
    command: next(line.split() for line in lines)
    for command, rows in INPUTS.items()
    if (lines := [row.line for row in rows.values() if row.kind == "run"])
}
LATER = ("weights-on-disk.json", "gradients.json", "locate.json", "fixes/state.json")


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("judged") / "run")
    spec = json.loads((run / "spec.json").read_text()) | {"fixes": ["all"]}
    (run / "spec.json").write_text(json.dumps(spec))
    with at_work(run, "check", load_spec(run), "mismatch check"):
        pass
    write_error(run, pass_label("fsdp:regrouped"), MismatchError("out of memory", "take less"))
    assert mismatch("compare", run).returncode == 1
    for name in LATER:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text('{"schema": "x/1"}')
        manifest.record(run, name, "x/1")
    return run


def said(command: list[object], where: object) -> None:
    done = mismatch(*command, timeout=60, HF_HUB_OFFLINE="1")
    output = done.stdout + done.stderr
    for word in ("Traceback", "bug in mismatch", "internal error", "\n::error::x"):
        assert word not in output, (where, output)
    assert done.returncode in (0, 1, 2), where
    # Of an incomplete report the code is 2 too, and its verdict is printed.
    assert done.returncode < 2 or "error: " in done.stderr or "verdict: " in output, where


@pytest.mark.parametrize(
    "kind", [*FIRST, *(pytest.param(k, marks=pytest.mark.grid) for k in WHOLE if k not in FIRST)]
)
def test_every_command_names_a_damaged_file(kind: str, judged: Path, tmp_path: Path) -> None:
    names = sorted(str(path.relative_to(judged)) for path in judged.rglob("*.json"))
    assert {*LATER, "errors/pass-fsdp-regrouped.json", "run.json"} <= {*names}
    at = list(WHOLE).index(kind)  # each kind begins with another command
    commands = cycle([*COMMANDS][at % len(COMMANDS) :] + [*COMMANDS][: at % len(COMMANDS)])
    for name in names:
        run = shutil.copytree(judged, tmp_path / "run")
        (run / name).write_bytes(WHOLE[kind]((run / name).read_bytes()))
        if name != manifest.NAME:
            signed(run, name)
        # Only compare reads all that experiments left; the commands take turns on other files.
        command = "compare" if name in LATER else next(commands)
        given = {"IN": run, "OUT.parquet": tmp_path / "out.parquet"}
        (tmp_path / "out.parquet").unlink(missing_ok=True)
        called = [command, *(given.get(each, each) for each in COMMANDS[command])]
        said(called, (command, name, kind))
        shutil.rmtree(run)


def signed(run: Path, name: str) -> None:
    """Enter the damaged file, as who edits it on purpose does."""
    if entry := manifest.entries(run).get(name):
        manifest.record(run, name, entry["schema"], entry["made_by"], entry["inputs"])


def places(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value; of lists those of the first two entries."""
    if at:
        yield at
    if isinstance(node, dict | list):
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))[:2]
        for key in keys:
            yield from places(node[key], (*at, key))


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.grid) for n in (1, 2, 3))])
def test_a_report_with_values_of_other_kinds_is_refused(seed: int, tmp_path: Path) -> None:
    random, example = Random(seed), ROOT / "examples" / "tiny-gpt-oss-no-sinks"
    document = json.loads((example / "report.json").read_text())
    shutil.copytree(example, tmp_path / "run")
    for _ in range(25):
        section = random.choice(list(document))
        place = (section, *random.choice([(), *places(document[section])]))
        changed = deepcopy(document)
        node: Any = changed
        for key in place[:-1]:
            node = node[key]
        junk = random.choice([*PARTS, "nothing"])
        if junk == "nothing":
            del node[place[-1]]
        else:
            node[place[-1]] = junk
        (tmp_path / "run" / "report.json").write_text(json.dumps(changed))
        command = random.choice([["report", "RUN"], ["report", "OLD", "RUN"],
                                 ["compare", "RUN", "--against", "OLD"]])  # fmt: skip
        given = {"RUN": tmp_path / "run", "OLD": example}
        said([given.get(each, each) for each in command], (place, junk))


def test_a_variant_without_its_metric_is_no_fault_of_ours(tmp_path: Path) -> None:
    example = ROOT / "examples" / "tiny-gpt-oss-no-sinks"
    run = shutil.copytree(example, tmp_path / "run")
    document = json.loads((run / "report.json").read_text())
    del document["two_passes"]["variants"][0]["metrics"]["ratio_not_one"]
    (run / "report.json").write_text(json.dumps(document))
    done = mismatch("report", run)
    assert done.returncode == 2
    assert "report.json" in done.stderr
    assert "Traceback" not in done.stderr
