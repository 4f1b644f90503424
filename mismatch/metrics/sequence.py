"""Sequence-level metrics. A term per sequence with at least one action token.

``sequence`` [A] holds the sequence of each action token; terms come in ascending order of it.
Formulas and names: docs/metrics.md. Same errors as :class:`Metric`.
"""

from __future__ import annotations

import numpy as np

from mismatch.metrics.registry import (
    POSITIVE,
    SHARE,
    effective_share,
    excess,
    floats,
    metric,
    spread,
)
from mismatch.metrics.shared import shared
from mismatch.metrics.terms import CLAMP, TRUNCATION, excess_factor
from mismatch.types import Floats, Ints


@shared
def _starts(sequence: Ints) -> Ints | None:
    """Where each sequence begins, if they lie one after the other in ascending order."""
    steps = np.diff(sequence)
    if (steps < 0).any():
        return None
    return np.concatenate([[0], np.flatnonzero(steps) + 1])


@shared
def per_sequence_sum(values: Floats, sequence: Ints) -> Floats:
    """Sums over each sequence that occurs, in ascending order of its number."""
    starts = _starts(sequence)
    if starts is None:
        _, code = np.unique(sequence, return_inverse=True)
        return floats(np.bincount(code, weights=values))
    return floats(np.add.reduceat(values, starts))


@shared
def per_sequence_mean(values: Floats, sequence: Ints) -> Floats:
    """Means over each sequence that occurs, in ascending order of its number."""
    return floats(per_sequence_sum(values, sequence) / _lengths(sequence))


@shared
def _lengths(sequence: Ints) -> Ints:
    starts = _starts(sequence)
    if starts is None:
        return np.unique(sequence, return_counts=True)[1]
    return np.diff(starts, append=len(sequence))


@metric(
    unit="perplexity",
    reduction="sequence",
    bounds=(1.0, np.inf),
    good="neither",
)
def training_ppl(train: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of exp(-mean train logprob)."""
    return np.exp(-per_sequence_mean(train, sequence))


@metric(
    unit="perplexity",
    reduction="sequence",
    bounds=(1.0, np.inf),
    good="neither",
)
def rollout_ppl(rollout: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of exp(-mean rollout logprob)."""
    return np.exp(-per_sequence_mean(rollout, sequence))


@shared
def _log_ppl_diff(delta: Floats, sequence: Ints) -> Floats:
    return floats(-per_sequence_mean(delta, sequence))


@metric(
    unit="nats",
    reduction="sequence",
    good="neither",
)
def log_ppl_diff(delta: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of mean(rollout) - mean(train): how much the trainer is surprised."""
    return _log_ppl_diff(delta, sequence)


@metric(
    unit="nats",
    reduction="sequence",
    bounds=POSITIVE,
)
def log_ppl_abs_diff(delta: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of |mean(rollout) - mean(train)|."""
    return np.abs(_log_ppl_diff(delta, sequence))


@metric(
    "extreme",
    fold="max",
    unit="nats",
    reduction="sequence",
    good="neither",
)
def log_ppl_diff_max(delta: Floats, sequence: Ints) -> Floats:
    """Largest per-sequence mean(rollout) - mean(train); no interval."""
    return _log_ppl_diff(delta, sequence)


@metric(
    "extreme",
    fold="min",
    unit="nats",
    reduction="sequence",
    good="neither",
)
def log_ppl_diff_min(delta: Floats, sequence: Ints) -> Floats:
    """Smallest per-sequence mean(rollout) - mean(train); no interval."""
    return _log_ppl_diff(delta, sequence)


@metric(
    unit="ratio",
    reduction="sequence",
    combine=excess,
    bounds=POSITIVE,
    good="neither",
)
def ppl_ratio(delta: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of train perplexity / rollout perplexity. Terms hold its excess."""
    return np.expm1(_log_ppl_diff(delta, sequence))


@metric(
    unit="1",
    reduction="sequence",
    bounds=(-1.0, np.inf),
)
def chi2_seq(delta: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of exp(2 S) - 1, S = sum of delta clamped to ±20 before doubling."""
    total = per_sequence_sum(delta, sequence)
    return np.expm1(2.0 * np.clip(total, -CLAMP, CLAMP))


@metric("extreme", fold="sum", unit="sequences", reduction="sequence", bounds=POSITIVE)
def chi2_seq_clamped(delta: Floats, sequence: Ints) -> Floats:
    """Number of sequences that ``chi2_seq`` clamps: |sum of delta| > 20."""
    return floats(np.abs(per_sequence_sum(delta, sequence)) > CLAMP)


@metric(
    "ratio",
    unit="share",
    reduction="sequence",
    combine=effective_share,
    bounds=SHARE,
    good="high",
)
def ess_seq(delta: Floats, sequence: Ints) -> tuple[Floats, ...]:
    """Effective share of the sequences, (mean w)² / mean w², w = min(exp(sum of delta), 2)."""
    total = per_sequence_sum(delta, sequence)
    weight = np.exp(np.minimum(total, np.log(TRUNCATION)))
    return weight, weight * weight


@metric("extreme", fold="sum", unit="sequences", reduction="sequence", bounds=POSITIVE)
def ess_seq_truncated(delta: Floats, sequence: Ints) -> Floats:
    """Number of sequences whose weight ``ess_seq`` truncates: exp(sum of delta) > 2."""
    return floats(per_sequence_sum(delta, sequence) > np.log(TRUNCATION))


@metric("ratio", unit="nats", reduction="sequence", combine=spread, bounds=POSITIVE)
def seq_logratio_std(delta: Floats, sequence: Ints) -> tuple[Floats, ...]:
    """Standard deviation over sequences of S = sum of delta."""
    total = per_sequence_sum(delta, sequence)
    return total, total * total


@metric("extreme", fold="max", unit="nats", reduction="sequence", bounds=POSITIVE)
def seq_logratio_abs_max(delta: Floats, sequence: Ints) -> Floats:
    """Largest |sum of delta| of a sequence; no interval."""
    return np.abs(per_sequence_sum(delta, sequence))


def _excess_factor(delta: Floats, sequence: Ints) -> Floats:
    return per_sequence_mean(excess_factor(delta), sequence)


@metric(
    "extreme",
    fold="max",
    combine=excess,
    unit="ratio",
    reduction="sequence",
    bounds=(1.0, np.inf),
)
def seq_mult_prob_error_max(delta: Floats, sequence: Ints) -> Floats:
    """Largest per-sequence mean of exp(|delta|); no interval."""
    return _excess_factor(delta, sequence)


@metric(
    unit="ratio",
    reduction="sequence",
    combine=excess,
    bounds=(1.0, np.inf),
)
def seq_mult_prob_error_mean(delta: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of the sequence's mean of exp(|delta|). Terms hold its excess."""
    return _excess_factor(delta, sequence)


@metric(
    "extreme",
    fold="min",
    combine=excess,
    unit="ratio",
    reduction="sequence",
    bounds=(1.0, np.inf),
)
def seq_mult_prob_error_min(delta: Floats, sequence: Ints) -> Floats:
    """Smallest per-sequence mean of exp(|delta|); no interval."""
    return _excess_factor(delta, sequence)
