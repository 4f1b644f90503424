"""Separate staleness and mismatch, and check labels of weight versions by the rows' distances.

In an asynchronous run delta = train - rollout holds two things: what the weights changed between
sampling and the trainer's pass (staleness), and what the sides disagree on at equal weights
(mismatch). Where they are independent their mean squares add, so that tokens of the newest weights,
or a pass of the trainer with the sampler's weights, separate them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch.analysis.row_scores import BINS, FEW, bins_of
from mismatch.metrics.inference import draws
from mismatch.metrics.registry import floats
from mismatch.types import Estimate, Floats, Ints

VERSION, OLD = "version", "old"  # arrays of a recorded scoring, per token
LEAST_TOKENS = 8  # of a row that is scored
UNKNOWN = -1  # lag of a token whose version of the weights nobody says
LEAST = 500  # tokens of a lag whose mean square is used
LEAST_BIN = 50  # tokens of a bin whose own mean square is used
LEAST_PROMPTS = 5
RESAMPLES = 400  # of prompts, for 95 % intervals
LEAST_ROWS = 12  # of a version of the weights whose rows are compared
RIGHT = 0.95  # share of labels that are taken to be right before the rows are seen
CHANCE = 1e-4  # of one false label being named in a run whose labels are right
INSIDE = 3.0  # spreads from the centre of another version, within which a row fits it


@dataclass(frozen=True)
class AtLag:
    """Tokens whose weights are so many versions behind the newest that sampled."""

    lag: int
    tokens: int
    mismatch: float
    """Root mean square of delta at lag 0, of tokens of the same probabilities, nats."""
    staleness: float
    """Root of what the mean square is above that, nats; 0 where it is below."""


@dataclass(frozen=True)
class Split:
    """The mean square of delta in two parts that add up to it."""

    by: str
    """``lag``: of weight versions; ``old``: of a third column, the trainer's earlier pass."""
    mismatch: Estimate
    """Root mean square of what the sides disagree on at equal weights, nats."""
    staleness: Estimate
    """Root mean square of what the weights changed, nats."""
    share: Estimate
    """Of the mean square: what the weights changed."""
    lags: tuple[AtLag, ...] = ()

    @property
    def stale(self) -> bool:
        """Whether the weights changed anything, beyond chance."""
        return self.share.low is not None and self.share.low > 0.02

    @property
    def mismatched(self) -> bool:
        """Whether the sides disagree at equal weights by more than what the weights changed."""
        return self.share.high is not None and self.share.high < 0.5


def lags_of(version: Floats, step: Floats | None) -> Ints:
    """Return [A] how many versions behind the newest that sampled in a step.

    Labels count from any number, so the least difference of step and version counts as 0.

    Args:
        version: [A] of the weights that sampled each token; NaN: unknown.
        step: [A] of the trainer; None: one step.

    >>> lags_of(np.array([7.0, 6.0, np.nan]), None).tolist()
    [0, 1, -1]
    >>> lags_of(np.array([7.0, 7.0]), np.array([8.0, 9.0])).tolist()
    [0, 1]
    """
    behind = (0.0 if step is None else step) - version
    known = np.isfinite(behind)
    lag = np.full(len(version), UNKNOWN, np.int64)
    if known.any():
        lag[known] = (behind[known] - behind[known].min()).astype(np.int64)
    return lag


def split_by_lag(delta: Floats, rollout: Floats, lag: Ints, prompt: Ints) -> Split | None:
    """Return the split by tokens of the newest weights; None where one lag has tokens enough.

    Args:
        delta, rollout: [A] nats; the mean square at lag 0 is taken by bins of ``rollout``, so that
            rows of other probabilities can be compared.
        lag: [A] as :func:`lags_of` gives it.
        prompt: [A] prompt of each token; intervals resample prompts.
    """
    held = lag >= 0
    delta, bins, lag = delta[held], bins_of(rollout[held]) if held.any() else lag, lag[held]
    late = lag > 0
    if min(int(late.sum()), int((~late).sum())) < LEAST:
        return None
    kinds, group = np.unique(prompt[held], return_inverse=True)
    cell = (group * 2 + late) * BINS + bins
    shape = len(kinds), 2, BINS
    count = np.bincount(cell, minlength=2 * BINS * len(kinds)).reshape(shape).astype(float)
    square = np.bincount(cell, delta**2, 2 * BINS * len(kinds)).reshape(shape)

    def parts(count: Floats, square: Floats) -> Floats:
        """Return mean squares [..., (mismatch, total)] of sums [..., 2, bins]."""
        pooled = square[..., 0, :].sum(-1, keepdims=True) / count[..., 0, :].sum(-1, keepdims=True)
        own = square[..., 0, :] / np.maximum(count[..., 0, :], 1)
        base = np.where(count[..., 0, :] >= LEAST_BIN, own, pooled)
        tokens = count[..., 1, :].sum(-1)
        return np.stack(
            [(base * count[..., 1, :]).sum(-1) / tokens, square[..., 1, :].sum(-1) / tokens], -1
        )

    both: Floats = np.concatenate([count, square], axis=1, dtype=np.float64)
    drawn = _resampled(floats(both.reshape(len(kinds), -1))).reshape(-1, 4, BINS)
    drawn = drawn[(drawn[:, 0].sum(-1) > 0) & (drawn[:, 1].sum(-1) > 0)]
    whole = parts(count.sum(0), square.sum(0))
    means = np.stack([whole[0], whole[1] - whole[0]])
    resampled = parts(drawn[:, :2], drawn[:, 2:])
    resampled = np.stack([resampled[:, 0], resampled[:, 1] - resampled[:, 0]], -1)
    table = []
    for each in np.unique(lag).tolist():
        here = lag == each
        total = np.bincount(bins[here], minlength=BINS).astype(float)
        of_lag = np.stack([count.sum(0)[0], total])
        sums = np.stack([square.sum(0)[0], np.bincount(bins[here], delta[here] ** 2, BINS)])
        base, found = parts(of_lag, sums).tolist()
        stale = max(0.0, found - base) if each else 0.0
        table.append(AtLag(each, int(here.sum()), base**0.5, stale**0.5))
    size = len(delta), 0, len(kinds)
    return _split("lag", means, resampled, size, tuple(table))


def split_by_old(delta: Floats, engine: Floats, prompt: Ints) -> Split:
    """Return the split by a third column: delta = (train - old) + (old - rollout).

    Shares are of the mean of each part times delta, so that they add up to 1 where the parts are
    not independent, too.

    Args:
        engine: [A] old - rollout, of ``old`` the trainer's pass with the weights that sampled.
    """
    kinds, group = np.unique(prompt, return_inverse=True)
    later = delta - engine
    terms = (engine * delta, later * delta, engine**2, later**2, np.ones_like(delta))
    sums = np.stack([np.bincount(group, term) for term in terms], -1)
    drawn = _resampled(floats(sums))
    whole = sums.sum(0)
    means, resampled = whole[:2] / whole[4], drawn[:, :2] / drawn[:, 4:]
    own = whole[2:4] / whole[4], drawn[:, 2:4] / drawn[:, 4:]
    return _split("old", means, resampled, (len(delta), 0, len(kinds)), own=own)


def _resampled(sums: Floats) -> Floats:
    """Return [R, k] sums over resampled groups, of sums [G, k]."""
    return np.concatenate([weights @ sums for weights in draws(len(sums), RESAMPLES, 0)])


def _split(
    by: str,
    means: Floats,
    resampled: Floats,
    size: tuple[int, int, int],
    lags: tuple[AtLag, ...] = (),
    own: tuple[Floats, Floats] | None = None,
) -> Split:
    """Return a split of mean squares (mismatch, staleness) [2], with those of resamples [R, 2]."""

    def estimate(value: float, of: Floats) -> Estimate:
        if size[2] < LEAST_PROMPTS:
            return Estimate(float(value), None, None, *size, flags=("few-prompts",))
        low, high = np.quantile(of, [0.025, 0.975])
        return Estimate(float(value), float(low), float(high), *size)

    roots, drawn = own or (means, resampled)
    rms = [
        estimate(np.sqrt(max(0.0, roots[at])), np.sqrt(np.maximum(0.0, drawn[:, at])))
        for at in (0, 1)
    ]
    total = max(float(means.sum()), 1e-300)
    share = resampled[:, 1] / np.maximum(resampled.sum(-1), 1e-300)
    return Split(by, rms[0], rms[1], estimate(means[1] / total, share), lags)


@dataclass(frozen=True)
class FalseLabel:
    """Rows that claim one version of the weights, and are as far apart as rows of another."""

    claimed: int
    """Lag by the label."""
    fits: int
    """Lag whose rows are so far apart."""
    rows: tuple[int, ...]


def false_labels(score: Floats, tokens: Ints, lag: Ints) -> tuple[FalseLabel, ...]:
    """Return rows whose distance does not fit their label, by a mixture over versions.

    Each lag is a normal component of the rows' scores, and a label is right with probability
    ``RIGHT``. A row is named where another component is so much likelier that a right label would
    be named in one run of ten thousand, and where at least ``FEW`` rows of a label are.

    Args:
        score: [N] logarithm of each row's distance, relative to its tokens' probabilities.
        tokens: [N] of each row: a row's spread falls with the root of its tokens.
        lag: [N] of each row by its label; UNKNOWN rows are left out.
    """
    known = np.flatnonzero(lag >= 0)
    kinds, count = np.unique(lag[known], return_counts=True)
    kinds = kinds[count >= LEAST_ROWS]
    at = known[np.isin(lag[known], kinds)]
    if len(kinds) < 2:
        return ()
    own = np.searchsorted(kinds, lag[at])
    x, root = score[at], np.sqrt(np.median(tokens[at]) / tokens[at])
    centre = np.array([np.median(x[own == k]) for k in range(len(kinds))])
    spread = 1.4826 * float(np.median(np.abs(x - centre[own]) / root))
    rows = np.arange(len(at))
    prior = np.full((len(at), len(kinds)), np.log((1 - RIGHT) / (len(kinds) - 1)))
    prior[rows, own] = np.log(RIGHT)
    for _ in range(20):
        spread = max(spread, 1e-6)
        off = (x[:, None] - centre) / (spread * root[:, None])
        weight = prior - off**2 / 2
        weight = np.exp(weight - weight.max(1, keepdims=True))
        weight /= weight.sum(1, keepdims=True)
        centre = (weight * x[:, None]).sum(0) / np.maximum(weight.sum(0), 1e-12)
        spread = float(
            np.sqrt((weight * ((x[:, None] - centre) / root[:, None]) ** 2).sum() / len(x))
        )
    off = (x[:, None] - centre) / (max(spread, 1e-6) * root[:, None])
    best = np.abs(off).argmin(1)
    gain = (off[rows, own] ** 2 - off[rows, best] ** 2) / 2
    wrong = (gain > np.log(len(at) / CHANCE)) & (np.abs(off[rows, best]) < INSIDE)
    found = []
    for claimed in range(len(kinds)):
        for fits in range(len(kinds)):
            which = at[wrong & (own == claimed) & (best == fits)]
            if len(which) >= FEW:
                found.append(
                    FalseLabel(int(kinds[claimed]), int(kinds[fits]), tuple(which.tolist()))
                )
    return tuple(found)
