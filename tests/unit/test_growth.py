"""Growth over recorded steps: three large steps show it, small or level ones do not."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch.features.recorded.told import FEW_STEPS, FEW_TOKENS, LEAST_STEPS, growth_of
from mismatch.metrics.row_sums import Step


def steps_of(sizes: list[float], tokens: int) -> list[Step]:
    return [Step(at, tokens, size, size**2, 0.0, 1.0) for at, size in enumerate(sizes, start=1)]


@pytest.mark.parametrize(
    ("sizes", "tokens", "grows"),
    [
        ([0.01, 0.02, 0.03], FEW_TOKENS, True),
        ([0.01, 0.02, 0.03], FEW_TOKENS - 1, False),  # too few tokens for so few steps
        ([0.01, 0.03], 10 * FEW_TOKENS, False),
        ([0.01, 0.03, 0.019], 10 * FEW_TOKENS, False),  # not to the end
        ([0.03, 0.02, 0.01], 10 * FEW_TOKENS, False),
        ([0.01, 0.01, 0.02, 0.02, 0.03], 50, True),
    ],
)
def test_growth_needs_steps_and_tokens(sizes: list[float], tokens: int, grows: bool) -> None:
    assert (growth_of(steps_of(sizes, tokens)) is not None) is grows


@pytest.mark.parametrize("count", [FEW_STEPS, LEAST_STEPS, 20])
def test_level_steps_do_not_grow_by_chance(count: int) -> None:
    """Steps of a clean run: |delta| of heavy tails, 300 draws of the smallest steps that count."""
    rng, found = np.random.default_rng(0), 0
    for _ in range(300):
        means = np.abs(0.01 * rng.standard_t(3, (count, FEW_TOKENS))).mean(axis=1)
        found += growth_of(steps_of(means.tolist(), FEW_TOKENS)) is not None
    assert found == 0
