"""Whether few units carry a number: then no interval from these units can be trusted."""

from __future__ import annotations

import math

import numpy as np

from mismatch.metrics.registry import columns
from mismatch.types import Floats

HEAVY_SHARE = 0.2  # of a metric, carried by one unit
SAMPLED, KEPT_SHARE = 1 << 16, 0.02  # the index needs the largest 0.01
HILL_LEAST = 2.0  # tail index below which the variance is infinite


def hill_index(size: Floats) -> float:
    """Tail index of the largest 1 % (at least 10) of |terms|; infinite where there is no tail.

    Under 2 the variance is infinite and no interval from this sample can be trusted.
    """
    units = len(size)
    top = max(10, units // 100)
    if units < 10 * top:
        return math.inf
    if (stride := units // SAMPLED) > 1:  # look among those above a floor that a sample gives
        floor = np.quantile(size[::stride], 1.0 - KEPT_SHARE)
        large = size[size >= floor] if floor > 0.0 else size[size > 0.0]
        size = large if floor <= 0.0 or len(large) > top else size
    if np.count_nonzero(size) <= top:  # all but the largest are 0
        return math.inf
    ordered = np.partition(size, len(size) - top - 1)
    threshold, largest = ordered[len(size) - top - 1], ordered[len(size) - top :]
    mean_excess = float(np.log(largest / threshold).mean())
    return 1.0 / mean_excess if mean_excess > 0.0 else math.inf


def heavy_tail(terms: Floats) -> bool:
    """Return whether few units carry the number: one has over 20 %, or Hill's index is under 2."""
    return any(heavy_sizes(np.abs(column)) for column in columns(terms).T)


def heavy_sizes(size: Floats) -> bool:
    """:func:`heavy_tail` of one column of |terms|, [U]."""
    total = float(size.sum())
    if total <= 0.0:
        return False
    return bool(size.max() > HEAVY_SHARE * total) or hill_index(size) < HILL_LEAST
