"""Optional passes of a training world: ranks that fail alike go on, ranks that part do not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch.errors import MismatchError, OutOfMemory
from mismatch.processes.tasks import TrainerSession, allowed, go_path, let_score, write_session
from mismatch.processes.workers.train import Passes
from mismatch.run.messages import pass_label, read_error
from mismatch.specs import Pass, TrainSpec

NO_MEMORY = "out of memory"

PARTED = """
import os
from datetime import timedelta
from mismatch.training import distributed

world = distributed.World.start()
world.meet("first")
os.write(1, b"met\\n")  # in one piece: print writes the line break apart
if world.rank == 1:
    try:
        distributed.MEET_TIMEOUT = timedelta(seconds=1)
        world.meet("second")
    except RuntimeError:
        os.write(1, b"parted\\n")
else:
    world.gather([])  # as the others do where one rank alone has failed
os._exit(0)
"""


class Ranks:
    """A world of which only the meeting is real."""

    rank = 0

    def __init__(self, parted: bool) -> None:
        self.parted = parted
        self.places: list[str] = []

    def meet(self, name: str) -> None:
        self.places.append(name)
        if self.parted:
            raise RuntimeError("wait timeout")


def passes(run_dir: Path, world: Ranks, fails: bool) -> tuple[Passes, Pass]:
    world_passes: Any = Passes(world, TrainerSession(run_dir, ()))  # type: ignore[arg-type]

    def run_pass(item: Pass) -> None:
        if fails:
            raise RuntimeError(f"{NO_MEMORY}\nmore")

    world_passes.run_pass = run_pass
    return world_passes, Pass("fix:fp32", TrainSpec(), optional="any")


def test_a_failure_of_all_ranks_is_noted_and_the_world_goes_on(tmp_path: Path) -> None:
    world = Ranks(parted=False)
    runner, item = passes(tmp_path, world, fails=True)
    runner.score(item)
    runner.score(item)
    noted = read_error(tmp_path, pass_label("fix:fp32"))
    assert noted is not None
    assert noted.message == f"RuntimeError: {NO_MEMORY}"
    assert len(set(world.places)) == 2  # every meeting has a name of its own


@pytest.mark.parametrize(
    ("error", "goes_on"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (OutOfMemory("rank 0 is out of GPU memory while it loads", "--offload"), True),
        (RuntimeError("a fault"), False),
        (MismatchError("refused"), False),
    ],
)
def test_a_side_pass_may_lack_memory_and_nothing_else(
    tmp_path: Path, error: Exception, goes_on: bool
) -> None:
    runner, _ = passes(tmp_path, Ranks(parted=False), fails=False)
    runner.loaded = object()  # type: ignore[assignment]
    scored = []

    def run_pass(item: Pass) -> None:
        if item.name == "reference:fp32":
            raise error
        scored.append(item.name)

    runner.run_pass = run_pass  # type: ignore[method-assign]
    runner.load = lambda item: None  # type: ignore[method-assign]
    names = ("fsdp", "reference:fp32", "fsdp:grad")
    items = [Pass(n, TrainSpec(), "", "" if n == "fsdp" else "memory") for n in names]
    noted = pass_label("reference:fp32")
    if not goes_on:
        runner.score(items[0])
        with pytest.raises(type(error)):
            runner.score(items[1])
        assert read_error(tmp_path, noted) is None
        return
    for item in items:
        runner.score(item)
    assert scored == ["fsdp", "fsdp:grad"]
    assert runner.loaded is None  # what is half gathered is not used again
    assert read_error(tmp_path, noted) is not None


@pytest.mark.parametrize("fails", [True, False])
def test_ranks_that_part_end_the_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setenv("RANK", "1")
    runner, item = passes(tmp_path, Ranks(parted=True), fails)
    with pytest.raises(MismatchError, match=r"parted .*fix:fp32"):
        runner.score(item)
    noted = read_error(tmp_path, pass_label("fix:fp32"))
    assert (noted is not None) is fails  # the rank that failed says why


@pytest.mark.slow
def test_a_rank_that_is_elsewhere_is_not_waited_for(tmp_path: Path) -> None:
    script = tmp_path / "parted.py"
    script.write_text(PARTED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.count("met\n") == 2, done.stdout
    assert "parted" in done.stdout.splitlines(), done.stdout


def timed(run_dir: Path, names: list[str], rank: int, late: int, allowed_s: float) -> list[str]:
    """Score passes of 20 ms in a world in which ``late`` is what all ranks' answers add up to."""
    (run_dir / "rollout.parquet").touch()
    jobs = [Pass(n, TrainSpec(), "", "any" if n.startswith("fix:") else "") for n in names]
    jobs.append(Pass("fix:elsewhere", TrainSpec(), "unmade", "any"))
    world: Any = Ranks(parted=False)
    world.rank, world.sum = rank, lambda said: said + late
    runner: Any = Passes(world, TrainerSession(run_dir, tuple(jobs)))
    scored: list[str] = []
    runner.run_pass = lambda item: (time.sleep(0.02), scored.append(item.name))
    runner.score_all(set(), allowed_s)
    return scored


def test_optional_passes_end_with_their_time_and_no_others(tmp_path: Path) -> None:
    names = ["fsdp", "fix:a", "fix:b", "fsdp:grad", "fix:c"]
    assert timed(tmp_path, names, 0, 0, 1e-3) == ["fsdp", "fix:a", "fsdp:grad"]
    assert timed(tmp_path, names, 0, 0, 1e9) == names  # and none without a rollout


def test_ranks_do_what_the_clock_of_the_first_says(tmp_path: Path) -> None:
    names = ["fsdp", "fix:a", "fix:b"]
    assert timed(tmp_path, names, 1, 1, 1e9) == ["fsdp"]
    assert timed(tmp_path, names, 1, 0, 1e-3) == names


def test_a_world_does_not_score_by_what_an_earlier_one_was_told(tmp_path: Path) -> None:
    session = TrainerSession(tmp_path, (), guided=True)
    write_session(session)
    let_score(session, 3.0)
    assert allowed(session) == 3.0
    write_session(session)
    assert not go_path(session).exists()
