"""Did a change do anything? Two sides exchanged within prompts; several tests adjusted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

import numpy as np

from mismatch.errors import MismatchError
from mismatch.metrics.registry import floats
from mismatch.types import Floats

LEVEL = 0.05  # of a family of tests
EXHAUSTIVE = 12  # prompts up to which all swaps are tried
SWAPS, CHUNK = 20_000, 2_000  # random swaps; worked on at once
PerPrompt = Mapping[int, tuple[float, float]]  # (sum of terms, number of tokens)


def exchange(before: PerPrompt, after: PerPrompt, *, seed: int = 0) -> float:
    """Test two sides by permutation, on (sum of terms, number of tokens) of every prompt.

    Where a change does nothing, a prompt's numbers with it and without it could as well be swapped;
    the statistic is the difference of the two means over tokens. That holds for few prompts and for
    heavy tails, and for tokens that were sampled again as well as for the same tokens.

    Raises:
        MismatchError: no prompt that both sides hold.
    """
    sums = (before, after)
    shared = sorted(before.keys() & after.keys())
    if not shared:
        raise MismatchError("before and after share no prompt", "use the same prompts")
    table = np.array([[*sums[0][prompt], *sums[1][prompt]] for prompt in shared])
    first, count, second, other = table.T
    observed = _statistic(first.sum(), count.sum(), second.sum(), other.sum())
    if not np.isfinite(observed):
        return 1.0
    moved, shift = second - first, other - count
    # Sums in another order differ in their last bits: a change of that size is none.
    rounding = 1e-12 * (abs(first.sum() / count.sum()) + abs(second.sum() / other.sum()))
    least = max(0.0, abs(observed) - rounding)
    extreme = tried = 0
    if len(shared) <= EXHAUSTIVE:
        rows: Iterable[Floats] = [np.array(list(product((0.0, 1.0), repeat=len(shared))))]
    else:  # 0 and 1: which prompts are exchanged
        draw = np.random.default_rng(seed)
        rows = (floats(draw.random((CHUNK, len(shared))) < 0.5) for _ in range(SWAPS // CHUNK))
    for swaps in rows:
        a, n_a = first.sum() + swaps @ moved, count.sum() + swaps @ shift
        b, n_b = second.sum() - swaps @ moved, other.sum() - swaps @ shift
        extreme += int((np.abs(_statistic(a, n_a, b, n_b)) >= least).sum())
        tried += len(swaps)
    if len(shared) <= EXHAUSTIVE:
        return extreme / tried
    return (extreme + 1) / (tried + 1)


def _statistic(a: Floats, n_a: Floats, b: Floats, n_b: Floats) -> Floats:
    with np.errstate(all="ignore"):
        change: Floats = b / n_b - a / n_a
    return change


def holm(values: Sequence[float]) -> list[float]:
    """Return adjusted p-values, in the order given.

    Holm 1979, "A simple sequentially rejective multiple test procedure".

    >>> holm([0.01, 0.04])
    [0.02, 0.04]
    """
    order = sorted(range(len(values)), key=lambda index: values[index])
    adjusted, highest = [1.0] * len(values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = highest
    return adjusted


def prompts_to_tell(tests: int) -> int:
    """Return prompts below which no change, however large, is significant in that many tests.

    Exchanging before and after within n prompts gives no p-value under 2 / 2^n (an arrangement and
    its mirror image are equally extreme), and Holm's method multiplies the least by ``tests``.

    >>> prompts_to_tell(1), prompts_to_tell(3)
    (6, 7)
    """
    return math.ceil(math.log2(2 * tests / LEVEL))
