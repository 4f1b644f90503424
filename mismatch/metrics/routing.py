"""Routing metrics: do both sides send the same token to the same experts, and what does it cost?

Arrays hold a row per action token and a column per MoE layer that both sides captured, [A, L];
:func:`mismatch.metrics.routing_pairs.pair_routing` makes them. Formulas and names: docs/metrics.md.
"""

from __future__ import annotations

import numpy as np

from mismatch.metrics.registry import POSITIVE, SHARE, Array, floats, metric, quotient
from mismatch.metrics.routing_pairs import load_variation
from mismatch.types import Bools, Floats


@metric(
    unit="share",
    bounds=SHARE,
    label="routing flips, per layer",
    meaning="share of (token, layer) pairs where the two sides chose another set of experts",
)
def routing_disagree_layer(differs: Bools) -> Floats:
    """Share of (token, layer) pairs whose sets of experts differ. ``differs`` [A, L]."""
    return floats(differs.mean(axis=1))


@metric(
    unit="share",
    bounds=SHARE,
    label="tokens with a flip",
    meaning="share of tokens with at least one",
)
def routing_disagree_any(differs: Bools) -> Floats:
    """Share of tokens with at least one layer whose sets of experts differ. ``differs`` [A, L]."""
    return floats(differs.any(axis=1))


@metric(
    unit="share",
    bounds=SHARE,
    good="high",
    label="experts in common",
    meaning="mean share of the chosen experts",
)
def routing_overlap(overlap: Floats) -> Floats:
    """Mean of |A ∩ B| / K over (token, layer). ``overlap`` [A]: each token's mean over layers."""
    return floats(overlap)


@metric(
    unit="layers",
    bounds=POSITIVE,
    label="flips per token",
    meaning="mean number of differing layers",
)
def routing_layers_per_token(differs: Bools) -> Floats:
    """Mean number of layers per token whose sets of experts differ. ``differs`` [A, L]."""
    return floats(differs.sum(axis=1))


@metric(
    unit="share",
    bounds=SHARE,
    label="other first expert",
    meaning="share of (token, layer) with another heaviest expert",
)
def routing_top1_disagree(rollout_top_expert: Array, train_top_expert: Array) -> Floats:
    """Share of (token, layer) whose expert of highest weight differs, both [A, L].

    Needs weights of both sides: slot 0 is not the heaviest where a kernel does not sort.
    """
    return floats((rollout_top_expert != train_top_expert).mean(axis=1))


@metric(
    unit="share", bounds=SHARE, good="neither", label="same set, other order", meaning="harmless"
)
def routing_order_only(reordered: Bools) -> Floats:
    """Share of (token, layer) with the same set in another slot order. Needs sorting kernels."""
    return floats(reordered.mean(axis=1))


@metric(
    unit="weight",
    bounds=(0.0, np.inf),
    label="routing weights, L1",
    meaning="distance of the two sides' weights over all experts; at most 2",
)
def routing_weight_l1(weight_l1: Array) -> Floats:
    """Mean over (token, layer) of Σ_e |w_rollout(e) - w_train(e)|, e over all E experts.

    ``weight_l1`` [A, L]. An expert that was not chosen weighs 0: where weights sum to 1, two
    disjoint sets are 2 apart. Needs weights of both sides.
    """
    return floats(weight_l1.mean(axis=1, dtype=np.float64))


@metric(
    unit="score",
    bounds=POSITIVE,
    good="neither",
    label="router margin, mean",
    meaning="gap between the last chosen and the first rejected expert",
)
def routing_margin(margin: Array) -> Floats:
    """Mean gap between the K-th and (K+1)-th selection score on the train side, [A, L]."""
    return floats(margin.mean(axis=1, dtype=np.float64))


@metric(
    "ratio",
    unit="score",
    combine=quotient,
    bounds=POSITIVE,
    good="neither",
    label="router margin, flipped",
    meaning="small: near-ties, decided by rounding",
)
def routing_margin_flipped(margin: Array, differs: Bools) -> Floats:
    """Mean of that gap where the sets differ; undefined without a difference. Both [A, L]."""
    total = np.where(differs, margin, 0.0).sum(axis=1, dtype=np.float64)
    return np.stack([total, differs.sum(axis=1)], axis=1)


@metric(
    unit="share",
    bounds=SHARE,
    good="neither",
    label="near-ties",
    meaning="choices whose margin lies within the router's own noise",
)
def routing_near_tie(near_tie: Bools) -> Floats:
    """Share of (token, layer) whose margin on the train side is within the router's noise, [A, L].

    The noise is that of :func:`mismatch.metrics.routing_pairs.router_noise`.
    """
    return floats(near_tie.mean(axis=1))


@metric(
    "ratio",
    unit="share",
    combine=quotient,
    bounds=SHARE,
    good="neither",
    label="flips that are near-ties",
    meaning="share of the differing choices that were near-ties",
)
def routing_near_tie_flipped(near_tie: Bools, differs: Bools) -> Floats:
    """Share of the differing sets that were near-ties: Σ (near ∧ differs) / Σ differs. [A, L]."""
    return np.stack([(near_tie & differs).sum(axis=1), differs.sum(axis=1)], axis=1).astype(float)


@metric(
    unit="share",
    bounds=SHARE,
    label="prompt: flips per layer",
    meaning="the first number, over prompt and tool output: apart from the headline",
)
def routing_prompt_disagree_layer(prompt_differs: Bools) -> Floats:
    """``routing_disagree_layer`` over the forwarded rows that predict no action, [R, L].

    Those are prompt and tool output. They have no delta, and no part in the headline rates.
    """
    return floats(prompt_differs.mean(axis=1))


@metric(
    unit="share",
    bounds=SHARE,
    label="prompt tokens with flips",
    meaning="share of those tokens with at least one layer",
)
def routing_prompt_disagree_any(prompt_differs: Bools) -> Floats:
    """``routing_disagree_any`` over the forwarded rows that predict no action, [R, L]."""
    return floats(prompt_differs.any(axis=1))


def _harm_factor(means: Floats) -> Floats:
    """Mean |delta| with flips over mean |delta| without, from means of (flip, |d| flip, |d|)."""
    flip, harmed, size = (means[..., i] for i in range(3))
    defined = (flip > 0.0) & (flip < 1.0) & (size > harmed)
    return np.where(defined, harmed / flip / ((size - harmed) / (1.0 - flip)), np.nan)


def _between(means: Floats) -> Floats:
    """Between-group share of the variance of |delta|, from means of (flip, |d| flip, |d|, d²)."""
    flip, harmed, size, square = (means[..., i] for i in range(4))
    apart = harmed**2 / flip + (size - harmed) ** 2 / (1.0 - flip) - size**2
    total = square - size**2
    defined = (flip > 0.0) & (flip < 1.0) & (total > 0.0)
    return np.where(defined, np.clip(apart / total, 0.0, 1.0), np.nan)


@metric(
    "ratio",
    unit="factor",
    combine=_harm_factor,
    bounds=POSITIVE,
    good="neither",
    label="|delta|, flipped tokens",
    meaning="their mean |delta| over that of the other tokens",
)
def routing_harm_factor(differs: Bools, delta: Floats) -> Floats:
    """Mean |delta| of tokens with a differing layer over that of tokens without.

    ``differs`` [A, L], ``delta`` [A]. Undefined where all tokens or none have one. It says what
    coincides: an unlikely token has both a larger delta and more near-ties.
    """
    flip, size = floats(differs.any(axis=1)), np.abs(delta)
    return np.stack([flip, size * flip, size], axis=1)


@metric(
    "ratio",
    unit="share",
    combine=quotient,
    bounds=SHARE,
    good="neither",
    label="delta², flipped tokens",
    meaning="share of all delta² on tokens with a routing flip",
)
def routing_delta2_share(differs: Bools, delta: Floats) -> Floats:
    """Σ delta² of the tokens with a differing layer, over Σ delta² of all. Beside their share of
    the tokens (``routing_disagree_any``): equal shares mean that flips do no harm."""
    flip, square = floats(differs.any(axis=1)), delta**2
    return np.stack([flip * square, square], axis=1)


@metric(
    "ratio",
    unit="share",
    combine=quotient,
    bounds=SHARE,
    good="neither",
    label="k3, flipped tokens",
    meaning="share of the k3 score on tokens with a routing flip",
)
def routing_k3_share(differs: Bools, delta: Floats) -> Floats:
    """Share of ``k3_kl`` that the tokens with a differing layer carry: Σ k3 there over Σ k3."""
    with np.errstate(over="ignore"):
        flip, k3 = floats(differs.any(axis=1)), np.expm1(delta) - delta
        return np.stack([np.where(flip > 0.0, k3, 0.0), k3], axis=1)


@metric(
    "ratio",
    unit="share",
    combine=_between,
    bounds=SHARE,
    good="neither",
    label="variance explained",
    meaning="share of the variance of |delta| between the two groups",
)
def routing_harm_r2(differs: Bools, delta: Floats) -> Floats:
    """Share of the variance of |delta| that "a layer differs, or none" accounts for (η²).

    p (m₁ - m)² + (1 - p)(m₀ - m)² over var |delta|, with m₁, m₀ the mean |delta| with and without
    a differing layer and p the share of tokens with one. Undefined where all or none have one.
    """
    flip, size = floats(differs.any(axis=1)), np.abs(delta)
    return np.stack([flip, size * flip, size, size**2], axis=1)


@metric(
    "extreme",
    unit="share",
    bounds=SHARE,
    label="expert load, distance",
    meaning="total variation between the two sides' load per expert",
)
def experts_load_tv(rollout_load: Array, train_load: Array) -> float:
    """Mean over layers of the total variation between both sides' load per expert, [L, E] counts.

    No interval: it is not smooth at 0, where resampling is biased upwards.
    """
    return float(load_variation(rollout_load, train_load).mean())


@metric(
    "extreme",
    unit="factor",
    bounds=POSITIVE,
    good="neither",
    label="busiest expert, rollout",
    meaning="its load over the even load of its layer",
)
def experts_load_peak_rollout(rollout_load: Array) -> float:
    """Largest load of any expert on the rollout side, over the even load 1 / E. [L, E] counts."""
    return _peak(rollout_load)


@metric(
    "extreme",
    unit="factor",
    bounds=POSITIVE,
    good="neither",
    label="busiest expert, train",
    meaning="the same on the train side",
)
def experts_load_peak_train(train_load: Array) -> float:
    """Largest load of any expert on the train side, over the even load 1 / E. [L, E] counts."""
    return _peak(train_load)


def _peak(load: Array) -> float:
    share = floats(load) / floats(load).sum(axis=1, keepdims=True)
    return float(share.max() * load.shape[1])
