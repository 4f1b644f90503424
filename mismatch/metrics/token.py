"""Token-level metrics. A term per action token, [A]; means run over all action tokens.

``rollout`` and ``train`` are logprobs in nats, ``delta = train - rollout`` and rho = exp(delta)
is the importance ratio pi_train / pi_rollout. Formulas and names: docs/metrics.md.
Each metric here is callable on plain arrays and raises what :class:`Metric` says.
"""

from __future__ import annotations

import numpy as np

from mismatch.metrics.registry import (
    ORIGIN_UNITS,
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
from mismatch.metrics.shared import shared
from mismatch.metrics.terms import (
    CLAMP,
    TRUNCATION,
    absolute,
    excess_factor,
    exp_minus_linear,
    inverse_excess,
    probability,
    probability_change,
    ratio_excess,
    rho_minus_linear,
)
from mismatch.types import Floats, Ints

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
TAUS = (1.02, 1.2, 2.0)


@metric(
    unit="nats",
    outermost=True,
)
def kl(delta: Floats) -> Floats:
    """k1: mean of -delta. Estimates KL(rollout ‖ train) where the left side sampled; signed."""
    return -delta


@metric(unit="nats²", bounds=POSITIVE, outermost=True)
def k2_kl(delta: Floats) -> Floats:
    """k2: mean of delta²/2, the second-order KL."""
    return delta * delta / 2.0


@metric(
    unit="nats",
    bounds=POSITIVE,
    outermost=True,
)
def k3_kl(delta: Floats) -> Floats:
    """k3: mean of rho - 1 - delta. Estimates KL(rollout ‖ train) where the left side sampled."""
    return rho_minus_linear(delta)


@metric(unit="nats", bounds=POSITIVE, outermost=True)
def reverse_k3_kl(delta: Floats) -> Floats:
    """Mean of 1/rho - 1 + delta. On rollout-sampled tokens *not* an unbiased reverse KL."""
    return exp_minus_linear(-delta, inverse_excess(delta))


@metric(unit="nats", bounds=POSITIVE, outermost=True)
def js_divergence(delta: Floats) -> Floats:
    """Mean of half of k3 of each side against the mixture m = (e^train + e^rollout)/2.

    Looks at the sampled token only: not an unbiased Jensen-Shannon divergence.
    """
    # train - m and rollout - m are h - log cosh h and -h - log cosh h with h = delta / 2, and their
    # exponentials sum to 2: what remains is log cosh h = log(1 + sinh² h) / 2.
    squared_sinh = ratio_excess(delta) * inverse_excess(delta) / -4.0
    return floats(0.5 * np.log1p(squared_sinh))


@metric(
    unit="nats",
    bounds=POSITIVE,
    outermost=True,
)
def logprob_abs_diff_mean(delta: Floats) -> Floats:
    """Mean |delta|."""
    return absolute(delta)


@metric(
    "extreme",
    fold="max",
    unit="nats",
    bounds=POSITIVE,
)
def logprob_abs_diff_max(delta: Floats) -> Floats:
    """Largest |delta|; an extreme, so no interval."""
    return absolute(delta)


def _absolute(delta: Floats) -> Floats:
    return absolute(delta)


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


@metric(unit="ratio", combine=excess, bounds=(1.0, np.inf), outermost=True)
def token_mult_prob_error(delta: Floats) -> Floats:
    """Mean of exp(|delta|): the factor by which probabilities differ. Terms hold its excess."""
    return excess_factor(delta)


@shared
def _probability_gap(rollout: Floats, train: Floats) -> Floats:
    return np.abs(probability_change(rollout, train))


@metric(unit="probability", bounds=SHARE)
def probs_diff_mean(rollout: Floats, train: Floats) -> Floats:
    """Mean |e^train - e^rollout|."""
    return _probability_gap(rollout, train)


@metric(
    "extreme",
    fold="max",
    unit="probability",
    bounds=SHARE,
)
def probs_diff_max(rollout: Floats, train: Floats) -> Floats:
    """Largest |e^train - e^rollout|; an extreme, so no interval."""
    return _probability_gap(rollout, train)


@metric(
    "ratio",
    unit="probability",
    combine=spread,
    bounds=SHARE,
)
def probs_diff_std(rollout: Floats, train: Floats) -> tuple[Floats, ...]:
    """Standard deviation (dividing by A) of |e^train - e^rollout|."""
    gap = _probability_gap(rollout, train)
    return gap, gap * gap


def _pearson(means: Floats) -> Floats:
    x, gap, xx, xgap, gapgap = np.moveaxis(means, -1, 0)
    variance, covariance = xx - x * x, xgap - x * gap  # of x; of x and y - x
    gap_variance = gapgap - gap * gap
    variance_y = variance + 2.0 * covariance + gap_variance
    unexplained = (variance * gap_variance - covariance**2) / (variance * variance_y)
    size = np.sqrt(np.maximum(1.0 - unexplained, 0.0))
    # 1 - r = (1 - r²) / (1 + r): keeps the digits of a correlation that is nearly 1.
    return np.where(variance + covariance >= 0.0, 1.0 - unexplained / (1.0 + size), -size)


def _middle(rollout: Floats, train: Floats) -> tuple[float, float]:
    """Typical e^rollout and e^train - e^rollout; exactly the constant of a constant."""
    first = rollout[:ORIGIN_UNITS], train[:ORIGIN_UNITS]
    return float(np.median(probability(first[0]))), float(np.median(probability_change(*first)))


@metric(
    "ratio",
    unit="correlation",
    origin=_middle,
    combine=_pearson,
    bounds=(-1.0, 1.0),
    good="high",
)
def probs_pearson(
    rollout: Floats, train: Floats, origin: tuple[float, float] | None = None
) -> tuple[Floats, ...]:
    """Pearson correlation of e^train and e^rollout; undefined where either is constant."""
    middle = origin or _middle(rollout, train)  # without one the products would lose digits
    x = probability(rollout) - middle[0]
    gap = probability_change(rollout, train) - middle[1]
    return x, gap, x * x, x * gap, gap * gap


@metric(
    unit="ratio",
    combine=excess,
    bounds=POSITIVE,
    good="neither",
    outermost=True,
)
def ratio_mean(delta: Floats) -> Floats:
    """Mean of rho, untruncated. Expectation 1 where the left side sampled. Terms hold rho - 1."""
    return ratio_excess(delta)


@metric(
    "ratio",
    unit="ratio",
    combine=spread,
    bounds=POSITIVE,
    outermost=True,
)
def ratio_std(delta: Floats) -> tuple[Floats, ...]:
    """Standard deviation (dividing by A) of rho, untruncated."""
    away = ratio_excess(delta)
    return away, away * away


@metric(
    "extreme",
    fold="min",
    combine=np.exp,
    unit="ratio",
    bounds=POSITIVE,
    good="neither",
)
def ratio_min(delta: Floats) -> Floats:
    """Smallest rho; an extreme, so no interval."""
    return delta


@metric(
    "extreme",
    fold="max",
    combine=np.exp,
    unit="ratio",
    bounds=POSITIVE,
    good="neither",
)
def ratio_max(delta: Floats) -> Floats:
    """Largest rho; an extreme, so no interval."""
    return delta


def _outside(tau: float) -> Metric:
    def terms(delta: Floats) -> Floats:
        return floats(absolute(delta) > np.log(tau))

    return register(
        f"ratio_outside_{tau:g}",
        terms,
        kind="mean",
        unit="share",
        bounds=SHARE,
        outermost=True,
        doc=f"Share of tokens with max(rho, 1/rho) > {tau:g}.",
    )


ratio_outside_1_02, ratio_outside_1_2, ratio_outside_2 = (_outside(tau) for tau in TAUS)


@metric(unit="share", bounds=SHARE, outermost=True)
def clip_fraction(delta: Floats, eps_low: float = 0.2, eps_high: float = 0.2) -> Floats:
    """Share of tokens with rho outside [1 - eps_low, 1 + eps_high] at step 0.

    PPO's clip fraction only where rollout logprobs serve as old logprobs; ignores the
    advantage's sign.
    """
    away = ratio_excess(delta)
    return floats((away < -eps_low) | (away > eps_high))


@metric(unit="1", bounds=(-1.0, np.inf), outermost=True)
def chi2_token(delta: Floats) -> Floats:
    """Mean of rho² - 1, delta clamped to ±20; estimates chi²(train ‖ rollout)."""
    away = np.clip(ratio_excess(delta), np.expm1(-CLAMP), np.expm1(CLAMP))
    return floats(away * (away + 2.0))  # rho² - 1, exact where rho is nearly 1


@metric("extreme", fold="sum", unit="tokens", bounds=POSITIVE)
def chi2_token_clamped(delta: Floats) -> Floats:
    """Number of tokens that ``chi2_token`` clamps: |delta| > 20."""
    return floats(absolute(delta) > CLAMP)


@metric(
    "ratio",
    unit="share",
    combine=effective_share,
    bounds=SHARE,
    good="high",
    outermost=True,
)
def ess_token(delta: Floats) -> tuple[Floats, ...]:
    """Effective share of the sample, (mean w)² / mean w², with w = min(rho, 2)."""
    weight = np.minimum(1.0 + ratio_excess(delta), TRUNCATION)
    return weight, weight * weight


@metric("extreme", fold="sum", unit="tokens", bounds=POSITIVE)
def ess_token_truncated(delta: Floats) -> Floats:
    """Number of tokens whose weight ``ess_token`` truncates: rho > 2."""
    return floats(delta > np.log(TRUNCATION))


@metric(unit="nats", bounds=POSITIVE, good="neither")
def entropy_train(train_entropy: Floats) -> Floats:
    """Mean entropy of the train side's distribution over the vocabulary."""
    return train_entropy


@metric(
    "ratio",
    unit="ratio",
    combine=quotient,
    bounds=POSITIVE,
)
def kl_over_entropy(delta: Floats, train_entropy: Floats) -> tuple[Floats, ...]:
    """``k3_kl`` / ``entropy_train``: mismatch beside the policy's own spread."""
    return rho_minus_linear(delta), train_entropy


@metric(unit="share", bounds=SHARE, good="high")
def argmax_agree(rollout_top1: Ints, train_top1: Ints) -> Floats:
    """Share of tokens whose most likely next token is the same id on both sides."""
    return floats(rollout_top1 == train_top1)
