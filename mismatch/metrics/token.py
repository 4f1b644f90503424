"""Token-level metrics. A term per action token, [A]; means run over all action tokens.

``rollout`` and ``train`` are logprobs in nats, ``delta = train - rollout`` and rho = exp(delta)
is the importance ratio pi_train / pi_rollout.
Each metric here is callable on plain arrays and raises what :class:`Metric` says.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mismatch.metrics.registry import (
    POSITIVE,
    SHARE,
    Metric,
    effective_share,
    excess,
    floats,
    metric,
    register,
)
from mismatch.types import Floats, Ints

CLAMP = 20.0  # nats; verl's bound on a log-ratio before it is squared
CLIP = 0.2  # PPO's usual range
TRUNCATION = 2.0  # of importance weights: TIS's usual C
ROUNDED = 1e-10  # of a mean of squares: what sums of a million equal values may be off by


# ---------------------------------------------------------------- what terms are made of


def exp_minus_linear(x: Floats) -> Floats:
    """e^x - 1 - x without cancellation: a power series where x is small."""
    values = floats(np.expm1(x))
    values -= x
    small = np.abs(x) < 1e-4
    count = np.count_nonzero(small)
    if 8 * count > len(x):
        return np.where(small, _series(x), values)
    if count:
        values[small] = _series(x[small])
    return values


def _series(x: Floats) -> Floats:
    values = x / 24.0
    values += 1.0 / 6.0
    values *= x
    values += 0.5
    values *= x
    values *= x
    return values


def ratio_excess(delta: Floats) -> Floats:
    """rho - 1, exact where rho is nearly 1."""
    return floats(np.expm1(delta))


def _probability_gap(rollout: Floats, train: Floats) -> Floats:
    gap = np.exp(train)
    gap -= np.exp(rollout)
    return floats(np.abs(gap, out=gap))


# ---------------------------------------------------------------- divergences


@metric(
    "nats", "k1 KL, nats per token", "mean of -delta: estimates KL(rollout‖train); signed and noisy"
)
def kl(delta: Floats) -> Floats:
    """k1: mean of -delta. Estimates KL(rollout ‖ train) where the left side sampled; signed."""
    return -delta


@metric(
    "nats²",
    "k2 KL, nats per token",
    "mean of delta²/2: an estimate of KL with bias and little noise",
    bounds=POSITIVE,
)
def k2_kl(delta: Floats) -> Floats:
    """k2: mean of delta²/2, the second-order KL."""
    return delta * delta / 2.0


@metric(
    "nats",
    "k3 KL, nats per token",
    "KL(rollout‖train): how much the trainer's policy differs from the one that sampled",
    bounds=POSITIVE,
)
def k3_kl(delta: Floats) -> Floats:
    """k3: mean of rho - 1 - delta. Estimates KL(rollout ‖ train) where the left side sampled."""
    return exp_minus_linear(delta)


# ---------------------------------------------------------------- distances of log-probabilities


@metric(
    "nats",
    "mean |delta|, nats",
    "average distance of the two log-probabilities of a token",
    bounds=POSITIVE,
)
def logprob_abs_diff_mean(delta: Floats) -> Floats:
    """Mean |delta|."""
    return np.abs(delta)


@metric(
    "nats",
    "largest |delta|, nats",
    "the token that the two sides disagree about most",
    "extreme",
    bounds=POSITIVE,
)
def logprob_abs_diff_max(delta: Floats) -> float:
    """Largest |delta|; an extreme, so no interval."""
    return float(np.abs(delta).max())


def _quantile(tag: str, probability: float, label: str, meaning: str) -> Callable[..., float]:
    return register(
        Metric(
            f"logprob_abs_diff_{tag}",
            lambda delta: np.abs(delta),
            "quantile",
            "nats",
            bounds=POSITIVE,
            probability=probability,
            label=label,
            meaning=meaning,
            definition=f"Smallest |delta| that at least {probability:.1%} of the tokens do not "
            "exceed.",
        )
    )


logprob_abs_diff_p50 = _quantile(
    "p50", 0.5, "median |delta|, nats", "half of the tokens differ by less"
)
logprob_abs_diff_p90 = _quantile(
    "p90", 0.9, "|delta|, 90 % quantile", "one token in ten differs by more"
)
logprob_abs_diff_p99 = _quantile(
    "p99", 0.99, "|delta|, 99 % quantile", "one token in 100 differs by more"
)
logprob_abs_diff_p999 = _quantile(
    "p999", 0.999, "|delta|, 99.9 % quantile", "one token in 1,000 differs by more"
)


# ---------------------------------------------------------------- distances of probabilities


@metric(
    "ratio",
    "probability factor",
    "mean of exp(|delta|): by which factor a token's probability is off",
    combine=excess,
    bounds=(1.0, np.inf),
)
def token_mult_prob_error(delta: Floats) -> Floats:
    """Mean of exp(|delta|): the factor by which probabilities differ.

    Terms hold its excess.
    """
    return floats(np.expm1(np.abs(delta)))


@metric("probability", "probability gap, mean", "average |p(train) - p(rollout)|")
def probs_diff_mean(rollout: Floats, train: Floats) -> Floats:
    """Mean |e^train - e^rollout|."""
    return _probability_gap(rollout, train)


@metric("probability", "probability gap, largest", "largest |p(train) - p(rollout)|", "extreme")
def probs_diff_max(rollout: Floats, train: Floats) -> float:
    """Largest |e^train - e^rollout|; an extreme, so no interval."""
    return float(_probability_gap(rollout, train).max())


def _pearson(means: Floats) -> Floats:
    x, gap, xx, xgap, gapgap = np.moveaxis(means, -1, 0)
    variance, covariance = xx - x * x, xgap - x * gap  # of x; of x and y - x
    gap_variance = gapgap - gap * gap
    variance_y = variance + 2.0 * covariance + gap_variance
    # Constant values leave the rounding of their squares, which is no variance.
    varies = (variance > ROUNDED * xx) & (variance_y > ROUNDED * (xx + 2.0 * xgap + gapgap))
    unexplained = (variance * gap_variance - covariance**2) / (variance * variance_y)
    size = np.sqrt(np.maximum(1.0 - unexplained, 0.0))
    # 1 - r = (1 - r²) / (1 + r): keeps the digits of a correlation that is nearly 1.
    value = np.where(variance + covariance >= 0.0, 1.0 - unexplained / (1.0 + size), -size)
    return np.where(varies, value, np.nan)


@metric(
    "correlation",
    "probability correlation",
    "Pearson correlation of the two sides' token probabilities; 1 is perfect",
    "ratio",
    combine=_pearson,
    bounds=(-1.0, 1.0),
    good="high",
)
def probs_pearson(rollout: Floats, train: Floats) -> tuple[Floats, ...]:
    """Pearson correlation of e^train and e^rollout; undefined where either is constant."""
    # Of e^rollout - 1 and the gap: both keep their digits where a policy is nearly certain.
    x = np.expm1(rollout)
    gap = np.expm1(train) - x
    return x, gap, x * x, x * gap, gap * gap


# ---------------------------------------------------------------- importance ratios


@metric(
    "ratio",
    "importance ratio, mean",
    "mean of exp(delta); 1 where nothing is wrong",
    combine=excess,
    bounds=POSITIVE,
    good="neither",
)
def ratio_mean(delta: Floats) -> Floats:
    """Mean of rho, untruncated. Expectation 1 where the left side sampled.

    Terms hold rho - 1.
    """
    return ratio_excess(delta)


@metric(
    "ratio",
    "importance ratio, min",
    "smallest exp(delta)",
    "extreme",
    bounds=POSITIVE,
    good="neither",
)
def ratio_min(delta: Floats) -> float:
    """Smallest rho; an extreme, so no interval."""
    return float(np.exp(delta.min()))


@metric(
    "ratio",
    "importance ratio, max",
    "largest exp(delta)",
    "extreme",
    bounds=POSITIVE,
    good="neither",
)
def ratio_max(delta: Floats) -> float:
    """Largest rho; an extreme, so no interval."""
    return float(np.exp(delta.max()))


def _outside(tau: float, label: str, meaning: str) -> Callable[..., float]:
    def terms(delta: Floats) -> Floats:
        return floats(np.abs(delta) > np.log(tau))

    return register(
        Metric(
            f"ratio_outside_{tau:g}",
            terms,
            unit="share",
            bounds=SHARE,
            label=label,
            meaning=meaning,
            definition=f"Share of tokens with max(rho, 1/rho) > {tau:g}.",
        )
    )


ratio_outside_1_02 = _outside(1.02, "tokens off by over 2 %", "ratio outside 1.02×")
ratio_outside_2 = _outside(
    2.0,
    "tokens off by over 2×",
    "share of tokens whose probability differs by more than a factor of 2",
)


@metric(
    "share",
    "PPO clips at step 0",
    "share of ratios outside the clip range before any training",
)
def clip_fraction(delta: Floats, eps_low: float = CLIP, eps_high: float = CLIP) -> Floats:
    """Share of tokens with rho outside [1 - eps_low, 1 + eps_high] at step 0.

    PPO's clip fraction only where rollout logprobs serve as old logprobs; ignores the
    advantage's sign.
    """
    away = ratio_excess(delta)
    return floats((away < -eps_low) | (away > eps_high))


@metric(
    "share",
    "effective sample size",
    "share of the tokens that is left after importance weighting, weights capped at 2",
    "ratio",
    combine=effective_share,
    good="high",
)
def ess_token(delta: Floats) -> tuple[Floats, ...]:
    """Effective share of the sample, (mean w)² / mean w², with w = min(rho, 2)."""
    weight = np.minimum(1.0 + ratio_excess(delta), TRUNCATION)
    return weight, weight * weight


# ---------------------------------------------------------------- next to the policy's own spread


@metric(
    "nats",
    "entropy, nats per token",
    "how undecided the trainer's policy is",
    bounds=POSITIVE,
    good="neither",
)
def entropy_train(train_entropy: Floats) -> Floats:
    """Mean entropy of the train side's distribution over the vocabulary."""
    return train_entropy


@metric(
    "share",
    "top-1 agreement, all",
    "share of tokens where both sides prefer the same token",
    good="high",
)
def argmax_agree(rollout_top1: Ints, train_top1: Ints) -> Floats:
    """Share of tokens whose most likely next token is the same id on both sides."""
    return floats(rollout_top1 == train_top1)
