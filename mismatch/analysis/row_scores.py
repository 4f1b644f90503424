"""How far apart rows are, beyond what their tokens' probabilities explain; far groups."""

from __future__ import annotations

import numpy as np

from mismatch.types import Bools, Floats, Pair

BINS = 10  # of the sampler's log-probability, whose tokens are expected to be equally far apart
FEW = 3  # rows that a group needs at least
FACTOR = 3.0  # times as far apart as the others; rows of a clean run split by 1.8
# Distance of the two groups' means over their spread. A best split of one normal group gives 2.6,
# that of a clean vLLM and FSDP2 run of 256 rows 2.5.
GAP = 4.5


def bins_of(rollout: Floats) -> np.ndarray:
    """Return [A] a bin of each token by the sampler's log-probability, of bins of equal size."""
    edges = np.quantile(rollout, np.linspace(0, 1, BINS + 1)[1:-1])
    return np.searchsorted(edges, rollout)


def surprises(pair: Pair) -> Floats:
    """Return [A] how far apart each token is, over the mean of tokens of like probability."""
    distance, group = np.abs(pair.delta), bins_of(pair.rollout)
    count = np.maximum(np.bincount(group, minlength=BINS), 1)
    expected = (np.bincount(group, distance, BINS) / count)[group]
    relative: Floats = distance / np.maximum(expected, 1e-12)
    return relative


def far_group(score: Floats) -> Bools | None:
    """Return which scores form a group far above the others; None where there is one group.

    The split is the one with the least variance inside the groups (Otsu 1979).
    """
    order = np.argsort(score)
    ordered = score[order]
    n = len(ordered)
    below, squares = np.cumsum(ordered), np.cumsum(ordered**2)
    size = np.arange(1, n)
    inside = (
        squares[:-1]
        - below[:-1] ** 2 / size
        + (squares[-1] - squares[:-1])
        - (below[-1] - below[:-1]) ** 2 / (n - size)
    )
    allowed = (size >= FEW) & (n - size >= FEW)
    cut = int(np.flatnonzero(allowed)[np.argmin(inside[allowed])]) + 1
    low, high = ordered[:cut], ordered[cut:]
    spread = np.sqrt((low.var() + high.var()) / 2)
    apart = high.mean() - low.mean()
    if apart < np.log(FACTOR) or apart < GAP * max(spread, 1e-9):
        return None
    far = np.zeros(n, np.bool_)
    far[order[cut:]] = True
    return far
