"""Killed at every stage and inside writes, then resumed: the numbers of an uninterrupted run.

The argument: one run is killed again and again, each time by SIGKILL between a temporary file and
its name: in the engine's process, in rank 0, and in the tool. What was finished stays byte for
byte, and in the end every artefact with numbers equals that of a run that nobody touched.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from mismatch.run import manifest, store

from .conftest import TINY_RUN, Run

pytestmark = pytest.mark.slow
KILLER = Path(__file__).parent / "killer"
# Where to die, and how the command then ends: the tool survives its workers.
Kill = tuple[str, int]
KILLS: tuple[Kill, ...] = (
    ("transformers-prefill.parquet", 2),  # the engine, while the trainer waits
    ("jobs/train-go.json", -signal.SIGKILL),  # the tool, while the trainer waits
    ("fsdp-regrouped.parquet", 2),  # rank 0, in the second of five passes
    ("manifest.json", 2),  # rank 0, recording
    ("report.json", -signal.SIGKILL),
)
# In the tool: `make test` (test_failures kills a rank there); every moment: with the grids.
ONE = (KILLS[1],)


def check(cwd: Path, *flags: str, kill_at: str = "") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(KILLER), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "mismatch", "check", *TINY_RUN, *flags],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        env={**os.environ, "KILL_AT": kill_at, "PYTHONPATH": path},
    )


def finished(run: Path) -> dict[str, tuple[str, int]]:
    """Artefacts of finished stages with their checksum and time of writing.

    The last artefact of a stage says that it is finished: a scoring, or the comparison.
    """
    entries = manifest.entries(run)
    names = set()
    for mark in entries:
        if mark.startswith("scores/") or mark == "comparison.json":
            names |= {mark, *entries[mark]["inputs"]}
    return {name: (entries[name]["sha256"], (run / name).stat().st_mtime_ns) for name in names}


def left_running(cwd: Path) -> list[psutil.Process]:
    processes = []
    for process in psutil.process_iter():
        try:
            if "mismatch.processes.workers" in " ".join(process.cmdline()) and process.cwd() == str(
                cwd
            ):
                processes.append(process)
        except psutil.Error:
            continue
    return processes


@pytest.fixture(
    scope="module",
    params=[pytest.param(ONE, id="one"), pytest.param(KILLS, id="all", marks=pytest.mark.grid)],
)
def killed_and_resumed(request, tmp_path_factory):
    cwd = tmp_path_factory.mktemp("killed")
    before: dict[str, tuple[str, int]] = {}
    for step, (kill_at, code) in enumerate(request.param):
        done = check(cwd, *(["--resume"] if step else []), kill_at=kill_at)
        assert done.returncode == code, f"{kill_at}\n{done.stdout}"
        (run,) = (cwd / "runs").iterdir()
        end = time.monotonic() + 30
        while left_running(cwd):
            assert time.monotonic() < end, left_running(cwd)
            time.sleep(0.1)
        now = finished(run)
        kept = {name: now.get(name) for name in before}
        assert kept == before, f"{kill_at}: what was finished was made again"
        before = now
    done = check(cwd, "--resume")
    Run(run, done.returncode, done.stdout).require_judged()
    assert {name: finished(run)[name] for name in before} == before
    return run, done.stdout, len(request.param)


def test_a_resumed_run_says_so_and_comes_to_a_verdict(killed_and_resumed):
    run, output, kills = killed_and_resumed
    assert output.startswith(f"resuming runs/{run.name}")
    assert "rollout: there already" in output
    assert output.strip().splitlines()[-1].startswith("verdict: ")
    commands = json.loads((run / "run.json").read_text())["invocations"]
    assert [command["finished"] is None for command in commands] == [True] * kills + [False]


def test_the_tokens_and_logprobs_are_those_of_an_uninterrupted_run(killed_and_resumed, tiny_run):
    run, *_ = killed_and_resumed
    ours, theirs = store.load_rollout(run), store.load_rollout(tiny_run)
    np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
    names = store.scoring_names(tiny_run)
    assert store.scoring_names(run) == names
    assert len(names) == 7
    for name in names:
        resumed, other = store.load_scoring(run, name), store.load_scoring(tiny_run, name)
        np.testing.assert_array_equal(resumed.logprobs, other.logprobs, err_msg=name)
        if other.routing is not None:
            np.testing.assert_array_equal(resumed.routing.ids, other.routing.ids, err_msg=name)


def test_the_report_is_that_of_an_uninterrupted_run(killed_and_resumed, tiny_run):
    run, *_ = killed_and_resumed
    resumed, other = (json.loads((r / "report.json").read_text()) for r in (run, tiny_run))
    for part in ("verdict", "comparisons", "noise_floor", "checks", "not_tested"):
        assert resumed[part] == other[part], part
    assert (run / "comparison.json").read_bytes() == (tiny_run / "comparison.json").read_bytes()


def test_no_partial_file_of_a_finished_artefact_is_taken_for_it(killed_and_resumed):
    run, *_ = killed_and_resumed
    for name in manifest.entries(run):
        manifest.verify(run, name)
    assert not list(run.rglob("*.partial"))
