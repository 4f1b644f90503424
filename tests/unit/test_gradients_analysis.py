"""Planted gradients are recovered: direction and size, and parameters without one."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch.errors import EmptyComparison
from mismatch.features.gradients.results import GradientRow, gradient_checks
from mismatch.types import Floats
from tests.gradients_fixture import (
    DIMENSION,
    compared,
    make_check,
    planted,
    reference_gradient,
    slices,
    sums_of,
)

REFERENCE = reference_gradient()
NOISE = np.random.default_rng(3).normal(size=DIMENSION)


def of(own: Floats, reference: Floats = REFERENCE) -> GradientRow:
    """The trainer's row where its gradient is ``own``, [D]."""
    check = compared(
        {"reference": sums_of(reference, reference), "baseline": sums_of(own, reference)}
    )
    return check.rows[0]


def test_sizes_and_directions_are_those_of_the_whole_batch() -> None:
    own = REFERENCE + NOISE
    for group, part in zip(of(own).groups, [slice(None), *slices().values()], strict=True):
        g, ref = own[part], REFERENCE[part]
        assert group.norm == pytest.approx(np.linalg.norm(g), rel=1e-12)
        assert group.norm_ratio == pytest.approx(group.norm / np.linalg.norm(ref), rel=1e-12)
        assert group.cosine == pytest.approx(
            g @ ref / np.linalg.norm(g) / np.linalg.norm(ref), abs=1e-12
        )


@pytest.mark.parametrize(("factor", "cosine"), [(1.0, 1.0), (2.0, 1.0), (-0.5, -1.0)])
def test_a_gradient_of_another_length_has_the_same_line(factor: float, cosine: float) -> None:
    for group in of(factor * REFERENCE).groups:
        assert group.cosine == pytest.approx(cosine, abs=1e-15)
        assert group.norm_ratio == pytest.approx(abs(factor), rel=1e-15)


def test_a_group_without_gradient_has_no_direction() -> None:
    baseline = make_check().row("baseline")
    assert baseline is not None
    sinks = next(group for group in baseline.groups if group.group == "sinks")
    assert (sinks.norm, sinks.norm_ratio, sinks.cosine, sinks.silent) == (0.0, 0.0, None, True)
    assert baseline.whole.cosine is not None


def test_a_group_without_a_gradient_fails_and_a_wrong_direction_alone_does_not() -> None:
    reference, own = REFERENCE.copy(), REFERENCE + NOISE

    def status() -> tuple[str, str]:
        sums = {"reference": sums_of(reference, reference), "baseline": sums_of(own, reference)}
        (check,) = gradient_checks(compared(sums))
        return check.status, check.detail

    assert status()[0] == "passed"
    own[slices()["sinks"]] = 0.0
    failed, detail = status()
    assert failed == "failed"
    assert "sinks" in detail
    assert "experts" not in detail
    # What the reference does not train either is no fault of the trainer.
    reference[slices()["sinks"]] = 0.0
    assert status()[0] == "passed"
    (group,) = [group for group in of(own, reference).groups if group.group == "sinks"]
    assert group.norm_ratio is group.cosine is None
    # A trainer whose pass failed is not judged.
    others = {id: sums for id, sums in planted().items() if id != "baseline"}
    assert gradient_checks(compared(others)) == ()


def test_a_reference_of_zero_is_an_error_with_its_reason() -> None:
    with pytest.raises(EmptyComparison, match="reference's is 0"):
        of(NOISE, np.zeros(DIMENSION))


def test_passes_that_failed_are_not_tested() -> None:
    sums = planted()
    del sums["fp16"]
    check = compared(sums, failed={"fp16": "out of memory"})
    assert [row.id for row in check.rows] == ["baseline", "attention-sinks"]
    assert check.not_tested[-1].endswith("out of memory")
    with pytest.raises(EmptyComparison, match="out of memory"):
        compared({"reference": sums["reference"]}, failed={"baseline": "out of memory"})
