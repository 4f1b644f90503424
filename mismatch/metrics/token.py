"""Token-level metrics. A term per action token, [A]; means run over all action tokens.

``rollout`` and ``train`` are logprobs in nats, ``delta = train - rollout`` and rho = exp(delta)
is the importance ratio pi_train / pi_rollout. Formulas and names: docs/metrics.md.
Each metric here is callable on plain arrays and raises what :class:`Metric` says.
"""

from __future__ import annotations

import numpy as np

from mismatch.metrics.registry import (
    POSITIVE,
    SHARE,
    Metric,
    effective_share,
    excess,
    floats,
    metric,
    quotient,
    register,
    spread,
)
from mismatch.types import Floats, Ints

CLAMP = 20.0  # nats; verl's bound on a log-ratio before it is squared
TRUNCATION = 2.0  # of importance weights: TIS's usual C
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
TAUS = (1.02, 1.2, 2.0)


def exp_minus_linear(x: Floats) -> Floats:
    """e^x - 1 - x without cancellation: its own series where x is small."""
    series = x * x * (0.5 + x / 6.0 + x * x / 24.0)
    return np.where(np.abs(x) < 1e-4, series, np.expm1(x) - x)


@metric(
    unit="nats",
    aliases=(
        "verl rollout_corr/kl",
        "OpenRLHF vllm_kl",
        "miles mis_kl",
        "AReaL behave_approx_kl (opposite sign)",
    ),
)
def kl(delta: Floats) -> Floats:
    """k1: mean of -delta. Estimates KL(rollout ‖ train) where the left side sampled; signed."""
    return -delta


@metric(unit="nats²", bounds=POSITIVE)
def k2_kl(delta: Floats) -> Floats:
    """k2: mean of delta²/2, the second-order KL."""
    return delta * delta / 2.0


@metric(
    unit="nats",
    bounds=POSITIVE,
    aliases=(
        "verl rollout_corr/k3_kl",
        "NeMo-RL gen_kl_error (with reference_policy_kl_type k3)",
        "prime-rl mismatch_kl",
        "miles train_rollout_kl (per-sample mean, clamped at 10)",
    ),
)
def k3_kl(delta: Floats) -> Floats:
    """k3: mean of rho - 1 - delta. Estimates KL(rollout ‖ train) where the left side sampled."""
    return exp_minus_linear(delta)


@metric(unit="nats", bounds=POSITIVE, aliases=("NeMo-RL policy_kl_error",))
def reverse_k3_kl(delta: Floats) -> Floats:
    """Mean of 1/rho - 1 + delta. On rollout-sampled tokens *not* an unbiased reverse KL."""
    return exp_minus_linear(-delta)


@metric(unit="nats", bounds=POSITIVE, aliases=("NeMo-RL js_divergence_error",))
def js_divergence(delta: Floats) -> Floats:
    """Mean of half of k3 of each side against the mixture m = (e^train + e^rollout)/2.

    Looks at the sampled token only: not an unbiased Jensen-Shannon divergence.
    """
    # train - m and rollout - m depend on delta alone, and are exactly 0 at delta 0 when written so.
    to_train = -np.log1p(np.expm1(-delta) / 2.0)
    to_rollout = -np.log1p(np.expm1(delta) / 2.0)
    return 0.5 * (exp_minus_linear(to_train) + exp_minus_linear(to_rollout))


@metric(
    unit="nats",
    bounds=POSITIVE,
    aliases=(
        "slime train_rollout_logprob_abs_diff (mean of per-sequence means)",
        "TRL sampling/sampling_logp_difference/mean",
        "SkyRL policy/rollout_train_logprobs_abs_diff_mean",
    ),
)
def logprob_abs_diff_mean(delta: Floats) -> Floats:
    """Mean |delta|."""
    return np.abs(delta)


@metric(
    "extreme", unit="nats", bounds=POSITIVE, aliases=("TRL sampling/sampling_logp_difference/max",)
)
def logprob_abs_diff_max(delta: Floats) -> float:
    """Largest |delta|; an extreme, so no interval."""
    return float(np.abs(delta).max())


def _absolute(delta: Floats) -> Floats:
    return np.abs(delta)


logprob_abs_diff_p50, logprob_abs_diff_p90, logprob_abs_diff_p99, logprob_abs_diff_p999 = (
    register(
        f"logprob_abs_diff_{label}",
        _absolute,
        kind="quantile",
        unit="nats",
        bounds=POSITIVE,
        probability=probability,
        doc=f"Smallest |delta| that at least {probability:.1%} of the tokens do not exceed.",
    )
    for label, probability in QUANTILES.items()
)


@metric(
    unit="ratio", combine=excess, bounds=(1.0, np.inf), aliases=("NeMo-RL token_mult_prob_error",)
)
def token_mult_prob_error(delta: Floats) -> Floats:
    """Mean of exp(|delta|): the factor by which probabilities differ. Terms hold its excess."""
    return floats(np.expm1(np.abs(delta)))


def _probability_gap(rollout: Floats, train: Floats) -> Floats:
    return floats(np.abs(np.exp(train) - np.exp(rollout)))


@metric(unit="probability", bounds=SHARE, aliases=("verl training/rollout_probs_diff_mean",))
def probs_diff_mean(rollout: Floats, train: Floats) -> Floats:
    """Mean |e^train - e^rollout|."""
    return _probability_gap(rollout, train)


@metric(
    "extreme", unit="probability", bounds=SHARE, aliases=("verl training/rollout_probs_diff_max",)
)
def probs_diff_max(rollout: Floats, train: Floats) -> float:
    """Largest |e^train - e^rollout|; an extreme, so no interval."""
    return float(_probability_gap(rollout, train).max())


@metric(
    "ratio",
    unit="probability",
    combine=spread,
    bounds=SHARE,
    aliases=("verl training/rollout_probs_diff_std (divides by A - 1)",),
)
def probs_diff_std(rollout: Floats, train: Floats) -> Floats:
    """Standard deviation (dividing by A) of |e^train - e^rollout|."""
    gap = _probability_gap(rollout, train)
    return np.stack([gap, gap * gap], axis=1)


def _pearson(means: Floats) -> Floats:
    x, gap, xx, xgap, gapgap = np.moveaxis(means, -1, 0)
    variance, covariance = xx - x * x, xgap - x * gap  # of x; of x and y - x
    gap_variance = gapgap - gap * gap
    variance_y = variance + 2.0 * covariance + gap_variance
    unexplained = (variance * gap_variance - covariance**2) / (variance * variance_y)
    size = np.sqrt(np.maximum(1.0 - unexplained, 0.0))
    # 1 - r = (1 - r²) / (1 + r): keeps the digits of a correlation that is nearly 1.
    return np.where(variance + covariance >= 0.0, 1.0 - unexplained / (1.0 + size), -size)


@metric(
    "ratio",
    unit="correlation",
    combine=_pearson,
    bounds=(-1.0, 1.0),
    good="high",
    aliases=("verl training/rollout_actor_probs_pearson_corr",),
)
def probs_pearson(rollout: Floats, train: Floats) -> Floats:
    """Pearson correlation of e^train and e^rollout; undefined where either is constant."""
    x, gap = np.exp(rollout), np.exp(train) - np.exp(rollout)
    x, gap = x - x.mean(), gap - gap.mean()  # centred first: the products lose no digits
    return np.stack([x, gap, x * x, x * gap, gap * gap], axis=1)


@metric(
    unit="ratio",
    combine=excess,
    bounds=POSITIVE,
    good="neither",
    aliases=("verl rollout_corr/rollout_is_mean (after truncation)",),
)
def ratio_mean(delta: Floats) -> Floats:
    """Mean of rho, untruncated. Expectation 1 where the left side sampled. Terms hold rho - 1."""
    return np.expm1(delta)


@metric(
    "ratio",
    unit="ratio",
    combine=spread,
    bounds=POSITIVE,
    aliases=("verl rollout_corr/rollout_is_std (after truncation)",),
)
def ratio_std(delta: Floats) -> Floats:
    """Standard deviation (dividing by A) of rho, untruncated."""
    away = np.expm1(delta)
    return np.stack([away, away * away], axis=1)


@metric(
    "extreme",
    unit="ratio",
    bounds=POSITIVE,
    good="neither",
    aliases=("TRL sampling/importance_sampling_ratio/min (after truncation)",),
)
def ratio_min(delta: Floats) -> float:
    """Smallest rho; an extreme, so no interval."""
    return float(np.exp(delta.min()))


@metric(
    "extreme",
    unit="ratio",
    bounds=POSITIVE,
    good="neither",
    aliases=("TRL sampling/importance_sampling_ratio/max (after truncation)",),
)
def ratio_max(delta: Floats) -> float:
    """Largest rho; an extreme, so no interval."""
    return float(np.exp(delta.max()))


def _outside(tau: float) -> Metric:
    def terms(delta: Floats) -> Floats:
        return floats(np.abs(delta) > np.log(tau))

    return register(
        f"ratio_outside_{tau:g}",
        terms,
        kind="mean",
        unit="share",
        bounds=SHARE,
        aliases=("R3 paper F(2)",) if tau == 2.0 else (),
        doc=f"Share of tokens with max(rho, 1/rho) > {tau:g}.",
    )


ratio_outside_1_02, ratio_outside_1_2, ratio_outside_2 = (_outside(tau) for tau in TAUS)


@metric(unit="share", bounds=SHARE)
def clip_fraction(delta: Floats, eps_low: float = 0.2, eps_high: float = 0.2) -> Floats:
    """Share of tokens with rho outside [1 - eps_low, 1 + eps_high] at step 0.

    PPO's clip fraction only where rollout logprobs serve as old logprobs; ignores the
    advantage's sign.
    """
    away = np.expm1(delta)
    return floats((away < -eps_low) | (away > eps_high))


@metric(unit="1", bounds=(-1.0, np.inf), aliases=("verl rollout_corr/chi2_token",))
def chi2_token(delta: Floats) -> Floats:
    """Mean of rho² - 1, delta clamped to ±20; estimates chi²(train ‖ rollout)."""
    return np.expm1(2.0 * np.clip(delta, -CLAMP, CLAMP))


@metric("extreme", unit="tokens", bounds=POSITIVE)
def chi2_token_clamped(delta: Floats) -> float:
    """Number of tokens that ``chi2_token`` clamps: |delta| > 20."""
    return float((np.abs(delta) > CLAMP).sum())


@metric(
    "ratio",
    unit="share",
    combine=effective_share,
    bounds=SHARE,
    good="high",
    aliases=("verl rollout_corr/rollout_is_eff_sample_size (with rollout_is on)",),
)
def ess_token(delta: Floats) -> Floats:
    """Effective share of the sample, (mean w)² / mean w², with w = min(rho, 2)."""
    weight = np.exp(np.minimum(delta, np.log(TRUNCATION)))
    return np.stack([weight, weight * weight], axis=1)


@metric("extreme", unit="tokens", bounds=POSITIVE)
def ess_token_truncated(delta: Floats) -> float:
    """Number of tokens whose weight ``ess_token`` truncates: rho > 2."""
    return float((delta > np.log(TRUNCATION)).sum())


@metric(unit="nats", bounds=POSITIVE, good="neither")
def entropy_train(train_entropy: Floats) -> Floats:
    """Mean entropy of the train side's distribution over the vocabulary."""
    return train_entropy


@metric(
    "ratio",
    unit="ratio",
    combine=quotient,
    bounds=POSITIVE,
    aliases=("prime-rl kl_ent_ratio",),
)
def kl_over_entropy(delta: Floats, train_entropy: Floats) -> Floats:
    """``k3_kl`` / ``entropy_train``: mismatch beside the policy's own spread."""
    return np.stack([exp_minus_linear(delta), train_entropy], axis=1)


@metric(unit="share", bounds=SHARE, good="high", aliases=("llama.cpp Same top p",))
def argmax_agree(rollout_top1: Ints, train_top1: Ints) -> Floats:
    """Share of tokens whose most likely next token is the same id on both sides."""
    return floats(rollout_top1 == train_top1)
