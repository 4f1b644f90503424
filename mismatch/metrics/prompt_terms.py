"""Terms of metrics, summed per prompt.

They are computed for some whole prompts at a time, so that they stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mismatch.errors import MismatchError
from mismatch.metrics.registry import FLAT, Array, Metric, floats
from mismatch.metrics.tails import Tail, heavy_tail
from mismatch.types import Bools, Floats, Ints

FEW_CHUNKS = 4  # of so few tokens all large terms are kept, not those above a sample's


@dataclass(frozen=True, slots=True)
class Sums:
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
        heavy = [tail.heavy(units) for tail in self._tails]
        return None if None in heavy and True not in heavy else any(heavy)


class Prompts:
    """Which tokens and sequences each prompt has.

    Args:
        starts: [n] first token of each sequence.
        prompt: [n] prompt of each sequence, any whole numbers.
        tokens: A, of all sequences.
        chunk: tokens whose terms are computed at a time, about.
    """

    def __init__(self, starts: Ints, prompt: Ints, tokens: int, chunk: int) -> None:
        present, self._prompts = np.unique(prompt, return_inverse=True)
        self.n_tokens, self.n_sequences, self.n_prompts = tokens, len(starts), len(present)
        # Tokens of a prompt that lie side by side are one run; samples of a prompt mostly do.
        first = np.concatenate([[True], np.diff(self._prompts) != 0])
        self._runs, self._run_prompts = starts[first], self._prompts[first]
        lengths = np.diff(starts, append=tokens)
        self.counts = {
            "token": floats(np.bincount(self._prompts, lengths, self.n_prompts)),
            "sequence": floats(np.bincount(self._prompts, minlength=self.n_prompts)),
        }
        self._chunk = chunk

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

    def terms(self, metric: Metric, ready: Mapping[str, Array]) -> list[Floats]:
        units = self.n_tokens if metric.reduction == "token" else self.n_sequences
        return self._parts(metric, ready, units)

    def total(self, values: Array, metric: Metric) -> Floats:
        """Sums over each prompt, [P], of the values of all units."""
        if metric.reduction == "sequence":
            return floats(np.bincount(self._prompts, values, self.n_prompts))
        if values.dtype == bool:
            return self.events(values)
        return self._of_runs(np.add.reduceat(values, self._runs, dtype=np.float64))

    def events(self, of_tokens: Bools) -> Floats:
        """How many tokens of each prompt are events, [P]: a fifth of the time of adding them up."""
        ends = [*self._runs[1:], self.n_tokens]
        parts = (of_tokens[low:high] for low, high in zip(self._runs, ends, strict=True))
        return self._of_runs(floats([np.count_nonzero(part) for part in parts]))

    def _of_runs(self, sums: Floats) -> Floats:
        return floats(np.bincount(self._run_prompts, sums, self.n_prompts))

    def sums(self, metrics: Sequence[Metric], ready: Mapping[str, Array]) -> dict[str, Sums]:
        """Of means and ratios, by name."""
        chunked = [m for m in metrics if m.reduction == "token"]
        sampled = self._in_chunks(chunked, ready, self._sample(chunked, ready))
        misled = [m for m in chunked if sampled[m.name].heavy is None]
        sums = sampled | self._in_chunks(misled, ready, {})
        for metric in metrics:
            if metric.name not in sums:
                parts = self.terms(metric, ready)
                sums[metric.name] = Sums(
                    np.stack([self.total(part, metric) for part in parts]).T,
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
    ) -> dict[str, Sums]:
        tallies = {metric.name: _Tally(samples.get(metric.name)) for metric in metrics}
        origins = {metric.name: metric.origin(ready) for metric in metrics}
        names = {name for metric in metrics for name in metric.needs}
        for low, high, starts in self._chunks() if metrics else ():
            chunk = {name: ready[name][low:high] for name in names}
            for metric in metrics:
                parts = self._parts(metric, chunk, high - low, **origins[metric.name])
                tallies[metric.name].add(parts, starts)
        return {
            name: Sums(
                np.stack([self._of_runs(row) for row in tally.rows()]).T,
                tally.constant(),
                tally.heavy(self.n_tokens),
            )
            for name, tally in tallies.items()
        }


def _only_value(terms: Floats) -> float | None:
    """The one value of all terms, where there is but one."""
    same = terms[0] == terms[-1] and bool((terms == terms[0]).all())
    return float(terms[0]) if same else None
