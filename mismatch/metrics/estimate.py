"""Intervals: how far a number would move had other prompts been drawn.

All samples of a prompt and all tokens of a sample are correlated, so whole prompts are the unit of
chance. A metric's terms are summed once per prompt; a resample draws prompts and works on those
sums, never on tokens again.

    means, ratios   >= 256 prompts: percentile bootstrap; fewer: bootstrap-t, whose standard error
                    is the linearised (delta-method) one over prompts
    rare shares     (seen in under 10 prompts) Wilson, on the number of independent units that the
                    standard error over prompts amounts to
    quantiles       Woodruff: the interval of the distribution function at the quantile, inverted
    extremes        none
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from mismatch.errors import MismatchError
from mismatch.metrics.blocks import BLOCK, Arrays, Block, Blocks, Layout, in_memory
from mismatch.metrics.intervals import (
    PERCENTILE_FROM,
    Interval,
    PromptSums,
    central,
    heavy_tail,
    hill_index,
    prompts_needed,
    student,
    wilson,
    woodruff,
)
from mismatch.metrics.measure import Measured, Smooth, measure
from mismatch.metrics.registry import Array, Metric, floats
from mismatch.metrics.threads import usable
from mismatch.types import Estimate, Floats, Ints

__all__ = [
    "Estimator",
    "PromptSums",
    "heavy_tail",
    "hill_index",
    "prompts_needed",
    "student",
    "wilson",
    "woodruff",
]

RESAMPLES = 1000
FEW_PROMPTS = 16
RARE_PROMPTS = 10  # with events; below, resamples without any would stretch bootstrap-t to [0, 1]
DRAWN = 1 << 17  # prompts drawn at a time: what they are counted in stays in the cache
KEPT = 1 << 23  # counts of draws that are kept for the next metric: 64 MiB


class Estimator:
    """Turns terms into estimates; one per comparison, so that its metrics share the resamples.

    Tokens are worked through in blocks of whole sequences: what a comparison needs beside its
    arrays hardly grows with their length. Tokens that do not lie in order of their sequence are
    taken in that order.

    Args:
        sequence: [A] sequence of each action token.
        prompt: [N] prompt of each sequence.
        seed: of the resamples; the same seed gives the same intervals.
        threads: that compute; by default as many as there are processors, at most 4. Results are
            the same to the last bit.

    Raises:
        EmptyComparison: no token.
        MismatchError: a sequence that has no prompt.
    """

    def __init__(
        self,
        sequence: Ints,
        prompt: Ints,
        *,
        seed: int = 0,
        resamples: int = RESAMPLES,
        threads: int | None = None,
    ) -> None:
        self._sequence = np.asarray(sequence)
        self._begin(Layout.of(sequence, prompt), seed, resamples, threads)

    @classmethod
    def on(
        cls,
        layout: Layout,
        *,
        seed: int = 0,
        resamples: int = RESAMPLES,
        threads: int | None = None,
    ) -> Estimator:
        """For tokens that are not in memory: :meth:`over` their blocks, not :meth:`all`."""
        made = cls.__new__(cls)
        made._sequence = np.empty(0, np.int64)
        made._begin(layout, seed, resamples, threads)
        return made

    def _begin(self, layout: Layout, seed: int, resamples: int, threads: int | None) -> None:
        self.layout = layout
        self.n_tokens, self.n_sequences = layout.n_tokens, layout.n_sequences
        self.n_prompts = layout.n_prompts
        self._seed, self._resamples = seed, resamples
        self._threads = usable() if threads is None else threads

    def all(self, metrics: Iterable[Metric], arrays: Mapping[str, Array]) -> dict[str, Estimate]:
        """Every metric whose arrays are there and whose value is defined, by name.

        Args:
            arrays: name -> [A, …]. ``delta`` may be left out beside ``rollout`` and ``train``.

        Raises:
            MismatchError: an array of another length than ``sequence``, or with a value that is
                not finite, named with the token.
        """
        known = set(arrays) | ({"delta"} if {"rollout", "train"} <= set(arrays) else set())
        wanted = [metric for metric in metrics if known.issuperset(metric.needs)]
        parted = [metric for metric in wanted if metric.kind != "extreme" or metric.fold]
        made = self.over(parted, *self._passes(parted, arrays)) if parted else {}
        for metric in wanted:
            if metric.kind == "extreme" and not metric.fold:
                value = metric.value(metric.terms(**{name: arrays[name] for name in metric.needs}))
                if not np.isnan(value):
                    made[metric.name] = self._bare(value)
        return {metric.name: made[metric.name] for metric in wanted if metric.name in made}

    def one(self, metric: Metric, arrays: Mapping[str, Array]) -> Estimate | None:
        """One metric with its interval; None where its value is undefined."""
        missing = [name for name in metric.needs if name not in arrays]
        if missing and not (missing == ["delta"] and {"rollout", "train"} <= set(arrays)):
            raise MismatchError(f"{metric.name} needs {', '.join(missing)}, which was not given")
        return self.all([metric], arrays).get(metric.name)

    def over(
        self, metrics: Sequence[Metric], blocks: Blocks, sample: Arrays
    ) -> dict[str, Estimate]:
        """Estimates from blocks that can be passed over several times; see :func:`measure`."""
        found = measure(metrics, blocks, self.layout, sample, self._threads)
        made = {
            name: self._bare(value) for name, value in found.extreme.items() if not np.isnan(value)
        }
        for metric in metrics:
            if metric.name in found.quantile:
                made[metric.name] = self._quantile(metric, *found.quantile[metric.name])
        smooth = [metric for metric in metrics if metric.name in found.smooth]
        return made | self._smooth(smooth, found)

    def _passes(self, metrics: Sequence[Metric], arrays: Arrays) -> tuple[Blocks, Arrays]:
        names = {name for metric in metrics for name in metric.needs} - {"sequence"}
        if "delta" in names and "delta" not in arrays:
            names = (names - {"delta"}) | {"rollout", "train"}
        needed = {name: np.asarray(arrays[name]) for name in sorted(names)}
        for name, array in needed.items():
            if array.ndim == 0 or len(array) != self.n_tokens:
                raise MismatchError(
                    f"{name} has {array.size if array.ndim == 0 else len(array)} tokens, "
                    f"sequence has {self.n_tokens}",
                    "give one entry per action token in every array",
                )
        stride = -(-self.n_tokens // BLOCK)
        sample = {
            name: array[::stride] for name, array in {**needed, "sequence": self._sequence}.items()
        }
        fresh = iter([True])

        def blocks() -> Iterator[Block]:
            return in_memory(needed, self.layout, self._sequence, check=next(fresh, False))

        return blocks, sample

    def _bare(self, value: float, *flags: str) -> Estimate:
        return Estimate(
            value, None, None, self.n_tokens, self.n_sequences, self.n_prompts, flags=flags
        )

    def _quantile(self, metric: Metric, value: float, interval: Interval | None) -> Estimate:
        if not np.isfinite(value):
            return self._bare(value, "overflow")
        if self.n_prompts < 2:
            return self._bare(value, "one-prompt")
        flags = ["few-prompts"] if self.n_prompts < FEW_PROMPTS else []
        flags += ["few-tokens"] if interval is None else []
        return self._bounded(metric, value, interval, flags)

    def _bounded(
        self, metric: Metric, value: float, interval: Interval | None, flags: Sequence[str]
    ) -> Estimate:
        bare = self._bare(value, *flags)
        if interval is None:
            return bare
        low, high = np.clip(interval, *metric.bounds)
        return dataclasses.replace(bare, low=min(float(low), value), high=max(float(high), value))

    def _smooth(self, metrics: Sequence[Metric], found: Measured) -> dict[str, Estimate]:
        made: dict[str, Estimate] = {}
        waiting: list[tuple[Metric, PromptSums, float, list[str]]] = []
        for metric in metrics:
            facts = found.smooth[metric.name]
            with np.errstate(all="ignore"):
                sums = PromptSums.of_sums(facts.sums, facts.count, facts.constant, metric.combine)
            value = metric.of_means(sums.centre)
            if np.isnan(value):
                continue
            if not np.isfinite(value) or not np.isfinite(facts.sums).all():
                made[metric.name] = self._bare(value, "overflow")
            elif self.n_prompts < 2:
                made[metric.name] = self._bare(value, "one-prompt")
            else:
                flags = ["few-prompts"] if self.n_prompts < FEW_PROMPTS else []
                flags += ["heavy-tail"] if facts.heavy else []
                flags += ["no-events"] if self._unseen(metric, facts, found) else []
                waiting.append((metric, sums, value, flags))
        intervals = self._intervals(
            [(metric, found.smooth[metric.name], sums) for metric, sums, _, _ in waiting]
        )
        for (metric, _, value, flags), interval in zip(waiting, intervals, strict=True):
            made[metric.name] = self._bounded(metric, value, interval, flags)
        return made

    @staticmethod
    def _unseen(metric: Metric, facts: Smooth, found: Measured) -> bool:
        """A share of 0 although the sides differ: [0, 0] is then no bound on rarer events."""
        share = metric.unit == "share" and "delta" in metric.needs
        return bool(share and not facts.sums.any() and found.differs)

    def _intervals(
        self, waiting: Sequence[tuple[Metric, Smooth, PromptSums]]
    ) -> list[Interval | None]:
        made: list[Interval | None] = [None] * len(waiting)
        drawn = []
        for place, (metric, facts, sums) in enumerate(waiting):
            made[place] = self._rare_share(metric, facts, sums)
            if made[place] is None and not sums.residual.any():
                # Nothing varies between prompts: identical sides, above all.
                made[place] = sums.value, sums.value
            if made[place] is None:
                drawn.append(place)
        if self.n_prompts < PERCENTILE_FROM:
            for place in drawn:
                made[place] = self._bootstrap_t(waiting[place][2])
        elif drawn:
            values = self._resampled([waiting[place][2] for place in drawn])
            for place, resamples in zip(drawn, values, strict=True):
                made[place] = central(resamples)
        return made

    def _rare_share(self, metric: Metric, facts: Smooth, sums: PromptSums) -> Interval | None:
        """Wilson's interval where a share's rarer outcome is seen in few prompts, but is seen."""
        if metric.unit != "share" or metric.kind != "mean" or facts.sums.shape[1] != 1:
            return None
        events = facts.sums[:, 0]
        seen = int((events > 0.0).sum()), int((events < facts.count).sum())
        if not 0 < min(seen) < RARE_PROMPTS:
            return None
        return wilson(sums.value, sums.error, student(self.n_prompts - 1))

    def _bootstrap_t(self, sums: PromptSums) -> Interval | None:
        values, errors = sums.resampled(self.weights)
        percentile, error = central(values), sums.error
        with np.errstate(all="ignore"):
            pivot = np.where(values == sums.value, 0.0, (values - sums.value) / errors)
        pivots = central(pivot)
        if pivots is None or not np.isfinite(pivots).all():
            # Resamples without spread: few prompts, or one that carries everything.
            arm = student(self.n_prompts - 1) * error
            wide = percentile or (sums.value, sums.value)
            return min(sums.value - arm, wide[0]), max(sums.value + arm, wide[1])
        return sums.value - pivots[1] * error, sums.value - pivots[0] * error

    def _resampled(self, several: Sequence[PromptSums]) -> Iterator[Floats]:
        """Values of all resamples, [R] each: every resample serves all metrics."""
        columns = [array for sums in several for array in (sums.sums, sums.count[:, None])]
        table = np.concatenate(columns, axis=1)
        drawn = np.concatenate([weights @ table for weights in self._drawn()])
        first = 0
        for sums in several:
            last = first + sums.sums.shape[1]
            yield sums.shifted(drawn[:, first:last] / drawn[:, last : last + 1])
            first = last + 1

    @cached_property
    def weights(self) -> Floats:
        """How often each resample draws each prompt, [resamples, P]."""
        return np.concatenate(list(self._draw()))

    def _drawn(self) -> Iterable[Floats]:
        """The same, a few resamples at a time where keeping them all would cost too much."""
        small = self._resamples * self.n_prompts <= KEPT
        return [self.weights] if small else self._draw()

    def _draw(self) -> Iterator[Floats]:
        rng = np.random.default_rng(self._seed)
        prompts, left = self.n_prompts, self._resamples
        while left:
            rows = min(left, max(1, DRAWN // prompts))
            drawn = rng.integers(0, prompts, (rows, prompts))
            drawn += prompts * np.arange(rows)[:, None]  # one count for all rows
            counts = np.bincount(drawn.ravel(), minlength=rows * prompts)
            yield floats(counts.reshape(rows, prompts))
            left -= rows
