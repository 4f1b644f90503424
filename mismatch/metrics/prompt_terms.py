"""Terms of metrics, summed per prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mismatch.errors import MismatchError
from mismatch.metrics.registry import Array, Metric, floats
from mismatch.metrics.tails import heavy_sizes
from mismatch.types import Floats, Ints


@dataclass(frozen=True, slots=True)
class Sums:
    """Terms of a metric: sums per prompt [P, M], the one value of a constant column, the tail."""

    sums: Floats
    constant: list[float | None]
    heavy: bool


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

    def sums(self, metric: Metric, ready: Mapping[str, Array]) -> Sums:
        """Sum the terms of a mean or ratio over each prompt."""
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
        return Sums(
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
