"""Planted faults of known issues through the commands: they end with a report that names them.

Detectors alone are tests/unit/test_known_issues.py. Here checks, verdict and renderings read what
detectors saw: in a run directory with float32 (`compare`), and in a dump of two arrays
(`postmortem`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.known_faults import FAULTS
from mismatch.analysis.diagnosis.case import Case
from tests import drawn_pair as drawn
from tests.invented_run import saved
from tests.unit.test_causes_rounding import leaking, rolled

from ..command import mismatch
from ..conftest import grid

RECORDED = {fault.name: fault for fault in FAULTS if fault.place == "recorded"}
# These plant noise of the engine, which only float32 tells from the trainer's.
BY_FLOAT32 = ("fp8 tile from a position on", "state lost at chunks")
LEAK, FOURTH = "packing-leak", "rows whose first tokens fit there alone"
KEPT = ("shift", "appended end at 0.0", "16-bit log-softmax")


def planted(name: str, which: int) -> Case:
    fault = RECORDED[name]
    case = drawn.draw(50 + which, length=80 if name in BY_FLOAT32 else 40).case()
    made: Case = fault.plant(case, fault.strengths[which], np.random.default_rng(which))
    return made


def reported(done: Any, run: Path) -> dict[str, Any]:
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads((run / "report.json").read_text())
    return report


def assert_named(report: dict[str, Any], name: str) -> None:
    first, fault = report["causes"]["ranked"][0], RECORDED[name]
    assert first["id"] in fault.expected
    assert first["side"] in (fault.side or "trainer", "either")  # what is moved is the trainer's
    verdict = report["verdict"]
    if first["status"] == "confirmed" and verdict["status"] == "broken":
        assert f"({first['id']}, confirmed" in verdict["reason"]
        assert report["next"][0].startswith(f"Fix {first['id']}: ")


def dump(case: Case, path: Path) -> Path:
    """Both sides of a case, a line per sequence."""
    rollout = case.rollout
    with path.open("w") as file:
        for number, row in enumerate(case.rows):
            start, end = rollout.offsets[number : number + 2]
            entry = {
                "token_ids": rollout.token_ids[start:end].tolist(),
                "action_mask": rollout.action_mask[start:end].tolist(),
                "logprobs": case.left[row].tolist(),
                "train_logprobs": case.right[row].tolist(),
                "prompt_id": int(rollout.prompt_index[number]),
            }
            file.write(json.dumps(entry) + "\n")
    return path


@pytest.mark.parametrize("which", grid([0, 1, 2], 0))
@pytest.mark.parametrize("name", grid(RECORDED, *KEPT, *BY_FLOAT32))
def test_compare_names_a_fault_in_a_run(tmp_path: Path, name: str, which: int) -> None:
    case, run = planted(name, which), tmp_path / "run"
    others = {each: scoring.logprobs for each, scoring in case.others.items()}
    saved(run, case.rollout, case.left, case.right, others)
    report = reported(mismatch("compare", run, cwd=tmp_path), run)
    assert_named(report, name)


@pytest.mark.parametrize("which", grid([0, 1, 2], 0))
@pytest.mark.parametrize("name", grid([n for n in RECORDED if n not in BY_FLOAT32], *KEPT))
def test_postmortem_names_a_fault_in_a_dump(tmp_path: Path, name: str, which: int) -> None:
    path, run = dump(planted(name, which), tmp_path / "dump.jsonl"), tmp_path / "run"
    report = reported(mismatch("postmortem", path, "--out", run, cwd=tmp_path), run)
    assert_named(report, name)


@pytest.mark.parametrize("by", [1, -2])
def test_a_shift_that_few_rows_show_ends_with_a_report(tmp_path: Path, by: int) -> None:
    """The detector of shifts then gives a fourth number: rows whose first tokens fit elsewhere."""
    case = rolled(leaking(0, 1200), by)
    others = {each: scoring.logprobs for each, scoring in case.others.items()}
    run = saved(tmp_path / "run", case.rollout, case.left, case.right, others)
    report = reported(mismatch("compare", run, cwd=tmp_path), run)
    shift = next(c for c in report["causes"]["ranked"] if c["id"] == "misalignment")
    numbers = {each["what"]: each["value"] for each in shift["evidence"]}
    assert numbers["best lag"] == -by
    assert numbers[FOURTH] > 0
    assert next(c["status"] for c in report["checks"] if c["id"] == "alignment") == "failed"


def leaking_run(folder: Path, **trainer: object) -> Path:
    """Packs whose rows see each other, and the pass of one row at a time, which is right."""
    case, right = leaking(0, 1200), drawn.draw(0).case().right
    others = {each: scoring.logprobs for each, scoring in case.others.items()}
    others["fsdp:alone"] = right
    facts = {"layout": "packing", **trainer}
    return saved(folder, case.rollout, case.left, case.right, others, trainer=facts)


def test_a_confirmed_cause_is_the_reason_and_its_framework_says_what_to_set(
    tmp_path: Path,
) -> None:
    run = leaking_run(tmp_path / "run", backend="verl", code="verl 0.9.1, FSDPEngineWithLMHead")
    done = mismatch("compare", run, cwd=tmp_path)
    report = reported(done, run)
    assert "packing-leak, confirmed" in report["verdict"]["reason"]
    assert "importance-ratio failed" not in report["verdict"]["reason"]
    setting = "actor_rollout_ref.model.use_remove_padding=False"
    assert report["next"][0].startswith(f"Fix {LEAK}: In verl")
    explained = {"importance-ratio", "trainer-self-agreement", "alignment"}
    assert not any(f"Fix {check}" in step for step in report["next"] for check in explained)
    assert done.stdout.rstrip().splitlines()[-1].count("packing-leak") == 1
    github = mismatch("report", run, "--format", "github", cwd=tmp_path).stdout
    places = done.stdout, github, (run / "report.md").read_text(), (run / "report.html").read_text()
    assert [setting in text.replace("\\_", "_").replace("\n", "") for text in places] == [True] * 4
    assert "mismatch importance-ratio" not in github


def test_a_trainer_of_no_known_framework_gets_the_fix_alone(tmp_path: Path) -> None:
    report = reported(mismatch("compare", leaking_run(tmp_path / "run")), tmp_path / "run")
    assert report["next"][0].startswith("Fix packing-leak: ")
    assert "verl" not in report["next"][0]
