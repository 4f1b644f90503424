"""Bias against noise: what of delta adds up along a response, and what averages out.

Independent noise of a normalised distribution gives exp(delta) a mean of 1, and delta a mean of
about -variance / 2. A bias gives both means the same sign. The log-ratio of a sequence grows with
the square root of its length where tokens are independent, and linearly where a bias persists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mismatch.metrics.inference import draws, student
from mismatch.types import Estimate, Floats, Ints

LEAST_PROMPTS = 8
CHANCE = 1e-5  # that independent noise is named a bias
LEAST_BIAS = 1e-4  # nats per token; less moves a response of 1,000 tokens by under 0.1 nats
LEAST_BLOCKS = 32  # of the longest length whose spread is used
STEEP = 0.7  # exponent of length from which growth is no square root's
RESAMPLES = 400
PLACES = 8  # groups of tokens by their place in the response
LEAST_TOKENS = 500  # of a place or a step


@dataclass(frozen=True)
class Drifting:
    """The signed mean of delta over some tokens."""

    what: str
    """Places in the response (from 0), or a step."""
    mean: Estimate


@dataclass(frozen=True)
class Drift:
    """What of delta is signed, and how the log-ratio grows with length."""

    mean: Estimate
    """Signed mean of delta, nats per token."""
    bias: float
    """Of it and the mean of exp(delta) - 1, the one nearer to 0; 0 where they differ in sign."""
    biased: bool
    """Noise does not explain the bias."""
    spread: float
    """Standard deviation of delta, nats per token."""
    length: int = 0
    """Tokens of the longest blocks; 0: responses are too short or too few."""
    exponent: Estimate | None = None
    """Of the growth with length over its last factor of 4: 0.5 of noise, 1 of a bias."""
    steep: bool = False
    """The exponent is above that of independent tokens beyond chance."""
    places: tuple[Drifting, ...] = ()
    steps: tuple[Drifting, ...] = ()

    @property
    def crossing(self) -> float:
        """Tokens from which the bias moves a sequence's log-ratio by more than the noise does."""
        return (self.spread / self.bias) ** 2 if self.bias else np.inf


def drift_of(delta: Floats, sequence: Ints, prompt: Ints, step: Floats | None) -> Drift | None:
    """Return what of delta drifts; None of fewer than ``LEAST_PROMPTS`` prompts.

    Args:
        delta: [A] nats, tokens in order of their sequence.
        sequence: [A] of each token; ``prompt`` [N] of each sequence.
        step: [A] of the trainer; None: one step.
    """
    group = np.unique(prompt[sequence], return_inverse=True)[1]
    if group.max(initial=-1) + 1 < LEAST_PROMPTS:
        return None
    mean, errors = _mean(delta, group)
    with np.errstate(over="ignore"):
        ratio, of_ratio = _mean(np.expm1(delta), group)
    same = np.sign(mean.value) == np.sign(ratio.value)
    bias = min(mean.value, ratio.value, key=abs) if same and np.isfinite(ratio.value) else 0.0
    certain = min(errors, of_ratio) > _critical(group.max())
    place = np.arange(len(delta)) - np.searchsorted(sequence, sequence)
    edges = np.unique(np.quantile(place, np.linspace(0, 1, PLACES + 1)[1:-1]).astype(int))
    eighth = np.searchsorted(edges, place, "right")
    names = [str(at) for at in np.unique(eighth)]
    places = [f"{place[eighth == int(n)].min()} to {place[eighth == int(n)].max()}" for n in names]
    length, exponent, steep = _growth(delta, sequence, group)
    by_step = (
        ()
        if step is None
        else _drifting(delta, group, step, [f"{each:.0f}" for each in np.unique(step)])
    )
    return Drift(mean, bias, certain and abs(bias) >= LEAST_BIAS, float(delta.std()), length,
                 exponent, steep, _drifting(delta, group, eighth, places), by_step)  # fmt: skip


def _critical(freedom: int) -> float:
    """Return how many standard errors chance gives an estimate with probability ``CHANCE``."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - CHANCE / 2))


def _mean(values: Floats, group: Ints) -> tuple[Estimate, float]:
    """Return a mean with its interval by groups, and how many standard errors it is from 0."""
    kinds, kind = np.unique(group, return_inverse=True)
    sums, count = np.bincount(kind, values), np.bincount(kind)
    size, tokens = len(kinds), len(values)
    mean = float(sums.sum() / tokens)
    if size < LEAST_PROMPTS or not np.isfinite(mean):
        return Estimate(mean, None, None, tokens, 0, size, ("few-prompts",)), 0.0
    error = float(np.sqrt(((sums - mean * count) ** 2).sum() * size / (size - 1)) / tokens)
    half = student(size - 1) * error
    return Estimate(mean, mean - half, mean + half, tokens, 0, size), abs(mean) / max(error, 1e-300)


def _drifting(
    delta: Floats, group: Ints, kind: np.ndarray, names: Sequence[str]
) -> tuple[Drifting, ...]:
    """Return the signed mean of each kind of tokens that has enough of them."""
    found = []
    for each, name in zip(np.unique(kind), names, strict=True):
        here = kind == each
        if here.sum() >= LEAST_TOKENS:
            found.append(Drifting(name, _mean(delta[here], group[here])[0]))
    return tuple(found)


def _growth(delta: Floats, sequence: Ints, group: Ints) -> tuple[int, Estimate | None, bool]:
    """Return the longest length of blocks, the exponent up to it, and whether it is steep."""
    starts = np.flatnonzero(np.diff(sequence, prepend=-1))
    ends = np.append(starts[1:], len(delta))
    total = np.concatenate([[0.0], np.cumsum(delta)])

    def blocks(length: int) -> tuple[Floats, Ints]:
        """Return sums of delta over blocks that do not overlap, and the group of each."""
        at = np.concatenate(
            [np.arange(a, b - length + 1, length) for a, b in zip(starts, ends, strict=True)]
        )
        at = at.astype(np.int64)
        return total[at + length] - total[at], group[at] if len(at) else at

    length = 4
    while True:
        sums, of = blocks(2 * length)
        if len(sums) < LEAST_BLOCKS or len(np.unique(of)) < LEAST_PROMPTS:
            break
        length *= 2
    if length < 16:
        return 0, None, False
    groups, terms = int(group.max()) + 1, []
    for size in (length // 4, length):
        sums, of = blocks(size)
        terms += [np.bincount(of, sums**2, groups), np.bincount(of, minlength=groups).astype(float)]
    table = np.stack(terms, -1)

    def exponent(sums: Floats) -> Floats:
        ratio = (sums[..., 2] / sums[..., 3]) / (sums[..., 0] / sums[..., 1])
        growth: Floats = np.log(ratio) / np.log(16)
        return growth

    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(exponent(table.sum(0)))
        drawn = exponent(np.concatenate([w @ table for w in draws(groups, RESAMPLES, 0)]))
    drawn = drawn[np.isfinite(drawn)]
    if not np.isfinite(value) or len(drawn) < RESAMPLES // 2:
        return 0, None, False
    low, high = np.quantile(drawn, [0.025, 0.975]).tolist()
    error = float(drawn.std())
    steep = value > STEEP and value - 0.5 > _critical(groups - 1) * error
    return length, Estimate(value, low, high, len(delta), 0, groups), steep
