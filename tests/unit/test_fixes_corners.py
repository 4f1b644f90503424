"""The verdict with a fix: correctness is measured again, or said to be open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mismatch.analysis.levels import judge, verdict
from mismatch.analysis.scored_rollout import ScoredRollout
from mismatch.experiments.fixes.planning import Variant
from mismatch.experiments.fixes.results import Corners, variant_of
from mismatch.keys import FLOAT32, Key
from mismatch.run import store
from mismatch.run.long_rollout import FOLDER, long_rollout
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, TrainSpec
from mismatch.types import Scoring
from tests.unit.test_square import SPEC, rollout, run_of

NAMES = ["logprob_abs_diff_mean", "k3_kl", "ratio_mean", "ratio_outside_2"]


WRONG = 1e6  # times the rounding of float32: another function
PRECISE = variant_of(SPEC, "fp32-lm-head", "")  # changes precision alone
LONG_TOKENS = 2000
OTHER_TOKENS = variant_of(SPEC, "fp32-lm-head", "fixes/engine")
OTHER_FUNCTION = variant_of(SPEC, "experts-implementation=eager", "")


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
    checks, unmeasured = corners_of(tmp_path).correctness(sides, comparison, PRECISE)
    status_of = {check.id: check.status for check in checks}
    assert unmeasured == ""
    assert status_of["excess-trainer"] == status
    assert status_of["excess-engine"] == status_of["implementation-gap"] == "passed"
    correct = verdict(judge(comparison, "bf16 dense"), checks, "bf16 dense", unmeasured).correctness
    assert correct is not None
    assert status_of["implementation-gap-trainer"] == "passed"
    assert correct.status == {"passed": "healthy", "failed": "broken"}[status]


@pytest.mark.parametrize(
    ("own", "fixed", "variant", "status"),
    [
        (1.0, None, PRECISE, "passed"),  # the run's own pass shows the same function
        (WRONG, None, PRECISE, "failed"),
        (WRONG, 1.0, OTHER_FUNCTION, "passed"),
        (1.0, WRONG, OTHER_FUNCTION, "failed"),
        (1.0, None, OTHER_FUNCTION, "inconclusive"),  # not made, or refused by its kernel
    ],
)
def test_the_float32_pass_is_that_of_the_function_with_the_fix(
    tmp_path: Path, own: float, fixed: float | None, variant: Variant, status: str
) -> None:
    corners, sides = corners_of(tmp_path), sides_of(1.0)
    run, names = run_of({}), {"fsdp:fp32": own, "fix:experts-implementation=eager:fp32": fixed}
    reference, engine = run.usable["reference:fp32"], run.usable["vllm:fp32"]
    for name, factor in names.items():
        if factor is not None:
            away = factor * (engine.logprobs - reference.logprobs)
            made = replace(reference, name=name, logprobs=reference.logprobs + away)
            store.save_scoring(tmp_path, made, run.rollout, made_by=SPEC.train)
    checks, _ = corners.correctness(sides, sides.comparison(NAMES, 0), variant)
    status_of = {check.id: check.status for check in checks}
    assert status_of["implementation-gap-trainer"] == status


def test_only_a_fix_of_the_function_needs_a_float32_pass_more() -> None:
    def needs(name: str, spec: CheckSpec = SPEC) -> bool:
        passes = variant_of(spec, name, "").passes(spec)
        return f"fix:{name}:fp32" in [pass_.name for pass_ in passes]

    assert needs("experts-implementation=eager")
    assert not any(map(needs, ("fp32-lm-head", "fp32", "fp16", "micro-batch=1024")))
    assert [pass_.name for pass_ in OTHER_TOKENS.passes(SPEC)] == ["fix:fp32-lm-head"]
    quick = replace(SPEC, quick=True)
    assert not needs("experts-implementation=eager", quick)


def test_tokens_of_their_own_leave_correctness_open(tmp_path: Path) -> None:
    sides = sides_of(1.0)
    comparison = sides.comparison(NAMES, 0)
    checks, unmeasured = corners_of(tmp_path).correctness(sides, comparison, OTHER_TOKENS)
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
        (corners_of(tmp_path / "quick", quick), "--depth quick"),
        (corners_of(tmp_path / "bare", without="reference:fp32"), "no float32 reference"),
    ):
        checks, unmeasured = corners.correctness(sides, comparison, PRECISE)
        assert [check.id for check in checks] == ["enough-data"]
        assert word in unmeasured


def with_long(directory: Path, trainer: str, off: float) -> Corners:
    """A run with a long sequence, on which one trainer is off."""
    corners = corners_of(directory)
    long = long_rollout(run_of({}).rollout, LONG_TOKENS)
    (directory / FOLDER).mkdir()
    store.save_rollout(directory / FOLDER, long)
    exact = np.full(long.n_actions, -1.0)
    facts = {"dtype": "fp32", "device": "cpu", "logprobs_temperature": 1.0}
    for name in ("reference:long", "vllm:long", "fsdp:long", trainer):
        values = exact - off * (name == trainer)
        scoring = Scoring(name, long.token_ids[long.actions], values, facts)
        store.save_scoring(directory / FOLDER, scoring, long)
    return corners


@pytest.mark.parametrize(
    ("variant", "trainer", "off", "status"),
    [
        (OTHER_FUNCTION, Key("fix:experts-implementation=eager").over_long(FLOAT32), 0.0, "passed"),
        (OTHER_FUNCTION, Key("fix:experts-implementation=eager").over_long(FLOAT32), 0.5, "failed"),
        (OTHER_FUNCTION, "fsdp:long", 0.0, "inconclusive"),  # the run's own says nothing of it
        (PRECISE, "fsdp:long", 0.5, "failed"),  # the run's own shows the same function
        (PRECISE, "fsdp:long", 0.0, "passed"),
    ],
)
def test_the_verdict_with_a_fix_covers_the_long_sequence(
    tmp_path: Path, variant: Variant, trainer: str, off: float, status: str
) -> None:
    sides = sides_of(1.0)
    corners = with_long(tmp_path, trainer, off)
    checks, _ = corners.correctness(sides, sides.comparison(NAMES, 0), variant)
    status_of = {check.id: check.status for check in checks}
    assert status_of["long-sequence-trainer"] == status
    assert status_of["long-sequence-engine"] == "passed"


def test_a_fix_of_the_function_scores_the_long_sequence_in_float32_and_as_it_runs() -> None:
    def passes(name: str, spec: CheckSpec = SPEC) -> list[str]:
        made = variant_of(spec, name, "").passes(spec)
        return [pass_.name for pass_ in made if pass_.folder == FOLDER]

    name = "experts-implementation=eager"
    assert passes(name) == [f"fix:{name}:fp32:long", f"fix:{name}:long"]
    assert passes(f"fp32+{name}") == [f"fix:fp32+{name}:fp32:long"]
    assert not any(map(passes, ("fp32-lm-head", "fp32", "fp16", "micro-batch=1024")))
    assert passes(name, replace(SPEC, context_length=0)) == []
