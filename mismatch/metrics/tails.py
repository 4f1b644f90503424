"""Whether few units carry a number: then no interval from these units can be trusted."""

from __future__ import annotations

import math

import numpy as np

from mismatch.metrics.registry import columns
from mismatch.types import Floats

HEAVY_SHARE = 0.2  # of a metric, carried by one unit
KEPT_SHARE = 0.02  # of the terms, by a floor from a sample; the Hill index needs 0.01
SAMPLED = 1 << 16
HILL_LEAST = 2.0  # tail index below which the variance is infinite


def hill_index(terms: Floats) -> float:
    """Tail index of the largest 1 % (at least 10) of |terms|; infinite where there is no tail.

    Under 2 the variance is infinite and no interval from this sample can be trusted.
    """
    return _hill(np.abs(terms), len(terms))


def _hill(size: Floats, units: int) -> float:
    """:func:`hill_index` of ``units`` terms, from those sizes that are not too small to count."""
    top = max(10, units // 100)
    if units < 10 * top or np.count_nonzero(size) <= top:
        return math.inf
    ordered = np.partition(size, len(size) - top - 1)
    threshold, largest = ordered[-top - 1], ordered[len(size) - top :]
    mean_excess = float(np.log(largest / threshold).mean())
    return 1.0 / mean_excess if mean_excess > 0.0 else math.inf


def heavy_tail(terms: Floats) -> bool:
    """Whether few units carry the number: one has over 20 %, or the Hill index is under 2."""
    return any(_heavy(column) for column in columns(terms).T)


def _heavy(terms: Floats) -> bool:
    stride = len(terms) // SAMPLED
    for sample in (terms[::stride], None) if stride > 3 else (None,):
        tail = Tail(sample)
        tail.add(terms)
        heavy = tail.heavy(len(terms))
        if heavy is not None:
            break
    return bool(heavy)


class Tail:
    """The large ones of many terms that come in parts, and the sum of all sizes.

    Args:
        sample: some of the terms: the floor under which sizes are not kept comes from them.
    """

    def __init__(self, sample: Floats | None = None) -> None:
        self.floor = 0.0
        if sample is not None:
            self.floor = float(np.quantile(np.abs(sample), 1.0 - KEPT_SHARE))
        self.total, self._kept = 0.0, list[Floats]()

    def add(self, terms: Floats) -> None:
        size = np.abs(terms)
        self.total += float(size.sum())
        self._kept.append(size.compress(size >= self.floor if self.floor > 0.0 else size > 0.0))

    def heavy(self, units: int) -> bool | None:
        """:func:`heavy_tail` of ``units`` terms; None where the floor was too high to tell."""
        if self.total <= 0.0:
            return False
        size = np.concatenate(self._kept)
        if self.floor > 0.0 and len(size) <= max(10, units // 100):
            return None
        return bool(size.max() > HEAVY_SHARE * self.total) or _hill(size, units) < HILL_LEAST
