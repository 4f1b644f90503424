"""The verdict with a fix: correctness is measured again, or said to be open."""

from __future__ import annotations

from pathlib import Path

import pytest

from mismatch.analysis.levels import judge, verdict
from mismatch.analysis.scored_rollout import ScoredRollout
from mismatch.experiments.fixes.results import Corners
from mismatch.run import store
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, TrainSpec
from tests.unit.test_square import SPEC, rollout, run_of

NAMES = ["logprob_abs_diff_mean", "k3_kl", "ratio_mean", "ratio_outside_2"]


def corners_of(directory: Path, spec: CheckSpec = SPEC, without: str = "") -> Corners:
    """A run whose own trainer is 30 times as far from float32 as its rounding."""
    broken = run_of({"fsdp": 30.0})
    store.save_rollout(directory, broken.rollout, made_by=spec.rollout)
    for name, scoring in broken.usable.items():
        if name != without:
            store.save_scoring(directory, scoring, broken.rollout, made_by=spec.train)
    return Corners(directory, spec)


def sides_of(factor: float) -> ScoredRollout:
    """The run's own tokens, scored by a trainer with a fix."""
    mended = run_of({"fsdp": factor})
    return ScoredRollout(rollout(), mended.decode, mended.train)


@pytest.mark.parametrize(("factor", "status"), [(1.0, "passed"), (3.0, "failed")])
def test_the_trainers_corner_is_that_with_the_fix(
    tmp_path: Path, factor: float, status: str
) -> None:
    sides = sides_of(factor)
    comparison = sides.comparison(NAMES, 0)
    checks, unmeasured = corners_of(tmp_path).correctness(sides, comparison, same_tokens=True)
    status_of = {check.id: check.status for check in checks}
    assert unmeasured == ""
    assert status_of["excess-trainer"] == status
    assert status_of["excess-engine"] == status_of["implementation-gap"] == "passed"
    correct = verdict(judge(comparison, "bf16 dense"), checks, "bf16 dense", unmeasured).correctness
    assert correct is not None
    # The trainer with a fix was not scored in float32: nothing unmeasured is healthy.
    assert status_of["implementation-gap-trainer"] == "warning"
    assert correct.status == {"passed": "tolerable", "failed": "broken"}[status]


def test_tokens_of_their_own_leave_correctness_open(tmp_path: Path) -> None:
    sides = sides_of(1.0)
    comparison = sides.comparison(NAMES, 0)
    checks, unmeasured = corners_of(tmp_path).correctness(sides, comparison, same_tokens=False)
    assert [check.id for check in checks] == ["enough-data"]
    after = verdict(judge(comparison, "bf16 dense"), checks, "bf16 dense", unmeasured)
    assert after.correctness is not None
    assert (after.status, after.correctness.status) == ("inconclusive", "inconclusive")
    assert unmeasured
    assert unmeasured in after.correctness.reason


def test_a_run_without_float32_passes_leaves_it_open_too(tmp_path: Path) -> None:
    sides = sides_of(1.0)
    comparison = sides.comparison(NAMES, 0)
    quick = CheckSpec(
        rollout=RolloutSpec(engine=EngineSpec(model="m")), train=TrainSpec(model="m"), quick=True
    )
    for corners, word in (
        (corners_of(tmp_path / "quick", quick), "--quick"),
        (corners_of(tmp_path / "bare", without="reference:fp32"), "no float32 reference"),
    ):
        checks, unmeasured = corners.correctness(sides, comparison, same_tokens=True)
        assert [check.id for check in checks] == ["enough-data"]
        assert word in unmeasured
