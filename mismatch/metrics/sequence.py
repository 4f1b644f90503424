"""Sequence-level metrics. A term per sequence with at least one action token.

``sequence`` [A] holds the sequence of each action token; terms come in ascending order of it.
S = sum of delta over a sequence's action tokens; exp(S) is the sequence's importance ratio, and
exp(S / length) its geometric mean per token.
Formulas and names: docs/metrics.md. Same errors as :class:`Metric`.
"""

from __future__ import annotations

from collections.abc import Callable

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
from mismatch.metrics.token import CLAMP, TRUNCATION, excess_factor
from mismatch.types import Floats, Ints

Terms = Callable[[Floats], Floats]


def per_sequence_sum(values: Floats, sequence: Ints) -> Floats:
    """Sums over each sequence that occurs, in ascending order of its number."""
    return _sums_and_lengths(values, sequence)[0]


def per_sequence_mean(values: Floats, sequence: Ints, terms: Terms = floats) -> Floats:
    """Means of terms(values) over each sequence that occurs, in ascending order of its number."""
    sums, lengths = _sums_and_lengths(values, sequence, terms)
    return floats(sums / lengths)


def _sums_and_lengths(values: Floats, sequence: Ints, terms: Terms = floats) -> tuple[Floats, Ints]:
    before, after = sequence[:-1], sequence[1:]
    if (after < before).any():
        _, code, lengths = np.unique(sequence, return_inverse=True, return_counts=True)
        return floats(np.bincount(code, weights=terms(values))), lengths
    starts = np.concatenate([[0], np.flatnonzero(after != before) + 1])
    return floats(np.add.reduceat(terms(values), starts)), np.diff(starts, append=len(sequence))


# ---------------------------------------------------------------- perplexities


@metric(
    unit="perplexity",
    reduction="sequence",
    bounds=(1.0, np.inf),
    good="neither",
    label="perplexity, train",
    meaning="exp of minus the mean log-probability",
)
def training_ppl(train: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of exp(-mean train logprob)."""
    return np.exp(-per_sequence_mean(train, sequence))


@metric(
    unit="perplexity",
    reduction="sequence",
    bounds=(1.0, np.inf),
    good="neither",
    label="perplexity, rollout",
    meaning="exp of minus the mean log-probability",
)
def rollout_ppl(rollout: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of exp(-mean rollout logprob)."""
    return np.exp(-per_sequence_mean(rollout, sequence))


def _log_ppl_diff(delta: Floats, sequence: Ints) -> Floats:
    return floats(-per_sequence_mean(delta, sequence))


@metric(
    unit="nats",
    reduction="sequence",
    good="neither",
    label="log-perplexity gap",
    meaning="mean over sequences of mean(rollout) - mean(train)",
)
def log_ppl_diff(delta: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of mean(rollout) - mean(train): how much the trainer is surprised."""
    return _log_ppl_diff(delta, sequence)


@metric(
    unit="nats",
    reduction="sequence",
    bounds=POSITIVE,
    label="log-perplexity gap, size",
    meaning="the same without its sign",
)
def log_ppl_abs_diff(delta: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of |mean(rollout) - mean(train)|."""
    return np.abs(_log_ppl_diff(delta, sequence))


@metric(
    "extreme",
    unit="nats",
    reduction="sequence",
    good="neither",
    label="log-perplexity gap, max",
    meaning="largest of a sequence",
)
def log_ppl_diff_max(delta: Floats, sequence: Ints) -> float:
    """Largest per-sequence mean(rollout) - mean(train); no interval."""
    return float(_log_ppl_diff(delta, sequence).max())


@metric(
    "extreme",
    unit="nats",
    reduction="sequence",
    good="neither",
    label="log-perplexity gap, min",
    meaning="smallest of a sequence",
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
    label="perplexity ratio",
    meaning="train over rollout",
)
def ppl_ratio(delta: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of train perplexity / rollout perplexity.

    Terms hold its excess.
    """
    return np.expm1(_log_ppl_diff(delta, sequence))


# ---------------------------------------------------------------- weights of whole sequences


@metric(
    unit="1",
    reduction="sequence",
    bounds=(-1.0, np.inf),
    label="χ² per sequence",
    meaning="the same on whole sequences, clamped",
)
def chi2_seq(delta: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of exp(2 S) - 1, S = sum of delta clamped to ±20 before doubling."""
    total = per_sequence_sum(delta, sequence)
    return np.expm1(2.0 * np.clip(total, -CLAMP, CLAMP))


@metric(
    "extreme",
    unit="sequences",
    reduction="sequence",
    bounds=POSITIVE,
    label="χ² per sequence, clamped",
    meaning="sequences whose sum of delta was clamped to ±20",
)
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
    label="effective size, seqs.",
    meaning="the same on whole sequences",
)
def ess_seq(delta: Floats, sequence: Ints) -> tuple[Floats, ...]:
    """Effective share of the sequences, (mean w)² / mean w², w = min(exp(sum of delta), 2)."""
    total = per_sequence_sum(delta, sequence)
    weight = np.exp(np.minimum(total, np.log(TRUNCATION)))
    return weight, weight * weight


@metric(
    "extreme",
    unit="sequences",
    reduction="sequence",
    bounds=POSITIVE,
    label="weights capped, seqs.",
    meaning="sequences whose weight was cut to 2",
)
def ess_seq_truncated(delta: Floats, sequence: Ints) -> float:
    """Number of sequences whose weight ``ess_seq`` truncates: exp(sum of delta) > 2."""
    return float((per_sequence_sum(delta, sequence) > np.log(TRUNCATION)).sum())


# ---------------------------------------------------------------- the distribution of S


@metric(
    "ratio",
    unit="nats",
    reduction="sequence",
    combine=spread,
    bounds=POSITIVE,
    label="sequence log-ratio, std",
    meaning="spread of the sum of delta over a sequence",
)
def seq_logratio_std(delta: Floats, sequence: Ints) -> tuple[Floats, ...]:
    """Standard deviation over sequences of S = sum of delta."""
    total = per_sequence_sum(delta, sequence)
    return total, total * total


def _mean_factor(delta: Floats, sequence: Ints) -> Floats:
    return per_sequence_mean(delta, sequence, excess_factor)


@metric(
    "extreme",
    unit="ratio",
    reduction="sequence",
    bounds=(1.0, np.inf),
    label="factor, worst sequence",
    meaning="largest mean exp(|delta|) of a sequence",
)
def seq_mult_prob_error_max(delta: Floats, sequence: Ints) -> float:
    """Largest per-sequence mean of exp(|delta|); no interval."""
    return 1.0 + float(_mean_factor(delta, sequence).max())


@metric(
    unit="ratio",
    reduction="sequence",
    combine=excess,
    bounds=(1.0, np.inf),
    label="factor, mean sequence",
    meaning="mean over sequences of mean exp(|delta|)",
)
def seq_mult_prob_error_mean(delta: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of the sequence's mean of exp(|delta|).

    Terms hold its excess.
    """
    return _mean_factor(delta, sequence)


@metric(
    "extreme",
    unit="ratio",
    reduction="sequence",
    bounds=(1.0, np.inf),
    label="factor, best sequence",
    meaning="smallest mean exp(|delta|) of a sequence",
)
def seq_mult_prob_error_min(delta: Floats, sequence: Ints) -> float:
    """Smallest per-sequence mean of exp(|delta|); no interval."""
    return 1.0 + float(_mean_factor(delta, sequence).min())


@metric(
    unit="nats",
    reduction="sequence",
    good="neither",
    label="sequence log-ratio, mean",
    meaning="mean over sequences of the sum of delta",
)
def seq_logratio_mean(delta: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of S = sum of delta; -S estimates the sequence's KL(rollout ‖ train)."""
    return per_sequence_sum(delta, sequence)


# ---------------------------------------------------------------- geometric mean ratios


@metric(
    unit="ratio",
    reduction="sequence",
    combine=excess,
    bounds=POSITIVE,
    good="neither",
    label="geometric ratio, mean",
    meaning="mean over sequences of exp(mean delta): the ratio per token",
)
def seq_ratio_geo(delta: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of exp(mean delta), the geometric mean of rho.

    Terms hold its excess.
    """
    return np.expm1(per_sequence_mean(delta, sequence))


@metric(
    "extreme",
    unit="ratio",
    reduction="sequence",
    bounds=POSITIVE,
    good="neither",
    label="geometric ratio, min",
    meaning="smallest exp(mean delta) of a sequence",
)
def seq_ratio_geo_min(delta: Floats, sequence: Ints) -> float:
    """Smallest exp(mean delta) of a sequence; no interval."""
    return float(np.exp(per_sequence_mean(delta, sequence).min()))


@metric(
    "extreme",
    unit="ratio",
    reduction="sequence",
    bounds=POSITIVE,
    good="neither",
    label="geometric ratio, max",
    meaning="largest exp(mean delta) of a sequence",
)
def seq_ratio_geo_max(delta: Floats, sequence: Ints) -> float:
    """Largest exp(mean delta) of a sequence; no interval."""
    return float(np.exp(per_sequence_mean(delta, sequence).max()))
