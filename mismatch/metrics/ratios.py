"""What a sequence's importance weight is made of: the distribution of S and of its geometric mean.

S = sum of delta over a sequence's action tokens; exp(S) is the sequence's importance ratio, and
exp(S / length) its geometric mean per token. A term per sequence with at least one action token;
``sequence`` [A] holds the sequence of each. Formulas and names: docs/metrics.md.
"""

from __future__ import annotations

import numpy as np

from mismatch.metrics.registry import POSITIVE, Metric, excess, metric, register, spread
from mismatch.metrics.sequence import per_sequence_mean, per_sequence_sum
from mismatch.types import Floats, Ints

QUANTILES = {"p05": 0.05, "p50": 0.5, "p95": 0.95}


@metric(unit="nats", reduction="sequence", good="neither")
def seq_logratio_mean(delta: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of S = sum of delta; -S estimates the sequence's KL(rollout ‖ train)."""
    return per_sequence_sum(delta, sequence)


def _quantile(label: str, probability: float) -> Metric:
    return register(
        f"seq_logratio_{label}",
        _total,
        kind="quantile",
        unit="nats",
        reduction="sequence",
        good="neither",
        probability=probability,
        doc=f"Smallest S = sum of delta that at least {probability:.0%} of the sequences "
        "do not exceed.",
    )


def _total(delta: Floats, sequence: Ints) -> Floats:
    return per_sequence_sum(delta, sequence)


seq_logratio_p05, seq_logratio_p50, seq_logratio_p95 = (
    _quantile(label, probability) for label, probability in QUANTILES.items()
)


@metric(unit="ratio", reduction="sequence", combine=excess, bounds=POSITIVE, good="neither")
def seq_ratio_geo(delta: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of exp(mean delta), the geometric mean of rho. Terms hold its excess."""
    return np.expm1(per_sequence_mean(delta, sequence))


@metric("ratio", unit="ratio", reduction="sequence", combine=spread, bounds=POSITIVE)
def seq_ratio_geo_std(delta: Floats, sequence: Ints) -> Floats:
    """Standard deviation over sequences (dividing by their number) of exp(mean delta)."""
    away = np.expm1(per_sequence_mean(delta, sequence))
    return np.stack([away, away * away], axis=1)


def _exponential(folded: Floats) -> Floats:
    return np.exp(folded[..., 0])


@metric(
    "extreme",
    unit="ratio",
    reduction="sequence",
    combine=_exponential,
    bounds=POSITIVE,
    good="neither",
    fold="min",
)
def seq_ratio_geo_min(delta: Floats, sequence: Ints) -> Floats:
    """Smallest exp(mean delta) of a sequence; no interval."""
    return per_sequence_mean(delta, sequence)


@metric(
    "extreme",
    unit="ratio",
    reduction="sequence",
    combine=_exponential,
    bounds=POSITIVE,
    good="neither",
    fold="max",
)
def seq_ratio_geo_max(delta: Floats, sequence: Ints) -> Floats:
    """Largest exp(mean delta) of a sequence; no interval."""
    return per_sequence_mean(delta, sequence)
