"""The plan counts parameters in the interpreter of --python, and says first where it cannot."""

from __future__ import annotations

import io
import sys
import venv
from pathlib import Path

import pytest
from rich.console import Console

from mismatch.doctor.plan import plan
from mismatch.models import resolve_model
from mismatch.models.config import find_config
from mismatch.models.sizes import UnknownSize, sized
from mismatch.reports.plan import print_plan
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, TrainSpec

MODEL = resolve_model("tiny-gpt-oss")
FOUND = find_config(MODEL)


def test_another_interpreter_counts_the_same() -> None:
    assert sized(FOUND, sys.executable) == sized(FOUND)


def test_an_interpreter_without_torch_is_said_with_a_fix(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    for python in (tmp_path / "bare" / "bin" / "python", tmp_path / "none"):
        with pytest.raises(UnknownSize) as raised:
            sized(FOUND, str(python))
        assert "--python" in raised.value.fix


def test_a_plan_that_counts_nothing_says_so_first(tmp_path: Path) -> None:
    python = str(tmp_path / "none")
    engine, train = EngineSpec(model=MODEL, python=python), TrainSpec(model=MODEL, python=python)
    made = plan(CheckSpec(rollout=RolloutSpec(engine), train=train))
    assert made.sides == ()
    out = io.StringIO()
    print_plan(made, Console(file=out, width=400))
    first = out.getvalue().splitlines()[0]
    assert first.startswith("cannot")
    assert python in first
    assert "fix:" in first
