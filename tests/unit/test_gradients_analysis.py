"""Planted gradients are recovered: direction, size, and how sure they are."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.experiments.gradients.analysis import check_gradients, gradient_checks
from mismatch.experiments.gradients.coefficients import Sketched, fisher
from mismatch.experiments.gradients.types import GradientCheck, GradientRow
from mismatch.metrics.inference import jackknife
from mismatch.types import Estimate, Floats
from tests.gradients_fixture import (
    DIMENSION,
    REFERENCE,
    TRAIN,
    batch_of,
    make_check,
    planted,
    reference_parts,
    slices,
    taken,
)


def held(check: GradientCheck, id: str = "baseline") -> GradientRow:
    row = check.row(id)
    assert row is not None
    return row


def value(estimate: Estimate | None) -> float:
    assert estimate is not None
    return estimate.value


def ends(estimate: Estimate | None) -> tuple[float, float]:
    assert estimate is not None
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low, estimate.high


def of(own: Floats, reference: Floats, slots: int = 512) -> GradientRow:
    """The baseline's row where its prompts' gradients are ``own``, [P, D]."""
    gradients = [
        taken(REFERENCE, reference, slots=slots),
        taken(TRAIN, own, reference, slots=slots),
    ]
    return held(check_gradients(gradients, batch_of(len(own))))


def test_sizes_and_directions_are_those_of_the_whole_batch() -> None:
    reference = reference_parts(8)
    own = reference + np.random.default_rng(3).normal(size=reference.shape)
    row = of(own, reference)
    for group, part in [("all", slice(None)), *slices().items()]:
        got = next(entry for entry in row.groups if entry.group == group)
        g, ref = own.sum(axis=0)[part], reference.sum(axis=0)[part]
        cosine = g @ ref / np.linalg.norm(g) / np.linalg.norm(ref)
        assert got.norm == pytest.approx(np.linalg.norm(g), rel=1e-12)
        assert value(got.norm_ratio) == pytest.approx(got.norm / np.linalg.norm(ref), rel=1e-12)
        assert value(got.cosine) == pytest.approx(cosine, abs=1e-12)
        for estimate in (got.norm_ratio, got.cosine):
            low, high = ends(estimate)
            assert low < value(estimate) < high


@pytest.mark.parametrize("size", [1e-3, 1e-6, 1e-9])
def test_a_tiny_error_is_not_lost_to_cancellation(size: float) -> None:
    reference = reference_parts(8)
    own = reference + size * np.random.default_rng(3).normal(size=reference.shape)
    row = of(own, reference)
    gap = float(fisher(Sketched.of(own, reference).gap(np.ones((1, 8))))[0])
    low, high = ends(row.whole.cosine)
    assert low <= math.tanh(gap) <= high


def test_identical_gradients_are_exactly_that() -> None:
    reference = reference_parts(8)
    row = of(reference, reference)
    for group in row.groups:
        assert value(group.cosine) == 1.0
        assert ends(group.cosine) == (1.0, 1.0)
        assert value(group.norm_ratio) == 1.0


def test_a_gradient_of_another_length_points_the_same_way() -> None:
    reference = reference_parts(8)
    whole = of(2.0 * reference, reference).whole
    assert value(whole.cosine) == pytest.approx(1.0, abs=1e-15)
    assert ends(whole.norm_ratio) == pytest.approx((2.0, 2.0))


def test_a_group_without_gradient_has_no_direction() -> None:
    check = make_check()
    sinks = next(entry for entry in held(check).groups if entry.group == "sinks")
    assert (sinks.norm, sinks.cosine) == (0.0, None)
    assert value(sinks.norm_ratio) == 0.0
    assert sinks.silent


def test_a_group_that_the_reference_does_not_move_is_not_compared() -> None:
    reference = reference_parts(8)
    reference[:, slices()["sinks"]] = 0.0
    own = reference + 0.1
    sinks = next(entry for entry in of(own, reference).groups if entry.group == "sinks")
    assert sinks.norm > 0.0
    assert sinks.norm_ratio is sinks.cosine is None


def covered(prompts: int, seeds: int, what: str) -> float:
    """Share of batches whose interval covers the number over all batches."""
    draw, intervals, drawn = np.random.default_rng(5), [], []
    common, shift = draw.normal(size=(2, 60))
    for _ in range(seeds):
        size = draw.gamma(2.0, 0.5, (prompts, 1))
        reference = size * (0.3 * common + draw.normal(size=(prompts, 60)))
        own = reference + size * (0.3 * shift + 0.3 * draw.normal(size=(prompts, 60)))
        sketched = Sketched.of(own, reference)
        weights = sketched.weights
        values = sketched.log_norm(weights) if what == "norm" else fisher(sketched.gap(weights))
        drawn.append(float(values[0]))
        intervals.append(jackknife(values, float(values[0]), float))
    truth = float(np.mean(drawn))
    return sum(ends is not None and ends[0] <= truth <= ends[1] for ends in intervals) / seeds


@pytest.mark.parametrize("what", ["norm", "cosine"])
def test_intervals_cover(what: str) -> None:
    assert 0.88 < covered(12, 300, what) < 0.99


def test_what_is_the_same_by_construction_says_so() -> None:
    check = make_check()
    assert {row.id: row.same_as for row in check.rows if row.same_as} == {"fp32": "reference"}


def test_rows_come_in_order_with_their_labels() -> None:
    assert [(row.id, row.kind) for row in make_check().rows] == [
        ("baseline", "baseline"),
        ("attention-sinks", "fix"),
        ("fp16", "fix"),
        ("fp32", "fix"),
    ]


def test_one_prompt_has_values_and_no_intervals() -> None:
    row = held(make_check(prompts=1))
    assert value(row.whole.cosine) < 1.0
    assert row.whole.cosine is not None
    assert (row.whole.cosine.low, row.whole.cosine.flags) == (None, ("one-prompt",))


def test_prompts_without_a_gradient_are_no_evidence() -> None:
    reference = reference_parts(8)
    own = reference + np.random.default_rng(3).normal(size=reference.shape)
    idle = np.zeros((4, DIMENSION))
    alone, beside = of(own, reference), of(np.vstack([own, idle]), np.vstack([reference, idle]))
    assert beside.whole.cosine is not None
    assert beside.whole.cosine.n_prompts == 8
    assert ends(beside.whole.cosine) == ends(alone.whole.cosine)


def test_a_reference_of_zero_is_an_error_with_its_reason() -> None:
    nothing = np.zeros((4, DIMENSION))
    with pytest.raises(EmptyComparison, match="reference's is 0"):
        of(nothing, nothing)


def test_a_group_without_a_gradient_fails_and_a_wrong_direction_alone_does_not() -> None:
    reference = reference_parts(8)
    own = reference + np.random.default_rng(3).normal(size=reference.shape)
    gradients = [taken(REFERENCE, reference), taken(TRAIN, own, reference)]
    (sound,) = gradient_checks(check_gradients(gradients, batch_of(8)))
    assert sound.status == "passed"
    own[:, slices()["sinks"]] = 0.0
    gradients[1] = taken(TRAIN, own, reference)
    (dead,) = gradient_checks(check_gradients(gradients, batch_of(8)))
    assert (dead.id, dead.status) == ("gradients", "failed")
    assert "sinks" in dead.detail
    assert "experts" not in dead.detail
    # What the reference does not train either is no fault of the trainer.
    reference[:, slices()["sinks"]] = 0.0
    gradients = [taken(REFERENCE, reference), taken(TRAIN, own, reference)]
    assert gradient_checks(check_gradients(gradients, batch_of(8)))[0].status == "passed"
    assert gradient_checks(None) == []


def test_a_gradient_that_is_not_finite_is_named_and_left_out() -> None:
    gradients, batch = planted(4)
    broken = replace(gradients[3], squared_norm=np.full(4, np.inf))
    check = check_gradients([*gradients[:3], broken, *gradients[4:]], batch)
    assert check.row("fp16") is None
    (untested,) = [entry for entry in check.not_tested if "fix:fp16" in entry]
    assert untested.endswith(": not finite")


def test_passes_that_failed_are_not_tested() -> None:
    gradients, batch = planted(4)
    failed = replace(batch, failed={"fix:fp16": "out of memory"})
    check = check_gradients(
        [gradient for gradient in gradients if gradient.name != "fix:fp16"], failed
    )
    (untested,) = [entry for entry in check.not_tested if "fix:fp16" in entry]
    assert untested.endswith(failed.failed["fix:fp16"])
    with pytest.raises(EmptyComparison, match="out of memory"):
        check_gradients([], failed)


def test_gradients_of_other_batches_are_refused() -> None:
    gradients, batch = planted(4)
    other = replace(gradients[1], prompts=gradients[1].prompts + 1)
    with pytest.raises(MismatchError, match="another batch"):
        check_gradients([gradients[0], other], batch)


def test_an_interval_needs_two_prompts_and_defined_values() -> None:
    assert jackknife(np.array([1.0, 1.0]), 1.0, float) is None
    assert jackknife(np.array([1.0, np.nan, 1.0]), 1.0, float) is None
    assert jackknife(np.array([1.0, np.inf, 1.0]), 1.0, float) is None
    assert jackknife(np.array([1.0, 1.0, 1.0]), 1.0, float) == (1.0, 1.0)
