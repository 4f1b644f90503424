"""Routing metrics: do both sides send the same token to the same experts, and what does it cost?

Arrays hold a row per action token and a column per MoE layer that both sides captured, [A, L];
:func:`mismatch.metrics.routing_pairs.pair_routing` makes them.
"""

from __future__ import annotations

import numpy as np

from mismatch.metrics.registry import POSITIVE, Array, floats, metric, quotient
from mismatch.types import Bools, Floats


@metric(
    "share",
    "routing flips, per layer",
    "share of (token, layer) pairs where the two sides chose another set of experts",
)
def routing_disagree_layer(differs: Bools) -> Floats:
    """Share of (token, layer) pairs whose sets of experts differ. ``differs`` [A, L]."""
    return floats(differs.mean(axis=1))


@metric("share", "tokens with a flip", "share of tokens with at least one")
def routing_disagree_any(differs: Bools) -> Floats:
    """Share of tokens with at least one layer whose sets of experts differ. ``differs`` [A, L]."""
    return floats(differs.any(axis=1))


@metric("share", "experts in common", "mean share of the chosen experts", good="high")
def routing_overlap(overlap: Floats) -> Floats:
    """Mean of |A ∩ B| / K over (token, layer). ``overlap`` [A]: each token's mean over layers."""
    return floats(overlap)


@metric("share", "other first expert", "share of (token, layer) with another heaviest expert")
def routing_top1_disagree(rollout_top_expert: Array, train_top_expert: Array) -> Floats:
    """Share of (token, layer) whose expert of highest weight differs, both [A, L].

    Needs weights of both sides: slot 0 is not the heaviest where a kernel does not sort.
    """
    return floats((rollout_top_expert != train_top_expert).mean(axis=1))


@metric(
    "weight",
    "routing weights, L1",
    "distance of the two sides' weights over all experts; at most 2",
    bounds=(0.0, np.inf),
)
def routing_weight_l1(weight_l1: Array) -> Floats:
    """Mean over (token, layer) of Σ_e |w_rollout(e) - w_train(e)|, e over all E experts.

    ``weight_l1`` [A, L]. An expert that was not chosen weighs 0: where weights sum to 1, two
    disjoint sets are 2 apart. Needs weights of both sides.
    """
    return floats(weight_l1.mean(axis=1, dtype=np.float64))


@metric(
    "score",
    "router margin, mean",
    "gap between the last chosen and the first rejected expert",
    bounds=POSITIVE,
    good="neither",
)
def routing_margin(margin: Array) -> Floats:
    """Mean gap between the K-th and (K+1)-th selection score on the train side, [A, L]."""
    return floats(margin.mean(axis=1, dtype=np.float64))


@metric(
    "share",
    "flips that are near-ties",
    "share of the differing choices that were near-ties",
    "ratio",
    combine=quotient,
    good="neither",
)
def routing_near_tie_flipped(near_tie: Bools, differs: Bools) -> Floats:
    """Share of the differing sets that were near-ties: Σ (near ∧ differs) / Σ differs. [A, L]."""
    return _tied_of(near_tie, differs)


def _tied_of(near: Bools, differs: Bools) -> Floats:
    """Return each token's near-ties among its differing choices, and those choices, [A, 2]."""
    return np.stack([(near & differs).sum(axis=1), differs.sum(axis=1)], axis=1).astype(float)


@metric(
    "share",
    "sparse attention: other keys",
    "share of (token, layer) whose attention selected another set of keys",
)
def keys_disagree_layer(keys_differ: Bools) -> Floats:
    """Share of (token, layer) pairs whose sets of keys differ. ``keys_differ`` [R, L].

    R: tokens that have more keys to choose from than sparse attention takes.
    """
    return floats(keys_differ.mean(axis=1))


@metric("share", "sparse attention: keys in common", "mean share of the selected keys", good="high")
def keys_overlap(keys_common: Floats) -> Floats:
    """Mean of |A ∩ B| / K over (token, layer). ``keys_common`` [R]: each token's over layers."""
    return floats(keys_common)


@metric(
    "share",
    "sparse attention: near-ties",
    "share of the differing selections that were near-ties",
    "ratio",
    combine=quotient,
    good="neither",
)
def keys_near_tie_flipped(keys_near_tie: Bools, keys_differ: Bools) -> Floats:
    """Share of the differing sets of keys that were near-ties, both [R, L]."""
    return _tied_of(keys_near_tie, keys_differ)


@metric(
    "share",
    "prompt: flips per layer",
    "the first number, over prompt and tool output: apart from the headline",
)
def routing_prompt_disagree_layer(prompt_differs: Bools) -> Floats:
    """``routing_disagree_layer`` over the forwarded rows that predict no action, [R, L].

    Those are prompt and tool output. They have no delta, and no part in the headline rates.
    """
    return floats(prompt_differs.mean(axis=1))


@metric("share", "prompt tokens with flips", "share of those tokens with at least one layer")
def routing_prompt_disagree_any(prompt_differs: Bools) -> Floats:
    """``routing_disagree_any`` over the forwarded rows that predict no action, [R, L]."""
    return floats(prompt_differs.any(axis=1))


def _harm_factor(means: Floats) -> Floats:
    """Mean |delta| with flips over mean |delta| without, from means of (flip, |d| flip, |d|)."""
    flip, harmed, size = (means[..., i] for i in range(3))
    defined = (flip > 0.0) & (flip < 1.0) & (size > harmed)
    return np.where(defined, harmed / flip / ((size - harmed) / (1.0 - flip)), np.nan)


@metric(
    "factor",
    "|delta|, flipped tokens",
    "their mean |delta| over that of the other tokens",
    "ratio",
    combine=_harm_factor,
    bounds=POSITIVE,
    good="neither",
)
def routing_harm_factor(differs: Bools, delta: Floats) -> Floats:
    """Mean |delta| of tokens with a differing layer over that of tokens without.

    ``differs`` [A, L], ``delta`` [A]. Undefined where all tokens or none have one. It says what
    coincides: an unlikely token has both a larger delta and more near-ties.
    """
    flip, size = floats(differs.any(axis=1)), np.abs(delta)
    return np.stack([flip, size * flip, size], axis=1)


@metric(
    "share",
    "delta², flipped tokens",
    "share of all delta² on tokens with a routing flip",
    "ratio",
    combine=quotient,
    good="neither",
)
def routing_delta2_share(differs: Bools, delta: Floats) -> Floats:
    """Σ delta² of the tokens with a differing layer, over Σ delta² of all. Compare their share of
    the tokens (``routing_disagree_any``): equal shares mean that flips do no harm."""
    flip, square = floats(differs.any(axis=1)), delta**2
    return np.stack([flip * square, square], axis=1)
