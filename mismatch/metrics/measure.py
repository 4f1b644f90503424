"""From blocks of tokens to what estimates are made of: one pass, two or three with quantiles.

A pass computes every metric's terms block by block. What outlives a block: sums per prompt, the
outermost deltas, extremes, one histogram per quantile family, and the terms of sequence metrics
(one per sequence). The second pass finds the quantiles; a third, ends of their intervals that lie
far away. Blocks are looked at by several threads and kept in order: results do not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mismatch.metrics.blocks import BLOCK, Arrays, Block, Blocks, Layout
from mismatch.metrics.intervals import (
    Interval,
    heavy_tail,
    largest_used,
    rank_of,
    woodruff,
    woodruff_ranks,
)
from mismatch.metrics.passes import Columns, Ends, Folds, Tail, parts_of, slots_of
from mismatch.metrics.ranks import Histogram, Ranked, Spans
from mismatch.metrics.registry import Array, Metric, floats
from mismatch.metrics.shared import sharing
from mismatch.metrics.threads import in_order
from mismatch.types import Floats

COLLECTED = 0.015  # of the terms, by a floor from a sample; the Hill index needs 0.01
FEW = 4  # blocks; of so few tokens all terms are kept, without floors
Families = dict[object, list[Metric]]
Found = list[tuple[Callable[[Any], None], Any]]  # who keeps it, and what a block gave


@dataclass(frozen=True)
class Smooth:
    """A mean or ratio: sums of its terms per prompt, [P, M], and the units behind them, [P]."""

    sums: Floats
    count: Floats
    constant: tuple[float | None, ...]
    heavy: bool


@dataclass
class Measured:
    """By metric name.

    Attributes:
        quantile: value and interval; None where the sample is too small for one.
        differs: whether any delta is not 0; False without delta.
    """

    smooth: dict[str, Smooth] = field(default_factory=dict)
    quantile: dict[str, tuple[float, Interval | None]] = field(default_factory=dict)
    extreme: dict[str, float] = field(default_factory=dict)
    differs: bool = False


def measure(
    metrics: Sequence[Metric], blocks: Blocks, layout: Layout, sample: Arrays, threads: int = 1
) -> Measured:
    """Everything about ``metrics``, none of which needs all tokens at once.

    Args:
        blocks: starts a pass over the same tokens whenever it is called.
        sample: some tokens, as arrays; origins and floors come from them.
        threads: that compute; the result is the same to the last bit.
    """
    work = _Work(metrics, blocks, layout, sample, threads)
    with np.errstate(all="ignore"):
        work.first_pass()
        work.quantiles()
        return work.finish()


def with_delta(arrays: Arrays) -> Arrays:
    """``delta`` beside ``rollout`` and ``train``, where it was not given."""
    if "delta" in arrays or not {"rollout", "train"} <= set(arrays):
        return arrays
    return {**arrays, "delta": arrays["train"] - arrays["rollout"]}


class _Work:
    def __init__(
        self,
        metrics: Sequence[Metric],
        blocks: Blocks,
        layout: Layout,
        sample: Arrays,
        threads: int = 1,
    ) -> None:
        token = [metric for metric in metrics if metric.reduction == "token"]
        self.blocks, self.layout = blocks, layout
        self.threads = threads if layout.n_tokens > 2 * BLOCK else 1
        self.few = FEW * BLOCK
        self.top = largest_used(layout.n_tokens)
        self.of_sequences = [metric for metric in metrics if metric.reduction == "sequence"]
        self.families: Families = {}
        for metric in token:
            if metric.kind == "quantile":
                self.families.setdefault(metric.declared, []).append(metric)
        self.smooth = [metric for metric in token if metric.kind in ("mean", "ratio")]
        sample = with_delta(sample)
        self.origins = {
            metric.name: metric.origin(*(sample[name] for name in metric.needs))
            for metric in metrics
            if metric.origin is not None
        }
        self.folds = Folds([metric for metric in token if metric.kind == "extreme"])
        self.slots = slots_of(self.smooth, sample, self.origins)
        inner = [metric for metric in self.smooth if not metric.outermost]
        self.columns = self._columns(self.smooth, inner, self._floors(inner, sample))
        self.outer = len(inner) < len(self.smooth)
        self.ends = Ends(self.top, self._ends(sample) if self.outer else None, self.few)
        self.histograms = {family: Histogram() for family in self.families}
        self.sequence_terms: dict[str, list[tuple[Array, ...]]] = {}
        self.result = Measured()

    def _columns(
        self, metrics: Sequence[Metric], watched: Sequence[Metric], floors: Mapping[int, float]
    ) -> Columns:
        slots = sorted({slot for metric in watched for slot in self.slots[metric.name]})
        tails = {slot: Tail(self.top, floors.get(slot, -np.inf), self.few) for slot in slots}
        return Columns(metrics, self.slots, self.layout.n_prompts, tails)

    def _floors(self, metrics: Sequence[Metric], sample: Arrays) -> dict[int, float]:
        """Sizes that about ``COLLECTED`` of each column's terms exceed; none for few tokens."""
        if self.layout.n_tokens <= self.few or not metrics:
            return {}
        one = Block(sample, np.zeros(1, np.int64), np.zeros(1, np.int64))
        trial = self._columns(metrics, metrics, {})
        with sharing(), np.errstate(all="ignore"):
            found = trial.look(one, self.origins).tails
        return {slot: _exceeded(size) for slot, (_, size) in found.items()}

    def _ends(self, sample: Arrays) -> tuple[float, float] | None:
        """Deltas with about ``COLLECTED`` of all below and above them; None for few tokens."""
        if self.layout.n_tokens <= self.few:
            return None
        return -_exceeded(-sample["delta"]), _exceeded(sample["delta"])

    def _pass(self, look: Callable[[Block], Found]) -> None:
        for found in in_order(look, self.blocks(), self.threads):
            for keep, what in found:
                keep(what)

    def first_pass(self) -> None:
        self._pass(self._look)
        self.heavy = {metric.name: self._heavy(metric) for metric in self.smooth}
        again = [metric for metric in self.smooth if self.heavy[metric.name] is None]
        if not again:
            return
        # The sample misled, or one token may carry a fifth: these keep every size.
        watching = self._columns(again, again, {})

        self._pass(
            lambda block: _pieces(
                block, lambda piece: [(watching.keep, watching.look(piece, self.origins))]
            )
        )
        units = self.layout.n_tokens
        self.heavy |= {metric.name: watching.heavy(metric, units) for metric in again}

    def _heavy(self, metric: Metric) -> bool | None:
        units = self.layout.n_tokens
        if not metric.outermost:
            return self.columns.heavy(metric, units)
        deltas = self.ends.deltas
        if deltas is None:
            return None
        return self.columns.heavy_at(metric, deltas, self.origins, units)

    def _look(self, block: Block) -> Found:
        if block.n_tokens <= 2 * BLOCK:
            return _pieces(block, lambda piece: self._sequences(piece) + self._tokens(piece))
        with sharing(), np.errstate(all="ignore"):
            found = self._sequences(_with_delta(block))
        return found + _pieces(block, self._tokens)

    def _sequences(self, block: Block) -> Found:
        return [
            (
                self.sequence_terms.setdefault(metric.name, []).append,
                parts_of(metric, block.arrays, self.origins, len(block.starts)),
            )
            for metric in self.of_sequences
        ]

    def _tokens(self, block: Block) -> Found:
        found: Found = [
            (self.columns.keep, self.columns.look(block, self.origins)),
            (self.folds.keep, self.folds.look(block, self.origins)),
        ]
        if self.outer:
            found.append((self.ends.keep, self.ends.look(block)))
        for family, metrics in self.families.items():
            histogram = self.histograms[family]
            found.append((histogram.keep, histogram.look(self._values(metrics[0], block))))
        if not self.result.differs and "delta" in block.arrays:
            found.append((self._differ, bool(block.arrays["delta"].any())))
        return found

    def _differ(self, here: bool) -> None:
        self.result.differs = self.result.differs or here

    def _values(self, metric: Metric, block: Block) -> Floats:
        return floats(parts_of(metric, block.arrays, self.origins, block.n_tokens)[0])

    def quantiles(self) -> None:
        """Second pass: the quantiles. Third: ends of their intervals that lie further away."""
        total, count = self.layout.n_tokens, self._count(token=True)
        found: dict[str, tuple[object, Ranked]] = {}
        for family, metrics in self.families.items():
            for metric in metrics:
                rank = rank_of(metric.probability, total)
                found[metric.name] = family, self._ranked(family, rank)
        self._collect(list(found.values()))
        ends: dict[tuple[str, int], tuple[object, Ranked]] = {}
        ranks: dict[str, tuple[int, int]] = {}
        for metric in (metric for metrics in self.families.values() for metric in metrics):
            family, ranked = found[metric.name]
            value = ranked.value(rank_of(metric.probability, total))
            histogram = self.histograms[family]
            constant = histogram.least == histogram.most
            self.result.quantile[metric.name] = value, (value, value) if constant else None
            if constant or len(count) < 2:
                continue
            interval = woodruff_ranks(ranked.under(value), count, metric.probability)
            if interval is not None:
                ranks[metric.name] = interval
                for rank in interval:
                    near = ranked if ranked.holds(rank) else self._ranked(family, rank)
                    ends[metric.name, rank] = family, near
        held = {id(ranked) for _, ranked in found.values()}
        self._collect([(family, end) for family, end in ends.values() if id(end) not in held])
        for name, interval in ranks.items():
            low, high = (ends[name, rank][1].value(rank) for rank in interval)
            self.result.quantile[name] = self.result.quantile[name][0], (low, high)

    def _ranked(self, family: object, rank: int) -> Ranked:
        return Ranked(self.histograms[family].around(rank), np.zeros(self.layout.n_prompts))

    def _collect(self, ranked: Sequence[tuple[object, Ranked]]) -> None:
        if not ranked:
            return
        spans = {
            family: Spans([one for owner, one in ranked if owner is family])
            for family in self.families
        }

        def look(piece: Block) -> Found:
            return [
                (spans[family].keep, spans[family].look(self._values(metrics[0], piece), piece))
                for family, metrics in self.families.items()
            ]

        self._pass(lambda block: _pieces(block, look))

    def _count(self, *, token: bool) -> Floats:
        """Tokens or sequences of each prompt, [P]."""
        weights = np.diff(self.layout.offsets) if token else None
        return floats(np.bincount(self.layout.prompts, weights, minlength=self.layout.n_prompts))

    def finish(self) -> Measured:
        count = self._count(token=True)
        constant = self.columns.constant or []
        for metric in self.smooth:
            slots = self.slots[metric.name]
            self.result.smooth[metric.name] = Smooth(
                self.columns.sums[list(slots)].T,
                count,
                tuple(constant[slot] for slot in slots),
                bool(self.heavy[metric.name]),
            )
        for metric in self.folds.metrics:
            self.result.extreme[metric.name] = metric.folded_value(self.folds.found[metric.name])
        for metric in self.of_sequences:
            parts = zip(*self.sequence_terms.pop(metric.name), strict=True)
            self._finish_sequences(metric, [floats(np.concatenate(part)) for part in parts])
        return self.result

    def _finish_sequences(self, metric: Metric, parts: list[Floats]) -> None:
        prompts, total = self.layout.prompts, self.layout.n_prompts
        if metric.kind == "extreme":
            self.result.extreme[metric.name] = metric.value(np.stack(parts, axis=1))
        elif metric.kind == "quantile":
            value = metric.value(parts[0])
            interval = woodruff(parts[0], prompts, metric.probability) if total > 1 else None
            self.result.quantile[metric.name] = value, interval
        else:
            sums = [np.bincount(prompts, part, minlength=total) for part in parts]
            self.result.smooth[metric.name] = Smooth(
                floats(np.stack(sums, axis=1)),
                self._count(token=False),
                tuple(float(part[0]) if (part == part[0]).all() else None for part in parts),
                any(heavy_tail(part) for part in parts),
            )


def _with_delta(block: Block) -> Block:
    return Block(with_delta(block.arrays), block.starts, block.prompts)


def _pieces(block: Block, look: Callable[[Block], Found]) -> Found:
    """What all pieces of a block give, each with its work shared."""
    found: Found = []
    for piece in block.pieces():
        with sharing(), np.errstate(all="ignore"):
            found += look(_with_delta(piece))
    return found


def _exceeded(values: Floats) -> float:
    """A number that about ``COLLECTED`` of the values exceed."""
    kth = min(int(COLLECTED * len(values)) + 1, len(values))
    return float(np.partition(values, len(values) - kth)[len(values) - kth])
