"""The worker runs where the user's stack is: it needs nothing that only the tool needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mismatch.processes.tasks import (
    EngineSession,
    ReadCache,
    Score,
    TrainerSession,
    read_session,
    write_session,
)
from mismatch.run.messages import pass_label, read_error
from mismatch.run.store import load_scoring, save_rollout
from mismatch.specs import EngineSpec, Pass, RolloutSpec, TrainSpec
from tests.checkpoints import make, rollout

ABSENT = ("typer", "rich", "pandas", "matplotlib", "scipy", "httpx", "pydantic")
WORK = f"""
import sys
from importlib.machinery import PathFinder
found = PathFinder.find_spec
def find_spec(name, *rest):
    return None if name.partition(".")[0] in {ABSENT} else found(name, *rest)
PathFinder.find_spec = staticmethod(find_spec)  # as where they are not installed
from mismatch.processes.workers import engine
from mismatch.processes.workers.session import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_world_scores_without_what_only_the_tool_needs(tmp_path: Path) -> None:
    model = str(make("llama", tmp_path / "model"))
    save_rollout(tmp_path, rollout())
    passes = (
        Pass("fsdp", TrainSpec(model)),
        Pass("fix:bad", TrainSpec(model, attention="no-sinks"), optional="any"),
        Pass("fsdp:grad", TrainSpec(model, grad=True), optional="memory"),
    )
    session = write_session(TrainerSession(tmp_path, passes))
    outside = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", WORK, str(session)],
        env=outside | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    actions = rollout().n_actions
    assert all(len(load_scoring(tmp_path, n).logprobs) == actions for n in ("fsdp", "fsdp:grad"))
    error = read_error(tmp_path, pass_label("fix:bad"))  # and the others went on
    assert error is not None
    assert "no attention sinks" in error.message


def test_a_session_is_read_as_it_was_written(tmp_path: Path) -> None:
    spec = RolloutSpec(EngineSpec("m", env=(("A", "1"),)))
    for session in (
        EngineSession(tmp_path, spec),
        EngineSession(tmp_path, spec, (Score("vllm:fp32"), ReadCache("cache.json")), "other"),
        TrainerSession(tmp_path, (Pass("fsdp", TrainSpec("m"), "long", "any"),), guided=True),
    ):
        assert read_session(write_session(session)) == session
