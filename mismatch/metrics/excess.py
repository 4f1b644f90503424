"""How much more one difference spreads than another: formulas of mismatch/analysis/square.py.

They stand outside the registry of metrics, because no comparison of two scorings has them.
"""

from __future__ import annotations

import numpy as np

from mismatch.metrics.registry import POSITIVE, REAL, Bounds, Combine, Metric, floats
from mismatch.types import Floats

WINSOR = 0.995  # quantile of both sides' |differences| together, above which they are cut


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
