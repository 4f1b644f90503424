"""From blocks of tokens to what estimates are made of: one pass, three with quantiles.

A pass computes every metric's terms block by block. What outlives a block: sums per prompt, the
largest terms, extremes, one histogram per quantile family, and the terms of sequence metrics (one
per sequence). The second pass finds the quantiles, the third the ends of their intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
from mismatch.metrics.passes import Columns, Folds, Histogram, Ranked, parts_of
from mismatch.metrics.registry import Array, Metric, floats
from mismatch.metrics.shared import sharing
from mismatch.types import Floats

COLLECTED = 0.015  # of the terms, by a floor from a sample; the Hill index needs 0.01
Families = dict[object, list[Metric]]


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


def measure(metrics: Sequence[Metric], blocks: Blocks, layout: Layout, sample: Arrays) -> Measured:
    """Everything about ``metrics``, none of which needs all tokens at once.

    Args:
        blocks: starts a pass over the same tokens whenever it is called.
        sample: some tokens, as arrays; origins and floors come from them.
    """
    work = _Work(metrics, blocks, layout, sample)
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
        self, metrics: Sequence[Metric], blocks: Blocks, layout: Layout, sample: Arrays
    ) -> None:
        token = [metric for metric in metrics if metric.reduction == "token"]
        self.blocks, self.layout = blocks, layout
        self.of_sequences = [metric for metric in metrics if metric.reduction == "sequence"]
        self.families: Families = {}
        for metric in token:
            if metric.kind == "quantile":
                self.families.setdefault(metric.terms, []).append(metric)
        self.smooth = [metric for metric in token if metric.kind in ("mean", "ratio")]
        sample = with_delta(sample)
        self.origins = {
            metric.name: metric.origin(*(sample[name] for name in metric.needs))
            for metric in metrics
            if metric.origin is not None
        }
        self.folds = Folds([metric for metric in token if metric.kind == "extreme"])
        self.columns = self._columns(self.smooth, self._floors(sample))
        self.histograms = {family: Histogram() for family in self.families}
        self.sequence_terms: dict[str, list[tuple[Array, ...]]] = {}
        self.result = Measured()

    def _columns(self, metrics: Sequence[Metric], floors: Mapping[int, float]) -> Columns:
        return Columns(metrics, self.layout.n_prompts, largest_used(self.layout.n_tokens), floors)

    def _floors(self, sample: Arrays) -> Mapping[int, float]:
        """Sizes that about ``COLLECTED`` of each column's terms exceed; none for few tokens."""
        if self.layout.n_tokens <= 4 * BLOCK or not self.smooth:
            return {}
        one = Block(sample, np.zeros(1, np.int64), np.zeros(1, np.int64))
        trial = Columns(self.smooth, 1, one.n_tokens, {})
        with sharing(), np.errstate(all="ignore"):
            trial.add(one, self.origins)
        return trial.floors(COLLECTED)

    def first_pass(self) -> None:
        for block in self.blocks():
            alone = len(block.arrays["sequence"]) <= 2 * BLOCK
            with sharing():
                whole = Block(with_delta(block.arrays), block.starts, block.prompts)
                self._sequences(whole)
                if alone:
                    self._tokens(whole)
            if not alone:
                self._piecewise(block)
        again = self.columns.incomplete()
        self.retried = self._columns(again, {})
        if again:  # the sample misled: these collect without floors
            for block in self.blocks():
                for piece in block.pieces():
                    with sharing():
                        arrays = with_delta(piece.arrays)
                        self.retried.add(Block(arrays, piece.starts, piece.prompts), self.origins)

    def _piecewise(self, block: Block) -> None:
        for piece in block.pieces():
            with sharing():
                self._tokens(Block(with_delta(piece.arrays), piece.starts, piece.prompts))

    def _tokens(self, block: Block) -> None:
        if self.smooth:
            self.columns.add(block, self.origins)
        self.folds.add(block, self.origins)
        for family, metrics in self.families.items():
            self.histograms[family].add(self._values(metrics[0], block))
        if not self.result.differs and "delta" in block.arrays:
            self.result.differs = bool(block.arrays["delta"].any())

    def _sequences(self, block: Block) -> None:
        for metric in self.of_sequences:
            parts = parts_of(metric, block.arrays, self.origins, len(block.starts))
            self.sequence_terms.setdefault(metric.name, []).append(parts)

    def _values(self, metric: Metric, block: Block) -> Floats:
        return floats(parts_of(metric, block.arrays, self.origins, block.n_tokens)[0])

    def quantiles(self) -> None:
        """Second pass: the quantiles. Third: ends of their intervals that lie further away."""
        total, count = self.layout.n_tokens, self._count(token=True)
        found: dict[str, tuple[object, Ranked]] = {}
        for family, metrics in self.families.items():
            for metric in metrics:
                span = self.histograms[family].around(rank_of(metric.probability, total))
                found[metric.name] = family, Ranked(span, np.zeros(self.layout.n_prompts))
        self._collect(list(found.values()), by_prompt=True)
        ends: dict[tuple[str, int], Ranked] = {}
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
                    near = ranked.holds(rank)
                    span = histogram.around(rank)
                    ends[metric.name, rank] = ranked if near else Ranked(span, np.zeros(0))
        held = {id(ranked) for _, ranked in found.values()}
        self._collect(
            [(found[name][0], end) for (name, _), end in ends.items() if id(end) not in held],
            by_prompt=False,
        )
        for name, interval in ranks.items():
            low, high = (ends[name, rank].value(rank) for rank in interval)
            self.result.quantile[name] = self.result.quantile[name][0], (low, high)

    def _collect(self, ranked: Sequence[tuple[object, Ranked]], *, by_prompt: bool) -> None:
        if not ranked:
            return
        for whole in self.blocks():
            for block in whole.pieces():
                with sharing():
                    block = Block(with_delta(block.arrays), block.starts, block.prompts)
                    values = {
                        family: self._values(metrics[0], block)
                        for family, metrics in self.families.items()
                    }
                    for family, one in ranked:
                        one.add(values[family], block, by_prompt=by_prompt)

    def _count(self, *, token: bool) -> Floats:
        """Tokens or sequences of each prompt, [P]."""
        weights = np.diff(self.layout.offsets) if token else None
        return floats(np.bincount(self.layout.prompts, weights, minlength=self.layout.n_prompts))

    def finish(self) -> Measured:
        count = self._count(token=True)
        for metric in self.smooth:
            columns = self.retried if metric in self.retried.metrics else self.columns
            slots = columns.slots[metric.name]
            self.result.smooth[metric.name] = Smooth(
                columns.sums[list(slots)].T,
                count,
                tuple(columns.columns[slot].constant for slot in slots),
                columns.heavy(metric, self.layout.n_tokens),
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
