"""Every planted fault of docs/evidence/known-issues.md through the commands that a user types.

Faults of recorded numbers are tests/cli/test_planted_faults.py. Here a trainer or its weights hold
the fault, at its largest strength, for `score` and `compare`, or an engine, for `check`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.calibration import plugin
from benchmarks.known_faults import FAULTS, Fault
from benchmarks.known_issue_page import PAGE
from benchmarks.known_issue_runs import ENGINES, EngineFault
from mismatch.models import resolve_model
from tests import known_trainer
from tests.cli.test_planted_faults import RECORDED
from tests.command import mismatch
from tests.contract.conftest import installed
from tests.shared import once

MODEL = "tiny-gpt-oss"
SIZE = ("--num-prompts", 16, "--samples-per-prompt", 2, "--max-tokens", 48)
IN_TRAINER = [fault for fault in FAULTS if fault.place in ("trainer", "packing", "template")]
IN_WEIGHTS = [fault for fault in FAULTS if fault.place == "weights"]
KINDS = ("function-differs", "weights-differ")  # of which side-off is the weakest


def report_of(run: Path, *flags: object, **env: str) -> dict[str, Any]:
    done = mismatch("score", run, "--nproc-per-node", 1, *flags, timeout=600, **env)
    assert done.returncode == 0, done.stderr
    done = mismatch("compare", run)
    assert done.returncode == 1, done.stderr  # it is no healthy run
    report: dict[str, Any] = json.loads((run / "report.json").read_text())
    return report


def assert_named(report: dict[str, Any], fault: Fault | EngineFault, *sides: str) -> None:
    causes = report["causes"]["ranked"]
    expected = {*fault.expected, *(["side-off"] if {*KINDS} & {*fault.expected} else [])}
    assert causes[0]["id"] in expected
    assert {cause["side"] for cause in causes} <= {fault.side, "either", *sides}
    assert report["headline"]["side_at_fault"] in (fault.side, "either", None, *sides)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the transformers engine sampled, with the reference and the plain forward."""

    def make(folder: Path) -> None:
        run, what = folder / "run", ("--model", MODEL, "--engine", "transformers", *SIZE)
        assert mismatch("rollout", *what, "--out", run, timeout=600).returncode == 0
        scorer = ("--scorer", "tests.plain_trainer:Plain", "--nproc-per-node", 1)
        assert mismatch("score", run, *scorer, timeout=600).returncode == 0

    return once(tmp_path_factory, "known-issues", make) / "run"


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("fault", IN_TRAINER, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_trainers_fault_is_named(sampled: Path, tmp_path: Path, fault: Fault) -> None:
    run, theirs = tmp_path / "run", shutil.ignore_patterns("fsdp*")
    shutil.copytree(sampled, run, ignore=theirs)
    scorer = ("--scorer", "tests.known_trainer:Planted")
    assert_named(report_of(run, *scorer, **{known_trainer.NAME: fault.name}), fault)


@pytest.mark.grid
@pytest.mark.parametrize("fault", IN_WEIGHTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_weights_that_the_engine_did_not_get_are_named(
    sampled: Path, tmp_path: Path, fault: Fault
) -> None:
    """Trainer and reference read newer weights than the engine sampled with."""
    run, moved = tmp_path / "run", str(tmp_path / "moved")
    ours = shutil.ignore_patterns("fsdp*", "reference*", "plain*")
    shutil.copytree(sampled, run, ignore=ours)
    known_trainer.save_moved(resolve_model(MODEL), fault, moved)
    report = report_of(run, "--model", moved, "--scorer", "tests.plain_trainer:Plain")
    assert_named(report, fault)


@pytest.mark.grid
@pytest.mark.stack  # an engine's start each
@pytest.mark.parametrize("fault", ENGINES, ids=lambda fault: fault.name)
def test_an_engines_fault_is_named(tmp_path: Path, fault: EngineFault) -> None:
    if "sglang" in fault.flags and not installed("sglang"):
        pytest.skip("engine: no SGLang here")
    paths = os.pathsep.join([str(plugin(tmp_path)), os.environ.get("PYTHONPATH", "")])
    env = {"PLANTED_FAULT": fault.plant, "PYTHONPATH": paths} if fault.plant else {}
    run, few = tmp_path / "run", ("--no-locate", "--no-explain", "--exact-kl", 0)
    what = ("--model", MODEL, *SIZE, "--nproc-per-node", 1, *few, *fault.flags)
    done = mismatch("check", *what, "--out", run, timeout=600, **env)
    assert done.returncode == 1, done.stderr
    assert_named(json.loads((run / "report.json").read_text()), fault)


def test_the_page_has_no_fault_that_no_command_saw() -> None:
    rows = re.findall(r"^\| ([^|]+?) \| (?:\[|–)", PAGE.read_text("utf-8"), re.MULTILINE)
    through_commands = {*RECORDED, *(each.name for each in (*IN_TRAINER, *IN_WEIGHTS, *ENGINES))}
    assert len(rows) > 40
    assert {*rows} == through_commands
    assert {fault.name for fault in FAULTS} <= through_commands
