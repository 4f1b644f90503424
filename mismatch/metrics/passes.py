"""What is kept of the tokens while their blocks pass by.

    Columns      sums per prompt of every term, and the largest terms (how heavy is the tail?)
    Ends         the smallest and largest deltas: where the largest terms of most metrics lie
    Folds        maxima, minima, totals

Each has ``look``, which computes from one block and changes nothing, and ``keep``, which adds what
was found: blocks can be looked at by several threads, and are kept in their order. All see the same
blocks, :func:`mismatch.metrics.shared.sharing` the work that they have in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mismatch.errors import MismatchError
from mismatch.metrics.blocks import Arrays, Block
from mismatch.metrics.intervals import HILL_LEAST, carries, hill_of_largest, is_heavy
from mismatch.metrics.registry import Array, Metric, columns, floats, folded
from mismatch.metrics.shared import sharing
from mismatch.types import Floats, Ints

Origins = Mapping[str, object]
Slots = dict[str, tuple[int, ...]]


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


def slots_of(metrics: Sequence[Metric], arrays: Arrays, origins: Origins) -> Slots:
    """The slots of each metric's columns: a term that several use is one array, and has one.

    Args:
        arrays: of a few tokens; which terms are shared does not depend on them.
    """
    few = {name: array[:2] for name, array in arrays.items()}
    units = len(next(iter(few.values())))
    numbers: dict[int, int] = {}
    kept: list[Array] = []  # as long as they live, their ids are theirs
    made: Slots = {}
    with sharing(), np.errstate(all="ignore"):
        for metric in metrics:
            parts = parts_of(metric, few, origins, units)
            kept.extend(parts)
            made[metric.name] = tuple(numbers.setdefault(id(p), len(numbers)) for p in parts)
    return made


class Tail:
    """The largest ``top + 1`` of many numbers: those above a floor, and all until it is pruned."""

    def __init__(self, top: int, floor: float = -np.inf, keep_all: int = 0) -> None:
        self.floor, self._top = floor, top
        self._parts: list[Floats] = []
        self._held, self._limit = 0, max(3 * (top + 1), 1 << 15, keep_all)
        self.pruned = False

    def look(self, values: Floats) -> Floats:
        return values[values > self.floor] if self.floor > -np.inf else values.copy()

    def keep(self, found: Floats) -> None:
        self._parts.append(found)
        self._held += len(found)
        if self._held > self._limit:
            cut = self._held - self._top - 1
            self._parts = [np.partition(self.held, cut)[cut:]]
            self._held, self.pruned = self._top + 1, True

    @property
    def held(self) -> Floats:
        return np.concatenate(self._parts) if self._parts else np.empty(0)

    @property
    def complete(self) -> bool:
        """Whether what was left out is certainly not among the largest."""
        return self._held > self._top or self.floor == -np.inf


class Ends:
    """The ``top + 1`` smallest and largest deltas, or all while they are few.

    Args:
        floors: deltas below the first or above the second are looked at; None: all.
    """

    def __init__(self, top: int, floors: tuple[float, float] | None, few: int) -> None:
        low, high = floors or (np.inf, -np.inf)
        self._all = floors is None
        self._low, self._high = Tail(top, -low, few), Tail(top, high, few)
        self._top = top

    def look(self, block: Block) -> tuple[Floats, Floats]:
        delta = block.arrays["delta"]
        if self._all:
            return np.empty(0), delta
        return -delta[delta < -self._low.floor], delta[delta > self._high.floor]

    def keep(self, found: tuple[Floats, Floats]) -> None:
        self._low.keep(found[0])
        self._high.keep(found[1])

    @property
    def deltas(self) -> Floats | None:
        """Without repetition; None where some of the outermost were missed."""
        low, high = self._low, self._high
        found = [-low.held, high.held]
        if self._all or (low.complete and high.complete):
            return floats(np.concatenate(found))
        if -low.floor == high.floor and not (low.pruned or high.pruned):
            # All others are one value: enough of them for the Hill index.
            return floats(np.concatenate([*found, np.full(2 * (self._top + 1), high.floor)]))
        return None


class Summed(NamedTuple):
    """The terms of one block.

    Attributes:
        rows: [slots, n] sums per prompt of the block.
        constant: per slot, the one value of all terms; None where they differ.
        tails: of the slots that are watched: sum of |term| and the largest.
    """

    prompts: Ints
    rows: Floats
    constant: list[float | None]
    tails: dict[int, tuple[float, Floats]]


class Columns:
    """Sums per prompt of the terms of many metrics; a term that several use is summed once.

    Args:
        slots: of :func:`slots_of`.
        watched: slots whose largest terms are collected, and the floors above which.
    """

    def __init__(
        self,
        metrics: Sequence[Metric],
        slots: Slots,
        prompts: int,
        watched: Mapping[int, Tail],
    ) -> None:
        self.metrics, self.slots, self.tails = metrics, slots, watched
        total = 1 + max((slot for found in slots.values() for slot in found), default=-1)
        self.sums = np.zeros((total, prompts))
        self.sizes = dict.fromkeys(watched, 0.0)
        self.constant: list[float | None] | None = None

    def look(self, block: Block, origins: Origins) -> Summed:
        """Within :func:`sharing`."""
        edges = np.append(True, np.diff(block.prompts) != 0)
        starts, prompts = block.starts[edges], block.prompts[edges]
        rows = np.zeros((len(self.sums), len(prompts)))
        constant: list[float | None] = [None] * len(rows)
        tails: dict[int, tuple[float, Floats]] = {}
        seen: set[int] = set()
        for metric in self.metrics:
            if seen.issuperset(self.slots[metric.name]):
                continue
            parts = parts_of(metric, block.arrays, origins, block.n_tokens)
            for slot, part in zip(self.slots[metric.name], parts, strict=True):
                if slot in seen:
                    continue
                seen.add(slot)
                terms = floats(part)
                np.add.reduceat(terms, starts, out=rows[slot])
                if terms[0] == terms[-1] and (terms == terms[0]).all():
                    constant[slot] = float(terms[0])
                if slot in self.tails:
                    signed = terms.min() < 0.0
                    size = np.abs(terms) if signed else terms
                    total = float((size if signed else rows[slot]).sum())
                    tails[slot] = total, self.tails[slot].look(size)
        return Summed(prompts, rows, constant, tails)

    def keep(self, found: Summed) -> None:
        if (np.diff(found.prompts) > 0).all():
            self.sums[:, found.prompts] += found.rows
        else:  # the samples of a prompt do not lie side by side
            np.add.at(self.sums.T, found.prompts, found.rows.T)
        before = found.constant if self.constant is None else self.constant
        self.constant = [
            old if old == new else None for old, new in zip(before, found.constant, strict=True)
        ]
        for slot, (size, largest) in found.tails.items():
            self.sizes[slot] += size
            self.tails[slot].keep(largest)

    def heavy(self, metric: Metric, units: int) -> bool | None:
        """Whether a tail of its watched columns is heavy; None where the floors cut too much."""
        slots = self.slots[metric.name]
        if any(not self.tails[s].complete and self.tails[s].floor > 0.0 for s in slots):
            return None  # at a floor of 0 what was left out is 0
        return any(is_heavy(self.tails[slot].held, self.sizes[slot], units) for slot in slots)

    def heavy_at(self, metric: Metric, deltas: Floats, origins: Origins, units: int) -> bool | None:
        """The same of an ``outermost`` metric, from the outermost deltas; None: cannot be told.

        The sum of all sizes is not known unless the deltas are all there are, but it is no less
        than what the sums per prompt amount to, nor than that of the sizes that are known.
        """
        one, everything = False, len(deltas) == units
        parts = parts_of(metric, {"delta": deltas}, origins, len(deltas))
        for slot, part in zip(self.slots[metric.name], parts, strict=True):
            size = np.abs(floats(part))
            known = float(size.sum())
            least = known if everything else max(known, float(np.abs(self.sums[slot]).sum()))
            if least <= 0.0:
                continue
            if hill_of_largest(size, units) < HILL_LEAST:
                return True
            one = one or carries(size, least)
        return None if one and not everything else one


@dataclass
class Folds:
    """Extremes: largest, smallest or total terms over all blocks."""

    metrics: Sequence[Metric]
    found: dict[str, Floats] = field(default_factory=dict)

    def look(self, block: Block, origins: Origins) -> list[list[float]]:
        made = []
        for metric in self.metrics:
            assert metric.fold is not None
            parts = parts_of(metric, block.arrays, origins, block.n_tokens)
            made.append([float(folded(metric.fold, part)[0]) for part in parts])
        return made

    def keep(self, found: Iterable[list[float]]) -> None:
        for metric, here in zip(self.metrics, found, strict=True):
            assert metric.fold is not None
            rows = [here, *([self.found[metric.name]] if metric.name in self.found else [])]
            self.found[metric.name] = folded(metric.fold, columns(floats(rows)))
