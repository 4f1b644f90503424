"""Means per group (layer, position, expert …) with intervals, for tables with many rows.

Whole prompts are the unit of chance, as in :mod:`mismatch.metrics.estimate`; but a table of a
thousand rows is no place for a bootstrap each. The interval here is the linearised one: the
standard error over prompts times Student's t, and Wilson's for a share that few prompts show.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch.metrics.estimate import RARE_PROMPTS, student, wilson
from mismatch.metrics.registry import Array, floats
from mismatch.types import Floats, Ints


@dataclass(frozen=True, slots=True)
class Groups:
    """G groups. ``low`` and ``high`` are None where there is no interval: one prompt, no unit.

    Attributes:
        mean: [G], NaN in a group without units.
        count: [G] units.
    """

    mean: Floats
    low: list[float | None]
    high: list[float | None]
    count: Ints


def prompt_sums(prompt: Ints, prompts: int, group: Ints, groups: int, values: Array) -> Floats:
    """Sums of ``values`` [R] per prompt and group, [P, G]; ``prompt`` and ``group`` are [R]."""
    code = prompt * groups + group
    summed = np.bincount(code, weights=values, minlength=prompts * groups)
    return floats(summed.reshape(prompts, groups))


def group_means(sums: Floats, counts: Floats, bounds: tuple[float, float]) -> Groups:
    """Mean and 95 % interval of every group from sums and counts per prompt, both [P, G].

    The standard error is that of the ratio Σ sums / Σ counts, linearised over prompts.

    Args:
        bounds: values that the mean can take; (0, 1) makes it a share.
    """
    prompts = len(sums)
    total = counts.sum(axis=0)
    with np.errstate(all="ignore"):
        mean = sums.sum(axis=0) / total
        residual = sums - mean * counts
        error = np.sqrt(prompts / max(prompts - 1, 1) * (residual**2).sum(axis=0)) / total
    low: list[float | None] = [None] * len(total)
    high: list[float | None] = [None] * len(total)
    if prompts > 1:
        z = student(prompts - 1)
        for g in np.flatnonzero(total > 0):
            ends = mean[g] - z * error[g], mean[g] + z * error[g]
            if bounds == (0.0, 1.0) and _rare(sums[:, g], counts[:, g]):
                ends = wilson(float(mean[g]), float(error[g]), z)
            cut = np.clip(ends, *bounds)
            low[g], high[g] = float(min(cut[0], mean[g])), float(max(cut[1], mean[g]))
    return Groups(mean, low, high, np.rint(total).astype(np.int64))


def _rare(sums: Floats, counts: Floats) -> bool:
    """Whether the rarer outcome of a share is seen, but in few prompts."""
    seen = int((sums > 0.0).sum()), int((sums < counts).sum())
    return 0 < min(seen) < RARE_PROMPTS
