"""The same quantities by other frameworks' conventions: their reduction, truncation and sign.

Each function takes arrays by the names that metrics use (``delta`` [A], ``rollout`` [A], ``train``
[A], ``sequence`` [A]; nats) and gives the number that the framework would
log for this batch on one rank, in float64 where the framework may work in float32. What was read
for each, and where: :mod:`mismatch.metrics.framework_names`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import numpy as np

from mismatch.metrics.registry import Array, floats
from mismatch.metrics.sequence import per_sequence_mean, per_sequence_sum
from mismatch.metrics.token import CLAMP, TRUNCATION, exp_minus_linear
from mismatch.types import Floats, Ints

Convention = Callable[..., float]
TINY = 1e-8  # what verl and NeMo-RL add to a denominator
TRL_CAP = 3.0  # vllm_importance_sampling_clip_max
MILES_VALUE_CLAMP = 10.0  # of the k3 term itself


def value_of(convention: Convention, arrays: Mapping[str, Array]) -> float | None:
    """The number, or None where an array that it needs was not measured or it is undefined."""
    needed = list(inspect.signature(convention).parameters)
    if any(name not in arrays for name in needed):
        return None
    with np.errstate(all="ignore"):
        value = float(convention(*(arrays[name] for name in needed)))
    return value if np.isfinite(value) else None


def mean_over_sequences(terms: Floats, sequence: Ints) -> float:
    """slime's and miles' reduction: each sequence counts once."""
    return float(per_sequence_mean(terms, sequence).mean())


def opposite_kl(delta: Floats) -> float:
    """AReaL: mean of train - rollout."""
    return float(delta.mean())


def mis_kl(delta: Floats, sequence: Ints) -> float:
    """miles: k1 of every sequence, then their mean."""
    return mean_over_sequences(-delta, sequence)


def sample_k3(delta: Floats, sequence: Ints) -> float:
    """An older prime-rl, miles' helper: k3 of every sequence, then their mean."""
    return mean_over_sequences(exp_minus_linear(delta), sequence)


def miles_k3(delta: Floats, sequence: Ints) -> float:
    """miles: delta clamped to ±20, the k3 term clamped to ±10, mean over sequences of means."""
    term = exp_minus_linear(np.clip(delta, -CLAMP, CLAMP))
    return mean_over_sequences(np.clip(term, -MILES_VALUE_CLAMP, MILES_VALUE_CLAMP), sequence)


def sample_abs(delta: Floats, sequence: Ints) -> float:
    """slime, miles: mean |delta| of every sequence, then their mean."""
    return mean_over_sequences(np.abs(delta), sequence)


def sample_ratio(delta: Floats, sequence: Ints) -> float:
    """slime: mean ratio of every sequence, then their mean; before its own truncation."""
    return mean_over_sequences(np.exp(delta), sequence)


def sample_chi2(delta: Floats, sequence: Ints) -> float:
    """miles' helper: chi² of every sequence's tokens, then their mean."""
    return mean_over_sequences(np.expm1(2.0 * np.clip(delta, -CLAMP, CLAMP)), sequence)


def probs_diff_std(rollout: Floats, train: Floats) -> float:
    """verl: torch.std, which divides by A - 1."""
    gap = np.abs(np.exp(train) - np.exp(rollout))
    return float(gap.std(ddof=1)) if len(gap) > 1 else np.nan


def verl_weights(delta: Floats) -> Floats:
    """verl's token weights: exp of delta clamped to ±20, cut at 2 from above."""
    return floats(np.minimum(np.exp(np.clip(delta, -CLAMP, CLAMP)), TRUNCATION))


def verl_is_mean(delta: Floats) -> float:
    """Mean of verl's truncated token weights."""
    return float(verl_weights(delta).mean())


def verl_is_std(delta: Floats) -> float:
    """Population standard deviation of verl's truncated token weights."""
    return float(verl_weights(delta).std())


def verl_is_max(delta: Floats) -> float:
    """Largest of verl's truncated token weights: at most 2."""
    return float(verl_weights(delta).max())


def verl_is_min(delta: Floats) -> float:
    """Smallest of verl's token weights, which are not cut from below."""
    return float(verl_weights(delta).min())


def verl_ess_sequence(delta: Floats, sequence: Ints) -> float:
    """1 / mean((w / (mean w + 1e-8))²), w a sequence's weight, once per token of the sequence."""
    _, code = np.unique(sequence, return_inverse=True)
    weight = verl_weights(per_sequence_sum(delta, sequence))[code]
    return float(1.0 / np.mean((weight / (weight.mean() + TINY)) ** 2))


def verl_fraction_high(delta: Floats) -> float:
    """Share of tokens above 2: verl counts those under 1/2 apart, in its fraction_low."""
    return float((np.exp(np.clip(delta, -CLAMP, CLAMP)) > TRUNCATION).mean())


def trl_sequence_ratios(delta: Floats, sequence: Ints) -> Floats:
    """TRL's default (sequence_mask): exp(S) per sequence, 0 where it is above 3, [sequences]."""
    ratio = np.exp(per_sequence_sum(delta, sequence))
    return np.where(ratio > TRL_CAP, 0.0, ratio)


def trl_ratio_mean(delta: Floats, sequence: Ints) -> float:
    """Mean of TRL's masked sequence ratios."""
    return float(trl_sequence_ratios(delta, sequence).mean())


def trl_ratio_min(delta: Floats, sequence: Ints) -> float:
    """Smallest of TRL's masked sequence ratios: 0 as soon as one sequence was masked."""
    return float(trl_sequence_ratios(delta, sequence).min())


def trl_ratio_max(delta: Floats, sequence: Ints) -> float:
    """Largest of TRL's masked sequence ratios: at most 3."""
    return float(trl_sequence_ratios(delta, sequence).max())
