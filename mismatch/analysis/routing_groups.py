"""One comparison's routing, grouped: by layer, place, number of flips; with intervals."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mismatch.metrics.inference import Groups, group_means, prompt_sums
from mismatch.metrics.registry import Array, floats
from mismatch.metrics.routing_pairs import PairedRouting
from mismatch.types import Floats, Ints, Pair

Table = dict[str, list[Any]]

POSITION_BUCKETS = 32


@dataclass(frozen=True)
class Seen:
    """One comparison's routing with what its tables share."""

    pair: Pair
    routes: PairedRouting

    @cached_property
    def prompt(self) -> Ints:
        """Prompt of each action token, numbered without gaps, [A]."""
        of_token = self.pair.prompt[self.pair.sequence]
        return np.unique(of_token, return_inverse=True)[1].astype(np.int64)

    @cached_property
    def prompts(self) -> int:
        return int(self.prompt.max()) + 1

    @cached_property
    def bucket(self) -> tuple[Ints, int]:
        """Bucket of each token's place among its sequence's action tokens, and their width."""
        first = np.searchsorted(self.pair.sequence, self.pair.sequence)
        position = np.arange(len(self.pair.sequence)) - first
        width = 1
        while position.max() // width >= POSITION_BUCKETS:
            width *= 2
        return position // width, width

    def means(self, group: Ints, groups: int, values: Array, bounds: tuple[float, float]) -> Groups:
        """Mean of ``values`` [A] per group of tokens; tokens of group -1 are left out."""
        kept = group >= 0
        prompt, group = self.prompt[kept], group[kept]
        sums = prompt_sums(prompt, self.prompts, group, groups, floats(values[kept]))
        counts = prompt_sums(prompt, self.prompts, group, groups, np.ones(len(group)))
        return group_means(sums, counts, bounds)

    def per_layer(self, values: Array, units: Array, bounds: tuple[float, float]) -> Groups:
        """Mean of ``values`` [A, L] per layer, over the pairs that ``units`` [A, L] marks."""
        return group_means(self._sums(values), self._sums(units), bounds)

    def _sums(self, values: Array) -> Floats:
        """Per prompt and layer, [P, L]; a layer at a time: no [A, L] of float64."""
        columns = [
            np.bincount(self.prompt, floats(values[:, layer]), minlength=self.prompts)
            for layer in range(values.shape[1])
        ]
        return np.stack(columns, axis=1)


def columns(groups: Groups, name: str, prefix: str = "") -> Table:
    return {name: known(groups.mean), f"{prefix}low": groups.low, f"{prefix}high": groups.high}


def known(values: Floats) -> list[float | None]:
    """NaN as None."""
    return [None if np.isnan(value) else float(value) for value in values]


def picked(table: Table, rows: Ints) -> Table:
    return {name: [column[row] for row in rows] for name, column in table.items()}
