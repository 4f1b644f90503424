"""How much more one difference spreads than another: formulas of mismatch/analysis/square.py.

They stand outside the registry of metrics, because no comparison of two scorings has them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch.metrics.registry import POSITIVE, REAL, Bounds, Combine, Metric, floats
from mismatch.types import Floats

WINSOR = 0.995  # quantile of both sides' |differences| together, above which they are cut
BOUNDS = 256  # of a sign test, at most


def excess_terms(away: Floats, yardstick: Floats) -> Floats:
    """Terms of the metrics below, [A, 4], of both differences cut at one quantile of both."""
    side, plain = winsorised(away, yardstick), winsorised(yardstick, away)
    return floats(np.stack([side * side, plain * plain, np.abs(side), np.abs(plain)], axis=1))


def correlation_terms(one: Floats, other: Floats) -> Floats:
    """Terms of the correlation of two sides' roundings, [A, 5], each cut at its own quantile."""
    one, other = winsorised(one, one), winsorised(other, other)
    return floats(np.stack([one, other, one * other, one * one, other * other], axis=1))


def winsorised(values: Floats, others: Floats) -> Floats:
    """``values`` cut to the ``WINSOR`` quantile of both arrays' sizes together."""
    cut = float(np.quantile(np.abs(np.concatenate([values, others])), WINSOR))
    return floats(np.clip(values, -cut, cut))


@dataclass(frozen=True, slots=True)
class SignTest:
    """Units of two paired samples beyond one bound, and the chance of so many in the first alone.

    Attributes:
        bound: the one at which the chance is smallest.
        beyond, other_beyond: units beyond it in the first sample and in the other.
        chance: of as many discordant units in the first, if each could as well be the other's.
    """

    bound: float
    beyond: int
    other_beyond: int
    chance: float


def sign_test(sizes: Floats, others: Floats, only_largest: bool = False) -> SignTest:
    """Whether more of ``sizes`` [P] than of ``others`` [P] lie beyond a bound, at the worst bound.

    Bounds are values of ``others``; ``only_largest``: its largest alone. The chance is that of one
    bound and not corrected for their number.
    """
    from scipy.stats import binom

    bounds = np.unique(others)
    if only_largest:
        bounds = bounds[-1:]
    elif len(bounds) > BOUNDS:
        bounds = bounds[np.linspace(0, len(bounds) - 1, BOUNDS).astype(int)]
    far, other = (values[None, :] > bounds[:, None] for values in (sizes, others))
    mine, theirs = (far & ~other).sum(axis=1), (other & ~far).sum(axis=1)
    chances = binom.sf(mine - 1, mine + theirs, 0.5)
    worst = int(np.flatnonzero(chances == chances.min())[-1])
    return SignTest(float(bounds[worst]), int(far[worst].sum()), int(other[worst].sum()),
                    float(chances[worst]))  # fmt: skip


def _terms(terms: Floats) -> Floats:
    return terms


def _rms(means: Floats) -> Floats:
    return floats(np.sqrt(means[..., 0]))


def _size(means: Floats) -> Floats:
    return floats(means[..., 2])


def _rms_ratio(means: Floats) -> Floats:
    return floats(np.sqrt(means[..., 0] / means[..., 1]))


def _size_ratio(means: Floats) -> Floats:
    return floats(means[..., 2] / means[..., 3])


def _correlation(means: Floats) -> Floats:
    one, other, product, square, square_other = np.moveaxis(means, -1, 0)
    spread = (square - one * one) * (square_other - other * other)
    return np.where(spread > 0.0, (product - one * other) / np.sqrt(spread), np.nan)


def _metric(name: str, combine: Combine, unit: str, bounds: Bounds = POSITIVE) -> Metric:
    return Metric(name, _terms, "ratio", unit, combine=combine, bounds=bounds)


RMS = _metric("square_rms", _rms, "nats")
SIZE = _metric("square_size", _size, "nats")
EXCESS = _metric("square_excess", _rms_ratio, "ratio")
EXCESS_SIZE = _metric("square_excess_size", _size_ratio, "ratio")
CORRELATION = _metric("square_correlation", _correlation, "correlation", REAL)
