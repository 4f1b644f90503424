"""From the arrays of a comparison to every metric with its interval.

A metric's terms are summed once per prompt (:class:`Prompts`); intervals
(:mod:`mismatch.metrics.inference`) work on those sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.metrics.inference import (
    FEW_PROMPTS,
    PERCENTILE_FROM,
    RARE_PROMPTS,
    Interval,
    PromptSums,
    bootstrap_t,
    central,
    draws,
    quantile_cuts,
    student,
    wilson,
    with_unseen,
    woodruff_ends,
)
from mismatch.metrics.registry import FLAT, REALS, Array, Metric, floats, plain_array
from mismatch.metrics.tails import heavy_sizes
from mismatch.types import Estimate, Floats, Ints


class Prompts:
    """Which tokens and sequences each prompt has.

    Args:
        starts: [n] first token of each sequence.
        prompt: [n] prompt of each sequence, any whole numbers.
        tokens: A, of all sequences.
        block: tokens whose terms are computed at a time, about; it bounds the memory.
    """

    def __init__(self, starts: Ints, prompt: Ints, tokens: int, block: int) -> None:
        present, self._prompt = np.unique(prompt, return_inverse=True)
        self.n_tokens, self.n_sequences, self.n_prompts = tokens, len(starts), len(present)
        self._starts = starts
        lengths = np.diff(starts, append=tokens)
        self.counts = {
            "token": floats(np.bincount(self._prompt, lengths, self.n_prompts)),
            "sequence": floats(np.bincount(self._prompt, minlength=self.n_prompts)),
        }
        # Whole sequences, until a block is full.
        number = starts // block
        self._blocks = np.flatnonzero(np.diff(number, prepend=-1))

    def total(self, values: Array, reduction: str) -> Floats:
        """Sum the values of all units over each prompt, [P]."""
        if reduction == "token":
            values = np.add.reduceat(values, self._starts, dtype=np.float64)
        return floats(np.bincount(self._prompt, values, self.n_prompts))

    def terms(self, metric: Metric, ready: Mapping[str, Array]) -> Floats:
        """Return the terms of a metric that has one per unit, [U]."""
        return np.concatenate([parts[0] for _, parts in self._in_blocks(metric, ready)])

    def sums(
        self, metric: Metric, ready: Mapping[str, Array]
    ) -> tuple[Floats, list[float | None], bool]:
        """Sum the terms of a mean or ratio over each prompt.

        Returns:
            Sums [P, M], the one value of each column that is constant, and whether few units carry
            a column.
        """
        by_sequence: list[list[Floats]] = []
        sizes: list[list[Floats]] = []
        values: list[set[float]] = []
        for starts, parts in self._in_blocks(metric, ready):
            if not sizes:
                by_sequence, sizes = [[] for _ in parts], [[] for _ in parts]
                values = [set() for _ in parts]
            for column, part in enumerate(parts):
                by_sequence[column].append(np.add.reduceat(part, starts))
                sizes[column].append(np.abs(part))
                values[column] |= {float(part.min()), float(part.max())}
        totals = [self.total(np.concatenate(column), "sequence") for column in by_sequence]
        return (
            np.stack(totals, axis=1),
            [next(iter(seen)) if len(seen) == 1 else None for seen in values],
            any(heavy_sizes(np.concatenate(column)) for column in sizes),
        )

    def _in_blocks(
        self, metric: Metric, ready: Mapping[str, Array]
    ) -> Iterator[tuple[Ints, list[Floats]]]:
        """Yield where sequences start among some units, and the units' terms, a column each."""
        if metric.reduction == "sequence":  # its terms add up whole sequences
            yield np.arange(self.n_sequences), self._parts(metric, ready, self.n_sequences)
            return
        for first, last in pairwise([*self._blocks, self.n_sequences]):
            starts = self._starts[first:last]
            low = int(starts[0])
            high = self.n_tokens if last == self.n_sequences else int(self._starts[last])
            some = {name: ready[name][low:high] for name in metric.needs}
            yield starts - low, self._parts(metric, some, high - low)

    def _parts(self, metric: Metric, ready: Mapping[str, Array], units: int) -> list[Floats]:
        parts = [floats(part) for part in metric.parts(ready)]
        for part in parts:
            if part.shape != (units,):
                raise MismatchError(
                    f"{metric.name}: terms of shape {part.shape} for {units} {metric.reduction}s",
                    "its arrays must hold one row per action token",
                )
        return parts


RESAMPLES = 1000
LARGEST = 0.01  # share of the tokens by which clustering of rare events is told
# Times the largest |delta|, powers of 10: from where, and how far, a tail bounds an unseen event.
# In float32 an event lies that far; in bf16 only the number of tokens says how rare it is.
FAR, FURTHEST = 1e3, 1e6
BLOCK = 1 << 17  # tokens whose terms are computed at a time: bounds the memory of large runs
KEPT = 1 << 23  # counts of draws, which all metrics share: 64 MiB; more prompts are drawn in groups


@dataclass(frozen=True, slots=True)
class _Smooth:
    """A mean or ratio whose interval is still to be made."""

    metric: Metric
    terms: Floats  # [P, M] sums per prompt
    sums: PromptSums
    value: float
    flags: list[str]


class Estimator:
    """Turns terms into estimates; one per comparison, so that its metrics share the resamples.

    Tokens that do not lie in order of their sequence are taken in that order.

    Args:
        sequence: [A] sequence of each action token.
        prompt: [N] prompt of each sequence.
        seed: of the resamples; the same seed gives the same intervals.
        block: tokens whose terms are computed at a time.

    Raises:
        EmptyComparison: no token.
        MismatchError: not whole numbers, or a sequence that has no prompt.
    """

    def __init__(
        self,
        sequence: Ints,
        prompt: Ints,
        *,
        seed: int = 0,
        resamples: int = RESAMPLES,
        block: int = BLOCK,
    ) -> None:
        sequence, prompt = _whole("sequence", sequence), _whole("prompt", prompt)
        if not len(sequence):
            raise EmptyComparison()
        self._order: Ints | None = None
        if (np.diff(sequence) < 0).any():
            self._order = np.argsort(sequence, kind="stable")
            sequence = sequence[self._order]
        starts = np.concatenate([[0], np.flatnonzero(np.diff(sequence)) + 1])
        if sequence[0] < 0 or sequence[-1] >= len(prompt):
            worst = sequence[0] if sequence[0] < 0 else sequence[-1]
            fault = f"sequence {worst} has no prompt: prompts are given for 0 to {len(prompt) - 1}"
            raise MismatchError(fault, "give the prompt of every sequence, [N]")
        self._sequence = sequence
        self._by = Prompts(starts, prompt[sequence[starts]], len(sequence), block)
        self.n_tokens, self.n_sequences = self._by.n_tokens, self._by.n_sequences
        self.n_prompts = self._by.n_prompts
        self._seed, self._resamples = seed, resamples

    def all(self, metrics: Iterable[Metric], arrays: Mapping[str, Array]) -> dict[str, Estimate]:
        """Return every metric whose arrays are there and whose value is defined, by name.

        Args:
            arrays: name -> [A, …]. ``delta`` may be omitted if ``rollout`` and ``train`` are given.

        Raises:
            MismatchError: an array of another length than ``sequence``, or with a value that is
                not finite, named with the token.
        """
        names = set(arrays) | ({"delta"} if {"rollout", "train"} <= set(arrays) else set())
        wanted = [metric for metric in metrics if names.issuperset(metric.needs)]
        ready = self._ready(wanted, arrays)
        last: tuple[Any, Floats, Floats] | None = None  # quantiles of the same terms come in a row
        estimates: dict[str, Estimate | None] = {}
        smooth: list[_Smooth] = []
        with np.errstate(all="ignore"):
            for metric in wanted:
                estimates[metric.name] = None  # keeps the order
                if metric.kind == "extreme":
                    terms = metric.terms(**{name: ready[name] for name in metric.needs})
                    estimates[metric.name] = self._bare(metric.value(terms))
                elif metric.kind == "quantile":
                    if last is None or last[0] is not metric.terms:
                        terms = self._by.terms(metric, ready)
                        last = metric.terms, terms, np.sort(terms)
                    estimates[metric.name] = self._quantile(metric, *last[1:])
                else:
                    estimate = self._smooth(metric, ready)
                    if isinstance(estimate, _Smooth):
                        smooth.append(estimate)
                    else:
                        estimates[metric.name] = estimate
            estimates |= self._with_intervals(smooth)
        return {
            name: estimate
            for name, estimate in estimates.items()
            if estimate is not None and not np.isnan(estimate.value)
        }

    def one(self, metric: Metric, arrays: Mapping[str, Array]) -> Estimate | None:
        """Return one metric with its interval; None where its value is undefined."""
        missing = [name for name in metric.needs if name not in arrays]
        if missing and not (missing == ["delta"] and {"rollout", "train"} <= set(arrays)):
            raise MismatchError(f"{metric.name} needs {', '.join(missing)}, which was not given")
        return self.all([metric], arrays).get(metric.name)

    @cached_property
    def weights(self) -> Floats:
        """How often each resample draws each prompt, or each group of many prompts, [R, P or G]."""
        groups = min(self.n_prompts, KEPT // self._resamples)
        return np.concatenate(list(draws(groups, self._resamples, self._seed)))

    # ------------------------------------------------------------ arrays and terms

    def _ready(self, metrics: Sequence[Metric], arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return what metrics need: checked, in order of the sequences, floats as float64."""
        per_unit = {
            name
            for metric in metrics
            for name in metric.needs
            if metric.kind != "extreme" or name in FLAT  # loads per expert have another shape
        }
        names = {name for metric in metrics for name in metric.needs} - {"sequence"}
        if "delta" in names and "delta" not in arrays:
            names, per_unit = names | {"rollout", "train"}, per_unit | {"rollout", "train"}
        ready: dict[str, Array] = {"sequence": self._sequence}
        for name in sorted(names & set(arrays)):
            array = plain_array(name, arrays[name])
            ready[name] = self._checked(name, array) if name in per_unit else array
        if "delta" in names and "delta" not in ready:
            ready["delta"] = ready["train"] - ready["rollout"]
        return ready

    def _checked(self, name: str, array: Array) -> Array:
        if array.ndim == 0 or len(array) != self.n_tokens:
            tokens = array.size if array.ndim == 0 else len(array)
            fault = f"{name} has {tokens} tokens, sequence has {self.n_tokens}"
            raise MismatchError(fault, "give one entry per action token in every array")
        infinite = array == np.inf if name.startswith("exact_kl") else False  # the worst value
        if array.dtype.kind == "f" and not (np.isfinite(array) | infinite).all():
            bad = np.argwhere(~np.isfinite(array))[0]
            fault = f"{name} is {array[tuple(bad)]} at action token {int(bad[0])}"
            fix = "look for overflow (fp16), -inf of a masked token, or padding that was scored"
            raise MismatchError(fault, fix)
        if (array.dtype.kind == "f" and array.ndim == 1) or name in REALS:
            array = array.astype(np.float64, copy=False)  # tables [A, L] stay, for their size
        return array if self._order is None else array[self._order]

    # ------------------------------------------------------------ estimates

    def _bare(self, value: float, *flags: str) -> Estimate:
        return Estimate(
            value, None, None, self.n_tokens, self.n_sequences, self.n_prompts, flags=flags
        )

    def _bounded(
        self, metric: Metric, value: float, interval: Interval | None, flags: Sequence[str]
    ) -> Estimate:
        bare = self._bare(value, *flags)
        if interval is None:
            return bare
        low, high = np.clip(interval, *metric.bounds)
        return replace(bare, low=min(float(low), value), high=max(float(high), value))

    @property
    def _few(self) -> list[str]:
        return ["few-prompts"] if self.n_prompts < FEW_PROMPTS else []

    def _quantile(self, metric: Metric, terms: Floats, ordered: Floats) -> Estimate:
        value, wider = (cut + 0.0 for cut in quantile_cuts(ordered, metric.probability))
        if not np.isfinite(value):
            return self._bare(value, "overflow")
        if self.n_prompts < 2:
            return self._bare(value, "one-prompt")
        under, tail = (self._by.total(terms <= cut, metric.reduction) for cut in (value, wider))
        count = self._by.counts[metric.reduction]
        interval = woodruff_ends(ordered, under, tail, count, metric.probability)
        flags = [*self._few, *(["few-tokens"] if interval is None else [])]
        return self._bounded(metric, value, interval, flags)

    def _smooth(self, metric: Metric, ready: Mapping[str, Array]) -> _Smooth | Estimate | None:
        sums, constant, heavy = self._by.sums(metric, ready)
        count = self._by.counts[metric.reduction]
        prompt_sums = PromptSums.of(sums, count, constant, metric.combine)
        value = metric.of_means(prompt_sums.centre)
        if np.isnan(value):
            return None
        if not np.isfinite(value) or not np.isfinite(sums).all():
            return self._bare(value, "overflow")
        if self.n_prompts < 2:
            return self._bare(value, "one-prompt")
        flags = [*self._few, *(["heavy-tail"] if heavy else [])]
        flags += ["heavy-prompts"] if prompt_sums.heavy else []
        of_events = metric.unit == "share" and "delta" in metric.needs
        if of_events and not sums.any() and ready["delta"].any():
            bare = self._bare(0.0, *self._few, "no-events")
            return replace(bare, low=0.0, high=self._unseen(metric, ready))
        return _Smooth(metric, sums, prompt_sums, value, flags)

    def _unseen(self, metric: Metric, ready: Mapping[str, Array]) -> float:
        """One-sided 95 % bound on the share of an event that was not seen.

        3/n (the rule of three), with n the number of independent tokens: all of them over the
        factor by which prompts cluster the tokens of largest |delta|, from which these events come;
        at least as many as there are prompts. Of events of sequences n is the number of prompts.
        Where |delta| would have to be k times the largest that was seen, and k is at least
        ``FAR``, the bound is divided by k: a tail of |delta| that has a mean falls as fast as that.
        """
        units = prompts = float(self.n_prompts)
        if metric.reduction == "token":
            size = np.abs(ready["delta"])
            top = size >= np.quantile(size, 1.0 - LARGEST)
            share = float(top.mean())
            sums = self._by.total(top, "token")
            away = sums - share * self._by.counts["token"]
            error = prompts / (prompts - 1) * float((away**2).sum()) / self.n_tokens**2
            independent = share * (1.0 - share) / error if error > 0.0 else math.inf
            units = max(min(independent, float(self.n_tokens)), prompts)
        reach = 1.0
        while reach < FURTHEST:
            further = dict(ready) | {"delta": 10.0 * reach * ready["delta"]}
            if any(part.any() for part in metric.parts(further)):
                break
            reach *= 10.0
        return float(1.0 - 0.05 ** (1.0 / units)) / (reach if reach >= FAR else 1.0)

    def _with_intervals(self, several: Sequence[_Smooth]) -> dict[str, Estimate]:
        intervals: dict[str, Interval | None] = {}
        drawn = []
        for stat in several:
            interval = self._rare_share(stat)
            if interval is None and not stat.sums.residual.any():
                # Nothing varies between prompts: identical sides, above all.
                interval = stat.sums.value, stat.sums.value
            intervals[stat.metric.name] = interval
            if interval is None:
                drawn.append(stat)
        if self.n_prompts < PERCENTILE_FROM:
            for stat in drawn:
                intervals[stat.metric.name] = bootstrap_t(stat.sums, self.weights)
        elif drawn:
            for stat, values in zip(drawn, self._resampled(drawn), strict=True):
                intervals[stat.metric.name] = central(values)
        estimates = {}
        for stat in several:
            interval = intervals[stat.metric.name]
            if interval is not None:
                interval = with_unseen(stat.metric, stat.value, interval, self.n_prompts)
            bounded = self._bounded(stat.metric, stat.value, interval, stat.flags)
            estimates[stat.metric.name] = bounded
        return estimates

    def _rare_share(self, stat: _Smooth) -> Interval | None:
        """Wilson's interval where a share's rarer outcome is seen in few prompts, but is seen."""
        if stat.metric.unit != "share" or stat.metric.kind != "mean" or stat.terms.shape[1] != 1:
            return None
        events = stat.terms[:, 0]
        seen = int((events > 0.0).sum()), int((events < stat.sums.count).sum())
        if not 0 < min(seen) < RARE_PROMPTS:
            return None
        return wilson(stat.sums.value, stat.sums.error, student(self.n_prompts - 1))

    def _resampled(self, several: Sequence[_Smooth]) -> Iterator[Floats]:
        """Values of all resamples, [R] each: every resample serves all metrics."""
        columns = [array for s in several for array in (s.sums.sums, s.sums.count[:, None])]
        table = np.concatenate(columns, axis=1)
        groups = self.weights.shape[1]
        if groups < self.n_prompts:  # each holds prompts from everywhere, and as many as others
            table = np.pad(table, ((0, -self.n_prompts % groups), (0, 0)))
            table = table.reshape(-1, groups, table.shape[1]).sum(0)
        resampled = self.weights @ table
        start = 0
        for s in several:
            stop = start + s.sums.sums.shape[1]
            yield s.sums.shifted(resampled[:, start:stop] / resampled[:, stop : stop + 1])
            start = stop + 1


def _whole(name: str, values: Array) -> Ints:
    array = np.asarray(values)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise MismatchError(
            f"{name} must be a list of whole numbers, not {array.ndim}-dimensional {array.dtype}"
        )
    return array
