"""How far two gradients are apart, and how that moves with the prompts: from sketches. Pure numpy.

The gradient of a batch is the sum of its prompts' parts a_p, the reference's that of b_p. A linear
sketch keeps inner products, so everything here comes from P x P tables of them, and a batch with
one prompt less is the same tables with a weight of 0.

Intervals are delete-one jackknife (Tukey 1958; Efron and Stein 1981): the standard error from the
P values without one prompt, times Student's t, on a scale where the value can go anywhere (a
logarithm, or Fisher's z of a cosine) and back. The batch's prompts are all there is: no bootstrap,
whose resamples hold a prompt twice and so add noise to a norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mismatch.types import Floats

ROUNDING = 1e-15  # of a cosine: a gap to 1 of less is none


@dataclass(frozen=True, slots=True)
class Sketched:
    """Two gradients over prompts, as inner products of their parts.

    Attributes:
        own: [P, P] of a; ``reference``: of b; ``apart``: of a - b; ``longer``: of a - b with a + b.
            The last two are taken of the sketches' differences: nothing cancels when a is nearly b.
    """

    own: Floats
    reference: Floats
    apart: Floats
    longer: Floats

    @classmethod
    def of(cls, own: Floats, reference: Floats) -> Sketched:
        """From sketches [P, k], or of several groups [P, G, k], which then count together."""
        a, b = own.reshape(len(own), -1), reference.reshape(len(reference), -1)
        apart = a - b
        longer = apart @ (a + b).T
        return cls(a @ a.T, b @ b.T, apart @ apart.T, (longer + longer.T) / 2.0)

    @property
    def prompts(self) -> int:
        return len(self.own)

    @property
    def weights(self) -> Floats:
        """[1 + P, P]: all prompts, then all but each."""
        return np.concatenate([np.ones((1, self.prompts)), 1.0 - np.eye(self.prompts)])

    def log_error(self, weights: Floats) -> Floats:
        """log of |a - b| / |b|, [R]; -inf where they are equal."""
        return _half_log(_size(self.apart, weights), _size(self.reference, weights))

    def log_norm(self, weights: Floats) -> Floats:
        """log of |a| / |b|, [R]."""
        return _half_log(_size(self.own, weights), _size(self.reference, weights))

    def gap(self, weights: Floats) -> Floats:
        """1 - cosine of a and b, [R]; accurate where that is tiny. NaN where one is 0."""
        a, b = (np.sqrt(_size(one, weights)) for one in (self.own, self.reference))
        with np.errstate(all="ignore"):
            stretch = _form(self.longer, weights) / (a + b)  # |a| - |b|
            gap = (_size(self.apart, weights) - stretch**2) / (2.0 * a * b)
        gap[(a == 0.0) | (b == 0.0)] = np.nan
        return np.where(gap < ROUNDING, 0.0, np.minimum(gap, 2.0))

    def bias(self, weights: Floats) -> Floats:
        """Squared size of the mean of a - b less the noise of that mean, [R]; can be negative."""
        return _without_noise(self.apart, weights)

    def log_spread(self, weights: Floats) -> Floats:
        """log of the trace of the covariance of a over prompts, [R]."""
        n = weights.sum(axis=1)
        squares = weights**2 @ np.diagonal(self.own)
        with np.errstate(all="ignore"):
            spread = (squares - _size(self.own, weights) / n) / (n - 1.0)
            return np.asarray(np.log(np.where(spread > 1e-14 * squares, spread, 0.0)), np.float64)


def _form(table: Floats, weights: Floats) -> Floats:
    """w' table w of every row of weights, [R]."""
    return np.asarray(np.einsum("rp,pq,rq->r", weights, table, weights), np.float64)


def _size(table: Floats, weights: Floats) -> Floats:
    """The same of a table of squares: rounding must not make it negative."""
    return np.asarray(np.maximum(_form(table, weights), 0.0), np.float64)


def _half_log(above: Floats, below: Floats) -> Floats:
    with np.errstate(all="ignore"):
        return np.asarray(0.5 * (np.log(above) - np.log(below)), np.float64)


def _without_noise(table: Floats, weights: Floats) -> Floats:
    """Mean inner product of two different prompts: unbiased for the squared size of the mean."""
    n = weights.sum(axis=1)
    with np.errstate(all="ignore"):
        pairs = _form(table, weights) - weights**2 @ np.diagonal(table)
        return np.asarray(pairs / (n * (n - 1.0)), np.float64)


def fisher(gap: Floats) -> Floats:
    """Fisher's z of a cosine, from its gap to 1."""
    with np.errstate(all="ignore"):
        return np.asarray(0.5 * (np.log(2.0 - gap) - np.log(gap)), np.float64)


def cosine_of(z: float) -> float:
    """Back from :func:`fisher`."""
    return math.tanh(z)


def exp(value: float) -> float:
    """Back from a logarithm; an end beyond all numbers stays one."""
    return math.exp(min(value, 700.0))
