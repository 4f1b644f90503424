"""From the arrays of a comparison to every metric with its interval.

A metric's terms are summed once per prompt; intervals (:mod:`mismatch.metrics.inference`) work on
those sums. Terms are computed for some whole prompts at a time, so that they stay in the
processor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
    student,
    wilson,
)
from mismatch.metrics.quantiles import quantile_cuts, woodruff_ends
from mismatch.metrics.registry import FLAT, REALS, Array, Metric, floats, plain_array
from mismatch.metrics.sequence import Ordered
from mismatch.metrics.tails import Tail, heavy_tail
from mismatch.types import Bools, Estimate, Floats, Ints

RESAMPLES = 1000
LARGEST = 0.01  # share of the tokens by which clustering of rare events is told
CHUNK = 1 << 16  # tokens whose terms are computed at a time
FEW_CHUNKS = 4  # of so few tokens all large terms are kept, not those above a sample's
KEPT = 1 << 23  # counts of draws that are kept for the next metric: 64 MiB


@dataclass(frozen=True, slots=True)
class _Sums:
    """Terms of a metric: sums per prompt [P, M], the one value of a constant column, the tail.

    Attributes:
        heavy: None where too few large terms were kept to tell.
    """

    sums: Floats
    constant: list[float | None]
    heavy: bool | None


class _Tally:
    """What is kept of a metric's terms while its chunks pass by.

    Args:
        sample: some of the terms, a column each.
    """

    def __init__(self, sample: list[Floats] | None) -> None:
        self._sample = sample
        self._rows: list[list[Floats]] = []
        self._values: list[set[float | None]] = []
        self._tails: list[Tail] = []

    def add(self, parts: list[Floats], starts: Ints) -> None:
        if not self._rows:
            samples = [None] * len(parts) if self._sample is None else self._sample
            self._tails = [Tail(sample) for sample in samples]
            self._values = [set() for _ in parts]
        for tail, part, values in zip(self._tails, parts, self._values, strict=True):
            tail.add(part)
            values.add(_only_value(part))
        self._rows.append([np.add.reduceat(part, starts) for part in parts])

    def rows(self) -> list[Floats]:
        """Sums over each run of tokens, a column each."""
        return [np.concatenate(column) for column in zip(*self._rows, strict=True)]

    def constant(self) -> list[float | None]:
        return [next(iter(seen)) if len(seen) == 1 else None for seen in self._values]

    def heavy(self, units: int) -> bool | None:
        found = [tail.heavy(units) for tail in self._tails]
        return None if None in found and True not in found else any(found)


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
        chunk: tokens whose terms are computed at a time, about.

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
        chunk: int = CHUNK,
    ) -> None:
        sequence, prompt = _whole("sequence", sequence), _whole("prompt", prompt)
        if not len(sequence):
            raise EmptyComparison()
        self._order: Ints | None = None
        if (np.diff(sequence) < 0).any():
            self._order = np.argsort(sequence, kind="stable")
            sequence = sequence[self._order]
        starts = np.concatenate([[0], np.flatnonzero(np.diff(sequence)) + 1])
        _require_prompts(sequence[starts], prompt)
        present, self._prompts = np.unique(prompt[sequence[starts]], return_inverse=True)
        self._sequence = sequence.view(Ordered)
        self._sequence.starts, self._sequence.kept = starts, {}
        self.n_tokens, self.n_sequences = len(sequence), len(starts)
        self.n_prompts = len(present)
        # Tokens of a prompt that lie side by side are one run; samples of a prompt mostly do.
        first = np.concatenate([[True], np.diff(self._prompts) != 0])
        self._runs, self._run_prompts = starts[first], self._prompts[first]
        lengths = np.diff(starts, append=len(sequence))
        self._counts = {
            "token": floats(np.bincount(self._prompts, lengths, self.n_prompts)),
            "sequence": floats(np.bincount(self._prompts, minlength=self.n_prompts)),
        }
        self._seed, self._resamples, self._chunk = seed, resamples, chunk

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
        ready = self._ready(wanted, arrays)
        last: tuple[Any, Floats, Floats] | None = None  # quantiles of the same terms come in a row
        estimates: dict[str, Estimate | None] = {}
        smooth: list[_Smooth] = []
        with np.errstate(all="ignore"):
            sums = self._sums([m for m in wanted if m.kind in ("mean", "ratio")], ready)
            for metric in wanted:
                estimates[metric.name] = None  # keeps the order
                if metric.kind == "extreme":
                    terms = metric.terms(**{name: ready[name] for name in metric.needs})
                    estimates[metric.name] = self._bare(metric.value(terms))
                elif metric.kind == "quantile":
                    if last is None or last[0] is not metric.terms:
                        terms = self._all_parts(metric, ready)[0]
                        last = metric.terms, terms, np.sort(terms)
                    estimates[metric.name] = self._quantile(metric, *last[1:])
                else:
                    found = self._smooth(metric, sums[metric.name], ready)
                    if isinstance(found, _Smooth):
                        smooth.append(found)
                    else:
                        estimates[metric.name] = found
            estimates |= self._with_intervals(smooth)
        return {
            name: estimate
            for name, estimate in estimates.items()
            if estimate is not None and not np.isnan(estimate.value)
        }

    def one(self, metric: Metric, arrays: Mapping[str, Array]) -> Estimate | None:
        """One metric with its interval; None where its value is undefined."""
        missing = [name for name in metric.needs if name not in arrays]
        if missing and not (missing == ["delta"] and {"rollout", "train"} <= set(arrays)):
            raise MismatchError(f"{metric.name} needs {', '.join(missing)}, which was not given")
        return self.all([metric], arrays).get(metric.name)

    @cached_property
    def weights(self) -> Floats:
        """How often each resample draws each prompt, [resamples, P]."""
        return np.concatenate(list(draws(self.n_prompts, self._resamples, self._seed)))

    # ------------------------------------------------------------ arrays and terms

    def _ready(self, metrics: Sequence[Metric], arrays: Mapping[str, Array]) -> dict[str, Array]:
        """What metrics need: checked, in order of the sequences, floats as float64."""
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
            raise MismatchError(
                f"{name} has {tokens} tokens, sequence has {self.n_tokens}",
                "give one entry per action token in every array",
            )
        infinite = array == np.inf if name.startswith("exact_kl") else False  # the worst value
        if array.dtype.kind == "f" and not (np.isfinite(array) | infinite).all():
            bad = np.argwhere(~np.isfinite(array))[0]
            raise MismatchError(
                f"{name} is {array[tuple(bad)]} at action token {int(bad[0])}",
                "look for overflow (fp16), -inf of a masked token, or padding that was scored",
            )
        if (array.dtype.kind == "f" and array.ndim == 1) or name in REALS:
            array = array.astype(np.float64, copy=False)  # tables [A, L] stay, for their size
        return array if self._order is None else array[self._order]

    def _chunks(self) -> Iterator[tuple[int, int, Ints]]:
        """First and last token of some whole runs, and where each run starts among them."""
        edges = np.append(self._runs, self.n_tokens)
        first = 0
        while first < len(self._runs):
            last = int(np.searchsorted(edges, edges[first] + self._chunk, "right")) - 1
            last = max(last, first + 1)
            yield int(edges[first]), int(edges[last]), self._runs[first:last] - edges[first]
            first = last

    def _parts(
        self, metric: Metric, ready: Mapping[str, Array], units: int, **origin: Any
    ) -> list[Floats]:
        """A metric's terms, [units] per column."""
        parts = [floats(part) for part in metric.parts(ready, **origin)]
        for part in parts:
            if part.shape != (units,):
                raise MismatchError(
                    f"{metric.name}: terms of shape {part.shape} for {units} {metric.reduction}s",
                    "its arrays must hold one row per action token",
                )
        return parts

    def _all_parts(self, metric: Metric, ready: Mapping[str, Array]) -> list[Floats]:
        units = self.n_tokens if metric.reduction == "token" else self.n_sequences
        return self._parts(metric, ready, units)

    def _per_prompt(self, values: Array, metric: Metric) -> Floats:
        """Sums over each prompt, [P], of the values of all units."""
        if metric.reduction == "sequence":
            return floats(np.bincount(self._prompts, values, self.n_prompts))
        if values.dtype == bool:
            return self._of_runs(self._counted(values))
        return self._of_runs(np.add.reduceat(values, self._runs, dtype=np.float64))

    def _counted(self, events: Bools) -> Floats:
        """How many tokens of each run are events: a fifth of the time of adding them up."""
        ends = [*self._runs[1:], self.n_tokens]
        parts = (events[low:high] for low, high in zip(self._runs, ends, strict=True))
        return floats([np.count_nonzero(part) for part in parts])

    def _of_runs(self, sums: Floats) -> Floats:
        return floats(np.bincount(self._run_prompts, sums, self.n_prompts))

    def _sums(self, metrics: Sequence[Metric], ready: Mapping[str, Array]) -> dict[str, _Sums]:
        """Of means and ratios, by name."""
        chunked = [m for m in metrics if m.reduction == "token"]
        sampled = self._in_chunks(chunked, ready, self._sample(chunked, ready))
        misled = [m for m in chunked if sampled[m.name].heavy is None]
        sums = sampled | self._in_chunks(misled, ready, {})
        for metric in metrics:
            if metric.name not in sums:
                parts = self._all_parts(metric, ready)
                sums[metric.name] = _Sums(
                    np.stack([self._per_prompt(part, metric) for part in parts]).T,
                    [_only_value(part) for part in parts],
                    any(map(heavy_tail, parts)),
                )
        return sums

    def _sample(
        self, metrics: Sequence[Metric], ready: Mapping[str, Array]
    ) -> dict[str, list[Floats]]:
        """Some of the terms of many tokens, by metric: what is large is measured by them."""
        if self.n_tokens <= FEW_CHUNKS * self._chunk:
            return {}
        stride = -(-self.n_tokens // self._chunk)
        few = {name: array[::stride] for name, array in ready.items() if name in FLAT}
        return {
            metric.name: self._parts(metric, few, len(few["sequence"]), **metric.origin(ready))
            for metric in metrics
            if few.keys() >= set(metric.needs)
        }

    def _in_chunks(
        self,
        metrics: Sequence[Metric],
        ready: Mapping[str, Array],
        samples: Mapping[str, list[Floats]],
    ) -> dict[str, _Sums]:
        tallies = {metric.name: _Tally(samples.get(metric.name)) for metric in metrics}
        origins = {metric.name: metric.origin(ready) for metric in metrics}
        names = {name for metric in metrics for name in metric.needs}
        for low, high, starts in self._chunks() if metrics else ():
            chunk = {name: ready[name][low:high] for name in names}
            for metric in metrics:
                parts = self._parts(metric, chunk, high - low, **origins[metric.name])
                tallies[metric.name].add(parts, starts)
        return {
            name: _Sums(
                np.stack([self._of_runs(row) for row in tally.rows()]).T,
                tally.constant(),
                tally.heavy(self.n_tokens),
            )
            for name, tally in tallies.items()
        }

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
        under, tail = (self._per_prompt(terms <= cut, metric) for cut in (value, wider))
        count = self._counts[metric.reduction]
        interval = woodruff_ends(ordered, under, tail, count, metric.probability)
        flags = [*self._few, *(["few-tokens"] if interval is None else [])]
        return self._bounded(metric, value, interval, flags)

    def _smooth(
        self, metric: Metric, found: _Sums, ready: Mapping[str, Array]
    ) -> _Smooth | Estimate | None:
        count = self._counts[metric.reduction]
        prompt_sums = PromptSums.of_sums(found.sums, count, found.constant, metric.combine)
        value = metric.of_means(prompt_sums.centre)
        if np.isnan(value):
            return None
        if not np.isfinite(value) or not np.isfinite(found.sums).all():
            return self._bare(value, "overflow")
        if self.n_prompts < 2:
            return self._bare(value, "one-prompt")
        flags = [*self._few, *(["heavy-tail"] if found.heavy else [])]
        flags += ["heavy-prompts"] if prompt_sums.heavy else []
        of_events = metric.unit == "share" and "delta" in metric.needs
        if of_events and not found.sums.any() and ready["delta"].any():
            bare = self._bare(0.0, *self._few, "no-events")
            return replace(bare, low=0.0, high=self._unseen(metric, ready))
        return _Smooth(metric, found.sums, prompt_sums, value, flags)

    def _unseen(self, metric: Metric, ready: Mapping[str, Array]) -> float:
        """One-sided 95 % bound on the share of an event that was not seen.

        3/n (the rule of three), with n the number of independent tokens: all of them over the
        factor by which prompts cluster the tokens of largest |delta|, from which such events come;
        at least as many as there are prompts. Of events of sequences n is the number of prompts.
        """
        units = prompts = float(self.n_prompts)
        if metric.reduction == "token":
            size = np.abs(ready["delta"])
            top = size >= np.quantile(size, 1.0 - LARGEST)
            share = float(top.mean())
            sums = self._of_runs(self._counted(top))
            away = sums - share * self._counts["token"]
            error = prompts / (prompts - 1) * float((away**2).sum()) / self.n_tokens**2
            independent = share * (1.0 - share) / error if error > 0.0 else math.inf
            units = max(min(independent, float(self.n_tokens)), prompts)
        return float(1.0 - 0.05 ** (1.0 / units))

    def _with_intervals(self, several: Sequence[_Smooth]) -> dict[str, Estimate]:
        intervals: dict[str, Interval | None] = {}
        drawn = []
        for one in several:
            interval = self._rare_share(one)
            if interval is None and not one.sums.residual.any():
                # Nothing varies between prompts: identical sides, above all.
                interval = one.sums.value, one.sums.value
            intervals[one.metric.name] = interval
            if interval is None:
                drawn.append(one)
        if self.n_prompts < PERCENTILE_FROM:
            for one in drawn:
                intervals[one.metric.name] = bootstrap_t(one.sums, self.weights)
        elif drawn:
            for one, values in zip(drawn, self._resampled(drawn), strict=True):
                intervals[one.metric.name] = central(values)
        return {
            one.metric.name: self._bounded(
                one.metric, one.value, intervals[one.metric.name], one.flags
            )
            for one in several
        }

    def _rare_share(self, one: _Smooth) -> Interval | None:
        """Wilson's interval where a share's rarer outcome is seen in few prompts, but is seen."""
        if one.metric.unit != "share" or one.metric.kind != "mean" or one.terms.shape[1] != 1:
            return None
        events = one.terms[:, 0]
        seen = int((events > 0.0).sum()), int((events < one.sums.count).sum())
        if not 0 < min(seen) < RARE_PROMPTS:
            return None
        return wilson(one.sums.value, one.sums.error, student(self.n_prompts - 1))

    def _resampled(self, several: Sequence[_Smooth]) -> Iterator[Floats]:
        """Values of all resamples, [R] each: every resample serves all metrics."""
        columns = [array for one in several for array in (one.sums.sums, one.sums.count[:, None])]
        table = np.concatenate(columns, axis=1)
        small = self._resamples * self.n_prompts <= KEPT
        weights = [self.weights] if small else draws(self.n_prompts, self._resamples, self._seed)
        resampled = np.concatenate([drawn @ table for drawn in weights])
        start = 0
        for one in several:
            stop = start + one.sums.sums.shape[1]
            yield one.sums.shifted(resampled[:, start:stop] / resampled[:, stop : stop + 1])
            start = stop + 1


def _only_value(terms: Floats) -> float | None:
    """The one value of all terms, where there is but one."""
    same = terms[0] == terms[-1] and bool((terms == terms[0]).all())
    return float(terms[0]) if same else None


def _whole(name: str, values: Array) -> Ints:
    array = np.asarray(values)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise MismatchError(
            f"{name} must be a list of whole numbers, not {array.ndim}-dimensional {array.dtype}"
        )
    return array


def _require_prompts(sequence: Ints, prompt: Ints) -> None:
    if sequence.min() < 0 or sequence.max() >= len(prompt):
        worst = sequence.min() if sequence.min() < 0 else sequence.max()
        raise MismatchError(
            f"sequence {worst} has no prompt: prompts are given for 0 to {len(prompt) - 1}",
            "give the prompt of every sequence, [N]",
        )
