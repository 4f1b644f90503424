"""Sums of a stationary series: what they are made of, and what weights of them are worth.

The arithmetic behind :mod:`mismatch.metrics.forecast`; nothing here knows of reports.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mismatch.metrics.registry import floats
from mismatch.types import Bools, Floats, Ints

MOST_LAGS = 256
LEAST_LAGS = 8  # counted in any case: choosing by their size would make the interval too narrow
QUIET = 2.5  # standard errors under which an autocovariance counts as 0
PERSISTENT = 3.0  # standard errors from which what a sequence has in common is counted
LIMIT = 1.96  # standard errors
CAP = 2.0  # of the truncated weights, as in ess_seq


@dataclass(frozen=True)
class DeltaSequences:
    """Deltas about their mean, laid out by sequence.

    Attributes:
        away: [A] delta - centre.
        lengths: [S] tokens of each sequence.
        rank: [A] position of each token among its sequence's.
    """

    away: Floats
    centre: float
    lengths: Ints
    rank: Ints

    @classmethod
    def of(cls, delta: Floats, lengths: Ints) -> DeltaSequences:
        start = np.repeat(np.cumsum(lengths) - lengths, lengths)
        centre = float(delta.mean())
        return cls(delta - centre, centre, lengths, np.arange(len(delta)) - start)

    def first(self, positions: int) -> DeltaSequences:
        """The same sequences, cut to their first positions; centred anew."""
        keep = self.rank < positions
        delta = self.away[keep] + self.centre
        return DeltaSequences.of(delta, np.minimum(self.lengths, positions))

    def only(self, chosen: Bools) -> DeltaSequences:
        """Some of the sequences, [S] bool; centred anew."""
        keep = np.repeat(chosen, self.lengths)
        return DeltaSequences.of(self.away[keep] + self.centre, self.lengths[chosen])

    def sums(self, values: Floats) -> Floats:
        """[A] -> [S]."""
        return floats(np.add.reduceat(values, np.cumsum(self.lengths) - self.lengths))

    def products(self, lag: int) -> Floats:
        """Sum over each sequence of away[t] away[t + lag], [S]."""
        terms = np.zeros(len(self.away))
        inside = self.rank[lag:] >= lag
        terms[lag:] = np.where(inside, self.away[lag:] * self.away[: len(self.away) - lag], 0.0)
        return self.sums(terms)


@dataclass(frozen=True)
class AutocovarianceFit:
    """Mean, autocovariances and common part, as sums per sequence that can be resampled.

    Attributes:
        terms: [S, 6] per sequence: tokens; sum of delta; of delta²; of 2 g(k) over lags; of
            2 k g(k); of products beyond the lags (scaled to be read per token).
        lags: K.
        beyond: b; counted only where ``persistent``.
        unseen: upper 95 % limit of b where it is not counted, else 0: what may be there all the
            same.
    """

    terms: Floats
    lags: int
    beyond: float
    persistent: bool
    centre: float
    unseen: float = 0.0

    @classmethod
    def of(cls, lines: DeltaSequences, prompt: Ints, most: int) -> AutocovarianceFit:
        lengths, tokens = lines.lengths, len(lines.away)
        square = lines.sums(lines.away**2)
        near, slope, counted = (np.zeros(len(lengths)) for _ in range(3))
        quiet, lags, pending = 0, 0, []
        for lag in range(1, min(most, MOST_LAGS) + 1):
            pairs = int(np.maximum(lengths - lag, 0).sum())
            product = lines.products(lag)
            loud = (
                lag <= LEAST_LAGS
                or abs(product.sum()) >= QUIET * math.sqrt(pairs) * square.sum() / tokens
            )
            pending.append((lag, product, tokens / pairs))
            quiet = 0 if loud else quiet + 1
            if quiet == 2:
                break
            if loud:
                for k, products, scale in pending:
                    near += 2.0 * scale * products
                    slope += 2.0 * k * scale * products
                    counted += products
                lags, pending = lag, []
        all_pairs = (lines.sums(lines.away) ** 2 - square) / 2.0
        far_pairs = float(np.maximum(lengths - lags, 0) @ np.maximum(lengths - lags - 1, 0)) / 2.0
        far = (all_pairs - counted) * (tokens / far_pairs)
        by_prompt = np.bincount(np.unique(prompt, return_inverse=True)[1], weights=far)
        beyond = float(far.sum()) / tokens
        away = by_prompt - by_prompt.mean()
        error = math.sqrt(float((away**2).sum())) / tokens
        terms = np.stack(
            [floats(lengths), lines.sums(lines.away), square, near, slope, far], axis=1
        )
        persistent = beyond > PERSISTENT * error
        unseen = 0.0 if persistent else max(beyond + LIMIT * error, 0.0)
        return cls(terms, lags, beyond, persistent, lines.centre, unseen)

    def moments(self, means: Floats, length: int) -> tuple[Floats, Floats]:
        """(mu, V(length)) from means of the terms, [..., 6] -> [...] each."""
        per_token = means[..., 1:] / means[..., :1]
        shift, square, near, slope, far = np.moveaxis(per_token, -1, 0)
        lags = min(self.lags, length - 1)
        variance = length * (square - shift**2)
        if lags:
            # The lags' own squares of the mean: 2 sum over k of (T - k) shift².
            weight = lags * (2 * length - lags - 1)
            variance = variance + length * near - slope - weight * shift**2
        if self.persistent:
            variance = variance + (length - lags) * (length - lags - 1) * (far - shift**2)
        return floats(self.centre + shift), floats(variance)


def capped_ess(mean: Floats, variance: Floats) -> Floats:
    """(E w)² / E w² of w = min(exp(S), CAP), S normal. Partial log-normal moments, by logarithms:
    right down to the smallest positive number."""
    first, second = (_log_moment(power, mean, variance, CAP) for power in (1.0, 2.0))
    return floats(np.exp(np.minimum(2.0 * first - second, 0.0)))


def _log_moment(power: float, mean: Floats, variance: Floats, cap: float) -> Floats:
    """log E[min(exp(S), cap)^power] of a normal S."""
    from scipy.special import log_ndtr

    edge = math.log(cap)
    deviation = np.sqrt(np.where(variance > 0.0, variance, np.nan))
    under = log_ndtr((edge - mean - power * variance) / deviation)
    over = log_ndtr((mean - edge) / deviation)
    size = power * mean + power**2 * variance / 2.0
    return floats(np.logaddexp(size + under, power * edge + over))


def below(edge: float, mean: Floats, variance: Floats) -> Floats:
    """P(S < edge) of a normal S; NaN where the variance is not positive."""
    from scipy.special import ndtr

    return floats(ndtr((edge - mean) / np.sqrt(np.where(variance > 0.0, variance, np.nan))))
