"""Exact order statistics of values that pass by in blocks: a histogram first, then what lies near.

Histogram    where quantiles lie, to 0.4 % of their size
Ranked       the values around one cell of it, and how many of each prompt lie below
Spans        fills several ``Ranked`` of one family in one look at each block
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mismatch.metrics.blocks import Block
from mismatch.metrics.registry import floats
from mismatch.types import Floats, Ints

Span = tuple[float, float, int]
REACH = 8  # cells on either side of a quantile: its interval mostly ends there
SHIFT = 44  # bits of a float64 below its histogram cell: 8 of the fraction's remain
TINY = float(np.nextafter(0.0, 1.0))
LOWEST = int(np.array(2.0**-40).view(np.int64)) >> SHIFT  # everything smaller shares a cell


class Counted(NamedTuple):
    """A histogram of one block."""

    counts: Ints
    zeros: int
    least: float
    most: float


@dataclass
class Histogram:
    """How many values lie in each cell; values are >= 0 (else one cell holds all).

    Attributes:
        counts: cells from ``LOWEST`` on; the first also holds everything below, and zeros.
    """

    counts: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    zeros: int = 0
    least: float = np.inf
    most: float = -np.inf

    @staticmethod
    def look(values: Floats) -> Counted:
        least, most = float(values.min()), float(values.max())
        if least < 0.0 or not np.isfinite(most):
            return Counted(np.zeros(0, np.int64), 0, least, most)
        zeros = 0 if least > 0.0 else len(values) - int(np.count_nonzero(values))
        return Counted(np.bincount(cells(values)), zeros, least, most)

    def keep(self, found: Counted) -> None:
        self.zeros += found.zeros
        self.least, self.most = min(self.least, found.least), max(self.most, found.most)
        more = len(found.counts) - len(self.counts)
        if more > 0:
            self.counts = np.append(self.counts, np.zeros(more, np.int64))
        self.counts[: len(found.counts)] += found.counts

    def around(self, rank: int) -> Span:
        """The cell of a rank (from 1) and its neighbours: lower and upper edge, values below.

        Zeros have a span of their own, [0, smallest float).
        """
        if self.least < 0.0 or not np.isfinite(self.most):
            return -np.inf, np.nan, 0  # one cell for all
        if rank <= self.zeros:
            return 0.0, TINY, 0
        below = np.cumsum(self.counts)
        place = int(np.searchsorted(below, rank, "left"))
        low = max(place - REACH, 0)
        before = int(below[low - 1]) if low else self.zeros
        return (TINY if low == 0 else edge(low)), edge(place + REACH + 1), before


def cells(values: Floats) -> Ints:
    """Histogram cell of each value >= 0: its exponent and the first bits of its fraction."""
    made: Ints = np.ascontiguousarray(values).view(np.int64) >> SHIFT
    made -= LOWEST
    np.maximum(made, 0, out=made)
    return made


def edge(cell: int) -> float:
    """Lower edge of a cell but the first."""
    return float(np.array((cell + LOWEST) << SHIFT).view(np.float64))


class Near(NamedTuple):
    """What one block holds of a span."""

    values: Floats
    prompts: Ints  # of the values
    sequences: Ints  # prompt of each of the block's sequences
    below: Ints  # values of each of them that lie below the span


@dataclass
class Ranked:
    """The values within a span of a histogram, and how many of each prompt lie below it."""

    span: Span
    below: Floats  # [P]
    values: list[Floats] = field(default_factory=list)
    prompts: list[Ints] = field(default_factory=list)

    @property
    def of_zeros(self) -> bool:
        """Half of all tokens can be exactly 0: those are counted as below, not kept."""
        return self.span[1] == TINY

    @property
    def start(self) -> float:
        """Lower edge of what is kept."""
        return TINY if self.of_zeros else self.span[0]

    def keep(self, near: Near) -> None:
        self.values.append(near.values)
        self.prompts.append(near.prompts)
        np.add.at(self.below, near.sequences, near.below)

    def value(self, rank: int) -> float:
        """The value of a rank (from 1) that lies in the span."""
        if self.of_zeros:
            return 0.0
        held = np.concatenate(self.values)
        place = rank - self.span[2] - 1
        return float(np.partition(held, place)[place])

    def holds(self, rank: int) -> bool:
        """Whether a rank (from 1) lies in the span."""
        if self.of_zeros:
            return False
        return 0 < rank - self.span[2] <= sum(map(len, self.values))

    def under(self, value: float) -> Floats:
        """How many values of each prompt are at or below one in the span, [P]."""
        if self.of_zeros:
            return self.below
        inside = np.concatenate(self.prompts)[np.concatenate(self.values) <= value]
        return floats(self.below + np.bincount(inside, minlength=len(self.below)))


class Spans:
    """Fills several :class:`Ranked`, lowest first: each looks only at what the last left over."""

    def __init__(self, ranked: Sequence[Ranked]) -> None:
        self._ranked = sorted(ranked, key=lambda one: one.start)

    def look(self, values: Floats, block: Block) -> list[Near]:
        edges = np.append(block.starts, len(values))
        lengths, place, found = np.diff(edges), np.arange(0), []
        for number, ranked in enumerate(self._ranked):
            above = np.flatnonzero(values >= ranked.start)
            place, values = place[above] if number else above, values[above]
            below = lengths - np.diff(np.searchsorted(place, edges))
            inside = place[:0] if ranked.of_zeros else np.flatnonzero(~(values >= ranked.span[1]))
            owner = np.searchsorted(block.starts, place[inside], "right") - 1
            found.append(Near(values[inside], block.prompts[owner], block.prompts, below))
        return found

    def keep(self, found: Sequence[Near]) -> None:
        for ranked, near in zip(self._ranked, found, strict=True):
            ranked.keep(near)
