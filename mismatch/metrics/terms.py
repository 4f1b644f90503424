"""What the terms of metrics are made of: quantities of a token that several of them ask for.

``rollout`` and ``train`` are logprobs in nats, ``delta = train - rollout`` and rho = exp(delta).
All take and give [A]; nobody may write into an answer, see :mod:`mismatch.metrics.shared`.
"""

from __future__ import annotations

import numpy as np

from mismatch.metrics.registry import floats
from mismatch.metrics.shared import shared
from mismatch.types import Floats

CLAMP = 20.0  # nats; verl's bound on a log-ratio before it is squared
TRUNCATION = 2.0  # of importance weights: TIS's usual C


def exp_minus_linear(x: Floats, excess: Floats | None = None) -> Floats:
    """e^x - 1 - x without cancellation: its own series where x is small.

    Args:
        excess: e^x - 1, where it is known already.
    """
    made = floats((np.expm1(x) if excess is None else excess) - x)
    small = np.abs(x) < 1e-4
    count = np.count_nonzero(small)
    if 8 * count > len(x):
        return np.where(small, _series(x), made)
    if count:
        made[small] = _series(x[small])
    return made


def _series(x: Floats) -> Floats:
    made = x / 24.0
    made += 1.0 / 6.0
    made *= x
    made += 0.5
    made *= x
    made *= x
    return made


@shared
def absolute(delta: Floats) -> Floats:
    """|delta|."""
    return np.abs(delta)


@shared
def ratio_excess(delta: Floats) -> Floats:
    """rho - 1, exact where rho is nearly 1."""
    return floats(np.expm1(delta))


@shared
def inverse_excess(delta: Floats) -> Floats:
    """1 / rho - 1, exact where rho is nearly 1."""
    return floats(np.expm1(-delta))


@shared
def excess_factor(delta: Floats) -> Floats:
    """exp(|delta|) - 1: of rho and 1 / rho, the larger one's."""
    return floats(np.maximum(ratio_excess(delta), inverse_excess(delta)))


@shared
def rho_minus_linear(delta: Floats) -> Floats:
    """rho - 1 - delta, the term of k3."""
    return exp_minus_linear(delta, ratio_excess(delta))


@shared
def probability(logprob: Floats) -> Floats:
    """e^logprob."""
    return floats(np.exp(logprob))


@shared
def probability_change(rollout: Floats, train: Floats) -> Floats:
    """e^train - e^rollout."""
    return floats(probability(train) - probability(rollout))
