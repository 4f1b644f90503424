"""Staleness and mismatch, false labels and bias: planted sizes found, silence on noise."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch.analysis.drift import drift_of
from mismatch.analysis.weight_versions import false_labels, split_by_lag, split_by_old

ROWS, TOKENS = 160, 120
SEQUENCE = np.repeat(np.arange(ROWS), TOKENS)
PROMPT = np.arange(ROWS) // 4
LAG = np.arange(ROWS) % 2


def noise(seed: int, kind: str = "normal") -> np.ndarray:
    """Return [A] independent noise of unit variance, heavy-tailed or not."""
    draws = np.random.default_rng(seed)
    if kind == "t":
        return draws.standard_t(5, ROWS * TOKENS) / np.sqrt(5 / 3)
    return draws.standard_normal(ROWS * TOKENS)


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probabilities [A], and the scale of rounding, which grows with surprise."""
    rollout = -np.random.default_rng(seed + 1000).exponential(1.0, ROWS * TOKENS)
    return rollout, np.sqrt(-rollout)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("mismatch", "stale"), [(0.02, 0.02), (0.02, 0.0), (0.03, 0.015)])
def test_planted_lag_and_planted_mismatch_are_told_apart(
    seed: int, mismatch: float, stale: float
) -> None:
    rollout, scale = drawn(seed)
    late = LAG[SEQUENCE] > 0
    delta = scale * (mismatch * noise(seed) + late * stale * noise(seed + 50, "t"))
    found = split_by_lag(delta, rollout, LAG[SEQUENCE], PROMPT[SEQUENCE])
    assert found is not None
    size = float(np.sqrt((scale[late] ** 2).mean()))
    assert found.mismatch.value == pytest.approx(mismatch * size, rel=0.1)
    if stale:
        assert found.staleness.value == pytest.approx(stale * size, rel=0.2)
        assert found.stale
    else:
        assert not found.stale


def test_lag_alone_is_no_mismatch() -> None:
    """Of equal size to a mismatch elsewhere: at equal weights the sides agree nearly to the bit."""
    rollout, scale = drawn(3)
    delta = scale * (1e-5 * noise(3) + (LAG[SEQUENCE] > 0) * 0.02 * noise(4))
    found = split_by_lag(delta, rollout, LAG[SEQUENCE], PROMPT[SEQUENCE])
    assert found is not None
    assert found.share.value > 0.99
    assert found.mismatch.value < 0.05 * found.staleness.value


@pytest.mark.parametrize("seed", range(5))
def test_a_third_column_splits_every_token(seed: int) -> None:
    engine, later = 0.02 * noise(seed), 0.03 * noise(seed + 9)
    found = split_by_old(engine + later, engine, PROMPT[SEQUENCE])
    assert found.mismatch.value == pytest.approx(0.02, rel=0.05)
    assert found.staleness.value == pytest.approx(0.03, rel=0.05)
    assert found.share.value == pytest.approx(9 / 13, rel=0.1)


def scores(seed: int, lag: np.ndarray, sizes: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows' scores of lags [N], and their tokens."""
    draws = np.random.default_rng(seed)
    tokens = draws.integers(20, 200, len(lag))
    spread = 0.8 * np.sqrt(50 / tokens) * draws.standard_normal(len(lag)) / 4
    return np.log(np.array(sizes))[lag] + spread, tokens


@pytest.mark.parametrize("seed", range(100))
def test_right_labels_are_never_doubted(seed: int) -> None:
    lag = np.random.default_rng(seed).integers(0, 3, 300)
    for sizes in ([1.0, 1.5, 2.0], [1.0, 4.0, 6.0], [1.0, 1.0, 1.0]):
        assert false_labels(*scores(seed, lag, sizes), lag) == ()


@pytest.mark.parametrize("seed", range(10))
def test_rows_that_claim_newer_weights_than_they_had_are_named(seed: int) -> None:
    lag = np.random.default_rng(seed).integers(0, 2, 200)
    score, tokens = scores(seed, lag, [1.0, 5.0])
    claimed = lag.copy()
    wrong = np.flatnonzero(lag == 1)[:12]
    claimed[wrong] = 0
    (found,) = false_labels(score, tokens, claimed)
    assert (found.claimed, found.fits) == (0, 1)
    assert set(found.rows) <= set(wrong.tolist())
    assert len(found.rows) >= 9


@pytest.mark.parametrize("seed", range(100))
def test_independent_noise_makes_no_drift(seed: int) -> None:
    size = (0.003, 0.02, 0.06)[seed % 3]
    delta = size * noise(seed, ("normal", "t")[seed % 2])
    for centre in (0.0, size**2 / 2):  # as noise, and as noise of a normalised distribution
        found = drift_of(delta - centre, SEQUENCE, PROMPT, None)
        assert found is not None
        assert not found.biased
        assert not found.steep


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("bias", [1e-3, -1e-3])
def test_a_bias_of_a_thousandth_of_a_nat_is_named(seed: int, bias: float) -> None:
    found = drift_of(0.01 * noise(seed) - 0.01**2 / 2 + bias, SEQUENCE, PROMPT, None)
    assert found is not None
    assert found.biased
    assert found.bias == pytest.approx(bias, rel=0.3)
    assert found.crossing == pytest.approx(100, rel=0.6)


@pytest.mark.parametrize("seed", range(10))
def test_a_bias_of_each_row_grows_with_length(seed: int) -> None:
    """Of no sign over all rows, so that only the growth with length shows it."""
    own = np.random.default_rng(seed).normal(0, 0.01, ROWS)
    found = drift_of(0.01 * noise(seed) + own[SEQUENCE], SEQUENCE, PROMPT, None)
    assert found is not None
    assert found.steep
    assert found.exponent is not None
    assert found.exponent.value > 0.85
