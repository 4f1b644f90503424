"""Sequence-level metrics. A term per sequence with at least one action token.

``sequence`` [A] holds the sequence of each action token; terms come in ascending order of it.
S = sum of delta over a sequence's action tokens; exp(S) is the sequence's importance ratio.
Same errors as :class:`Metric`.
"""

from __future__ import annotations

import numpy as np

from mismatch.metrics.registry import POSITIVE, effective_share, floats, metric, spread
from mismatch.metrics.token import TRUNCATION
from mismatch.types import Floats, Ints

LEAST_LOG = -100.0  # nats: all weights below it have squares that are no floats any more


def per_sequence_sum(values: Floats, sequence: Ints) -> Floats:
    """Return the sums over each sequence that occurs, in ascending order of its number."""
    if (np.diff(sequence) < 0).any():
        _, code = np.unique(sequence, return_inverse=True)
        return floats(np.bincount(code, weights=values))
    return floats(np.add.reduceat(values, np.flatnonzero(np.diff(sequence, prepend=-1))))


def per_sequence_mean(values: Floats, sequence: Ints) -> Floats:
    """Return the means over each sequence that occurs, in ascending order of its number."""
    return per_sequence_sum(values, sequence) / np.unique(sequence, return_counts=True)[1]


@metric(
    "nats",
    "log-perplexity gap",
    "mean over sequences of mean(rollout) - mean(train)",
    reduction="sequence",
    good="neither",
)
def log_ppl_diff(delta: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of mean(rollout) - mean(train): how much the trainer is surprised."""
    return -per_sequence_mean(delta, sequence)


@metric(
    "share",
    "effective size, seqs.",
    "the same on whole sequences",
    "ratio",
    reduction="sequence",
    combine=effective_share,
    good="high",
)
def ess_seq(delta: Floats, sequence: Ints) -> tuple[Floats, ...]:
    """Effective share of the sequences, (mean w)² / mean w², w = min(exp(sum of delta), 2)."""
    total = per_sequence_sum(delta, sequence)
    logs = np.minimum(total, np.log(TRUNCATION))
    if len(logs) and logs.max() < LEAST_LOG:  # the share does not depend on the weights' size
        logs = logs - logs.max()
    weight = np.exp(logs)
    return weight, weight * weight


@metric(
    "nats",
    "sequence log-ratio, std",
    "spread of the sum of delta over a sequence",
    "ratio",
    reduction="sequence",
    combine=spread,
    bounds=POSITIVE,
)
def seq_logratio_std(delta: Floats, sequence: Ints) -> tuple[Floats, ...]:
    """Standard deviation over sequences of S = sum of delta."""
    total = per_sequence_sum(delta, sequence)
    return total, total * total


@metric(
    "nats",
    "sequence log-ratio, mean",
    "mean over sequences of the sum of delta",
    reduction="sequence",
    good="neither",
)
def seq_logratio_mean(delta: Floats, sequence: Ints) -> Floats:
    """Mean over sequences of S = sum of delta; -S estimates the sequence's KL(rollout ‖ train)."""
    return per_sequence_sum(delta, sequence)
