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
from mismatch.metrics.token import CLAMP, TRUNCATION
from mismatch.types import Floats, Ints


def per_sequence_sum(values: Floats, sequence: Ints) -> Floats:
    """Sums over each sequence that occurs, in ascending order of its number."""
    _, code = np.unique(sequence, return_inverse=True)
    return floats(np.bincount(code, weights=values))


def per_sequence_mean(values: Floats, sequence: Ints) -> Floats:
    """Means over each sequence that occurs, in ascending order of its number."""
    _, code, count = np.unique(sequence, return_inverse=True, return_counts=True)
    return floats(np.bincount(code, weights=values) / count)


@metric(
    unit="perplexity",
    reduction="sequence",
    bounds=(1.0, np.inf),
    good="neither",
    aliases=("verl rollout_corr/training_ppl",),
)
def training_ppl(train: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of exp(-mean train logprob)."""
    return np.exp(-per_sequence_mean(train, sequence))


@metric(
    unit="perplexity",
    reduction="sequence",
    bounds=(1.0, np.inf),
    good="neither",
    aliases=("verl rollout_corr/rollout_ppl",),
)
def rollout_ppl(rollout: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of exp(-mean rollout logprob)."""
    return np.exp(-per_sequence_mean(rollout, sequence))


def _log_ppl_diff(delta: Floats, sequence: Ints) -> Floats:
    return -per_sequence_mean(delta, sequence)


@metric(
    unit="nats",
    reduction="sequence",
    good="neither",
    aliases=("verl rollout_corr/log_ppl_diff",),
)
def log_ppl_diff(delta: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of mean(rollout) - mean(train): how much the trainer is surprised."""
    return _log_ppl_diff(delta, sequence)


@metric(
    unit="nats",
    reduction="sequence",
    bounds=POSITIVE,
    aliases=("verl rollout_corr/log_ppl_abs_diff",),
)
def log_ppl_abs_diff(delta: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of |mean(rollout) - mean(train)|."""
    return np.abs(_log_ppl_diff(delta, sequence))


@metric(
    "extreme",
    unit="nats",
    reduction="sequence",
    good="neither",
    aliases=("verl rollout_corr/log_ppl_diff_max",),
)
def log_ppl_diff_max(delta: Floats, sequence: Ints) -> float:
    """Largest per-sequence mean(rollout) - mean(train); no interval."""
    return float(_log_ppl_diff(delta, sequence).max())


@metric(
    "extreme",
    unit="nats",
    reduction="sequence",
    good="neither",
    aliases=("verl rollout_corr/log_ppl_diff_min",),
)
def log_ppl_diff_min(delta: Floats, sequence: Ints) -> float:
    """Smallest per-sequence mean(rollout) - mean(train); no interval."""
    return float(_log_ppl_diff(delta, sequence).min())


@metric(
    unit="ratio",
    reduction="sequence",
    combine=excess,
    bounds=POSITIVE,
    good="neither",
    aliases=("verl rollout_corr/ppl_ratio",),
)
def ppl_ratio(delta: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of train perplexity / rollout perplexity. Terms hold its excess."""
    return np.expm1(_log_ppl_diff(delta, sequence))


@metric(
    unit="1",
    reduction="sequence",
    bounds=(-1.0, np.inf),
    aliases=("verl rollout_corr/chi2_seq",),
)
def chi2_seq(delta: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of exp(2 S) - 1, S = sum of delta clamped to ±20 before doubling."""
    total = per_sequence_sum(delta, sequence)
    return np.expm1(2.0 * np.clip(total, -CLAMP, CLAMP))


@metric("extreme", unit="sequences", reduction="sequence", bounds=POSITIVE)
def chi2_seq_clamped(delta: Floats, sequence: Ints) -> float:
    """Number of sequences that ``chi2_seq`` clamps: |sum of delta| > 20."""
    return float((np.abs(per_sequence_sum(delta, sequence)) > CLAMP).sum())


@metric(
    "ratio",
    unit="share",
    reduction="sequence",
    combine=effective_share,
    bounds=SHARE,
    good="high",
    aliases=("verl rollout_corr/rollout_is_eff_sample_size (there token-weighted)",),
)
def ess_seq(delta: Floats, sequence: Ints) -> Floats:
    """Effective share of the sequences, (mean w)² / mean w², w = min(exp(sum of delta), 2)."""
    total = per_sequence_sum(delta, sequence)
    weight = np.exp(np.minimum(total, np.log(TRUNCATION)))
    return np.stack([weight, weight * weight], axis=1)


@metric("extreme", unit="sequences", reduction="sequence", bounds=POSITIVE)
def ess_seq_truncated(delta: Floats, sequence: Ints) -> float:
    """Number of sequences whose weight ``ess_seq`` truncates: exp(sum of delta) > 2."""
    return float((per_sequence_sum(delta, sequence) > np.log(TRUNCATION)).sum())


@metric("ratio", unit="nats", reduction="sequence", combine=spread, bounds=POSITIVE)
def seq_logratio_std(delta: Floats, sequence: Ints) -> Floats:
    """Standard deviation over sequences of S = sum of delta."""
    total = per_sequence_sum(delta, sequence)
    return np.stack([total, total * total], axis=1)


@metric("extreme", unit="nats", reduction="sequence", bounds=POSITIVE)
def seq_logratio_abs_max(delta: Floats, sequence: Ints) -> float:
    """Largest |sum of delta| of a sequence; no interval."""
    return float(np.abs(per_sequence_sum(delta, sequence)).max())


def _excess_factor(delta: Floats, sequence: Ints) -> Floats:
    return per_sequence_mean(np.expm1(np.abs(delta)), sequence)


@metric(
    "extreme",
    unit="ratio",
    reduction="sequence",
    bounds=(1.0, np.inf),
    aliases=("NeMo-RL max_seq_mult_prob_error",),
)
def seq_mult_prob_error_max(delta: Floats, sequence: Ints) -> float:
    """Largest per-sequence mean of exp(|delta|); no interval."""
    return float(1.0 + _excess_factor(delta, sequence).max())


@metric(
    unit="ratio",
    reduction="sequence",
    combine=excess,
    bounds=(1.0, np.inf),
    aliases=("NeMo-RL mean_seq_mult_prob_error",),
)
def seq_mult_prob_error_mean(delta: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of the sequence's mean of exp(|delta|). Terms hold its excess."""
    return _excess_factor(delta, sequence)


@metric(
    "extreme",
    unit="ratio",
    reduction="sequence",
    bounds=(1.0, np.inf),
    aliases=("NeMo-RL min_seq_mult_prob_error",),
)
def seq_mult_prob_error_min(delta: Floats, sequence: Ints) -> float:
    """Smallest per-sequence mean of exp(|delta|); no interval."""
    return float(1.0 + _excess_factor(delta, sequence).min())
