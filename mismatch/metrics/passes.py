"""What is kept of the tokens while their blocks pass by.

    Columns      sums per prompt of every term, and the largest terms (how heavy is the tail?)
    Folds        maxima, minima, totals
    Histogram    where quantiles lie, to 0.4 % of their size
    Ranked       the values around a few cells of that histogram: exact order statistics

All see the same blocks, :func:`mismatch.metrics.shared.sharing` the work that they have in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mismatch.errors import MismatchError
from mismatch.metrics.blocks import Arrays, Block
from mismatch.metrics.intervals import is_heavy
from mismatch.metrics.registry import Array, Metric, columns, floats, folded
from mismatch.types import Floats, Ints

Span = tuple[float, float, int]
REACH = 4  # cells on either side of a quantile: its interval mostly ends there
SHIFT = 44  # bits of a float64 below its histogram cell: 8 of the fraction's remain
TINY = float(np.nextafter(0.0, 1.0))
LOWEST = int(np.array(2.0**-40).view(np.int64)) >> SHIFT  # everything smaller shares a cell
Origins = Mapping[str, object]


def parts_of(metric: Metric, arrays: Arrays, origins: Origins, units: int) -> tuple[Array, ...]:
    """A metric's terms in a block, one array [units] per column."""
    found = metric.parts(arrays, origins.get(metric.name))
    for part in found:
        if part.shape != (units,):
            raise MismatchError(
                f"{metric.name}: terms of shape {part.shape} for {units} {metric.reduction}s",
                "its arrays must hold one row per action token",
            )
    return found


class Tail:
    """The largest ``top + 1`` of many sizes (>= 0): those above a floor, which only ever rises."""

    def __init__(self, top: int, floor: float = -1.0) -> None:
        self.floor, self._top = floor, top
        self._parts: list[Floats] = []
        self._held, self._limit = 0, max(3 * (top + 1), 1 << 15)

    def add(self, size: Floats) -> None:
        found = size[size > self.floor] if self.floor >= 0.0 else size.copy()
        self._parts.append(found)
        self._held += len(found)
        if self._held > self._limit:
            largest = np.partition(self.held, self._held - self._top - 1)[-self._top - 1 :]
            self._parts, self._held, self.floor = [largest], len(largest), float(largest.min())

    @property
    def held(self) -> Floats:
        return np.concatenate(self._parts) if self._parts else np.empty(0)

    @property
    def complete(self) -> bool:
        """Whether what was left out is certainly not among the largest (or is 0)."""
        return self._held > self._top or self.floor <= 0.0


@dataclass
class Column:
    """One array of terms, over all blocks.

    Attributes:
        constant: the value of all terms so far; None once two differ.
        size: sum of |term|, where some are negative (else it is the sum).
    """

    tail: Tail
    constant: float | None
    size: float = 0.0
    negative: bool = False

    def add(self, terms: Floats, total: float) -> None:
        if self.constant is not None and not (terms == self.constant).all():
            self.constant = None
        signed = float(terms.min()) < 0.0
        size = np.abs(terms) if signed else terms
        self.negative = self.negative or signed
        self.size += float(size.sum()) if signed else total
        self.tail.add(size)


class Columns:
    """Sums per prompt of the terms of many metrics; a term that several use is summed once."""

    def __init__(
        self, metrics: Sequence[Metric], prompts: int, top: int, floors: Mapping[int, float]
    ) -> None:
        self.metrics, self._top, self._floors = metrics, top, floors
        self.slots: dict[str, tuple[int, ...]] = {}
        self.columns: list[Column] = []
        self.sums = np.zeros((0, prompts))

    def add(self, block: Block, origins: Origins) -> None:
        """Within :func:`sharing`."""
        edges = np.append(True, np.diff(block.prompts) != 0)
        starts, prompts = block.starts[edges], block.prompts[edges]
        distinct: dict[int, int] = {}
        kept: list[Array] = []  # as long as they live, their ids are theirs
        rows: list[Floats] = []
        for metric in self.metrics:
            slots = []
            for part in parts_of(metric, block.arrays, origins, block.n_tokens):
                if id(part) not in distinct:
                    distinct[id(part)] = len(kept)
                    kept.append(part)
                    rows.append(self._sum(len(rows), floats(part), starts))
                slots.append(distinct[id(part)])
            if self.slots.setdefault(metric.name, tuple(slots)) != tuple(slots):
                raise AssertionError(f"{metric.name} shares its terms in some blocks only")
        self._collect(np.stack(rows), prompts)

    def _sum(self, slot: int, terms: Floats, starts: Ints) -> Floats:
        sums = np.add.reduceat(terms, starts)
        if slot == len(self.columns):
            tail = Tail(self._top, self._floors.get(slot, -1.0))
            self.columns.append(Column(tail, float(terms[0])))
        self.columns[slot].add(terms, float(sums.sum()))
        return floats(sums)

    def _collect(self, rows: Floats, prompts: Ints) -> None:
        if not len(self.sums):
            self.sums = np.zeros((len(rows), self.sums.shape[1]))
        found, code = np.unique(prompts, return_inverse=True)
        if len(found) < len(prompts):
            rows = np.stack([np.bincount(code, weights=row, minlength=len(found)) for row in rows])
            self.sums[:, found] += rows
        else:
            self.sums[:, prompts] += rows

    def floors(self, share: float) -> dict[int, float]:
        """A floor for each column's tail that about ``share`` of its terms exceed."""
        made = {}
        for slot, column in enumerate(self.columns):
            held = column.tail.held
            kth = min(int(share * len(held)) + 1, len(held))
            made[slot] = float(np.partition(held, len(held) - kth)[len(held) - kth])
        return made

    def incomplete(self) -> list[Metric]:
        """Metrics with a column whose largest terms the floors have partly cut off."""
        bad = {slot for slot, column in enumerate(self.columns) if not column.tail.complete}
        return [metric for metric in self.metrics if bad & set(self.slots[metric.name])]

    def heavy(self, metric: Metric, units: int) -> bool:
        for slot in self.slots[metric.name]:
            column = self.columns[slot]
            if is_heavy(column.tail.held, column.size, units):
                return True
        return False


@dataclass
class Folds:
    """Extremes: largest, smallest or total terms over all blocks."""

    metrics: Sequence[Metric]
    found: dict[str, Floats] = field(default_factory=dict)

    def add(self, block: Block, origins: Origins) -> None:
        for metric in self.metrics:
            assert metric.fold is not None
            parts = parts_of(metric, block.arrays, origins, block.n_tokens)
            here = [float(folded(metric.fold, part)[0]) for part in parts]
            rows = [here, *([self.found[metric.name]] if metric.name in self.found else [])]
            self.found[metric.name] = folded(metric.fold, columns(floats(rows)))


@dataclass
class Histogram:
    """How many values lie in each cell; values are >= 0 (a negative one makes ``signed`` true).

    Attributes:
        counts: cells from ``LOWEST`` on; the first also holds everything below, but not zeros.
    """

    counts: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    zeros: int = 0
    total: int = 0
    least: float = np.inf
    most: float = -np.inf

    def add(self, values: Floats) -> None:
        self.total += len(values)
        self.zeros += len(values) - int(np.count_nonzero(values))
        self.least = min(self.least, float(values.min()))
        self.most = max(self.most, float(values.max()))
        if self.least < 0.0 or not np.isfinite(self.most):
            return
        here = np.bincount(cells(values))
        if len(here) > len(self.counts):
            self.counts = np.append(self.counts, np.zeros(len(here) - len(self.counts), np.int64))
        self.counts[: len(here)] += here

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


@dataclass
class Ranked:
    """The values within a span of a histogram, and how many of each prompt lie below it."""

    span: Span
    below: Floats  # [P]
    values: list[Floats] = field(default_factory=list)
    prompts: list[Ints] = field(default_factory=list)

    @property
    def of_zeros(self) -> bool:
        """Half of all tokens can be exactly 0: those are counted, not kept."""
        return self.span[1] == TINY

    def add(self, values: Floats, block: Block, *, by_prompt: bool) -> None:
        low, high, _ = self.span
        if not self.of_zeros:
            inside = np.flatnonzero((values >= low) & ~(values >= high))
            self.values.append(values[inside])
            if by_prompt:
                place = np.searchsorted(block.starts, inside, "right") - 1
                self.prompts.append(block.prompts[place])
        if by_prompt:
            under = (values < (high if self.of_zeros else low)).view(np.int8)
            counts = np.add.reduceat(under, block.starts, dtype=np.int64)
            np.add.at(self.below, block.prompts, counts)

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
