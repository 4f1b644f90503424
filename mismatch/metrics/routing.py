"""Routing metrics: do both sides send the same token to the same experts?

Arrays hold a row per action token and a column per MoE layer that both sides captured, [A, L].
Row rule: action token t was predicted by the forward of t - 1, so its row is t - 1
(:func:`action_rows` applies it). Formulas and names: docs/metrics.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch.errors import MismatchError
from mismatch.metrics.registry import POSITIVE, SHARE, Array, floats, metric, quotient
from mismatch.types import Bools, Floats, Ints, Rollout, Routing

SORTED_ENOUGH = 0.9


def action_rows(rollout: Rollout) -> Ints:
    """Rows of T that predicted the action tokens, [A]: one before each."""
    return rollout.actions - 1


def shared_experts(rollout_ids: Array, train_ids: Array) -> Floats:
    """|A ∩ B| / K of two [A, L, K] sets of distinct expert ids, [A, L]; 1 where the sets agree."""
    both = np.sort(np.concatenate([rollout_ids, train_ids], axis=2), axis=2)
    shared = (both[:, :, 1:] == both[:, :, :-1]).sum(axis=2)  # ids are distinct within a side
    return floats(shared / rollout_ids.shape[2])


def top_expert(ids: Array, weights: Array) -> Ints:
    """Expert of the highest weight, [A, L]; the lowest id where weights tie."""
    best = weights == weights.max(axis=2, keepdims=True)
    lowest = np.where(best, ids, np.iinfo(np.int64).max).min(axis=2)
    return np.asarray(lowest, dtype=np.int64)


@metric(unit="share", bounds=SHARE)
def routing_disagree_layer(overlap: Floats) -> Floats:
    """Share of (token, layer) pairs whose sets of experts differ. ``overlap`` [A, L]."""
    return floats((overlap < 1.0).mean(axis=1))


@metric(unit="share", bounds=SHARE)
def routing_disagree_any(overlap: Floats) -> Floats:
    """Share of tokens with at least one layer whose sets of experts differ."""
    return floats((overlap < 1.0).any(axis=1))


@metric(unit="share", bounds=SHARE, good="high")
def routing_overlap(overlap: Floats) -> Floats:
    """Mean of |A ∩ B| / K over (token, layer)."""
    return floats(overlap.mean(axis=1))


@metric(unit="layers", bounds=POSITIVE)
def routing_layers_per_token(overlap: Floats) -> Floats:
    """Mean number of layers per token whose sets of experts differ."""
    return floats((overlap < 1.0).sum(axis=1))


@metric(unit="share", bounds=SHARE)
def routing_top1_disagree(rollout_top_expert: Ints, train_top_expert: Ints) -> Floats:
    """Share of (token, layer) whose expert of highest weight differs. Needs weights of both."""
    return floats((rollout_top_expert != train_top_expert).mean(axis=1))


@metric(unit="share", bounds=SHARE, good="neither")
def routing_order_only(reordered: Bools) -> Floats:
    """Share of (token, layer) with the same set in another slot order. Needs sorting kernels."""
    return floats(reordered.mean(axis=1))


@metric(unit="score", bounds=POSITIVE, good="neither")
def routing_margin(margin: Floats) -> Floats:
    """Mean gap between the K-th and (K+1)-th selection score on the train side, [A, L]."""
    return floats(margin.mean(axis=1))


@metric("ratio", unit="score", combine=quotient, bounds=POSITIVE, good="neither")
def routing_margin_flipped(margin: Floats, overlap: Floats) -> Floats:
    """Mean of that gap where the sets differ; undefined without a difference."""
    flipped = overlap < 1.0
    return np.stack([(margin * flipped).sum(axis=1), flipped.sum(axis=1)], axis=1)


@metric("extreme", unit="share", bounds=SHARE)
def experts_load_tv(rollout_ids: Array, train_ids: Array) -> float:
    """Mean over layers of the total variation between both sides' load per expert.

    No interval: it is not smooth at 0, where resampling is biased upwards.
    """
    return float(load_variation(rollout_ids, train_ids).mean())


def load_variation(rollout_ids: Array, train_ids: Array) -> Floats:
    """½ Σ_e |load_left(e) - load_right(e)| per layer, [L]; load = share of the (token, slot)."""
    experts = int(max(rollout_ids.max(), train_ids.max())) + 1
    layers = rollout_ids.shape[1]
    offset = np.arange(layers)[None, :, None] * experts

    def counts(ids: Array) -> Floats:
        flat = (ids.astype(np.int64) + offset).ravel()
        return floats(np.bincount(flat, minlength=layers * experts).reshape(layers, experts))

    slots = rollout_ids.shape[0] * rollout_ids.shape[2]
    return floats(0.5 * np.abs(counts(rollout_ids) - counts(train_ids)).sum(axis=1) / slots)


@dataclass(frozen=True, slots=True)
class PairedRouting:
    """Both sides' experts of the action tokens, on the layers that both captured.

    Attributes:
        layers: the model's numbers of those layers.
        arrays: inputs of the routing metrics by name, each [A, L] or [A, L, K].
    """

    layers: tuple[int, ...]
    arrays: dict[str, Array]

    @property
    def flips(self) -> Ints:
        """Layers whose sets of experts differ, per action token, [A]."""
        return np.asarray((self.arrays["overlap"] < 1.0).sum(axis=1), dtype=np.int64)


def pair_routing(rollout: Rollout, left: Routing, right: Routing) -> PairedRouting:
    """Both sides' rows of the action tokens, on common layers.

    Raises:
        MismatchError: no common layer, or another number of experts on either side.
    """
    layers = tuple(layer for layer in left.layers if layer in right.layers)
    if not layers:
        raise MismatchError(
            f"routing: no MoE layer in common: {left.layers} against {right.layers}",
            "capture the same layers on both sides, or run without routing: --no-routing",
        )
    if (left.top_k, left.num_experts) != (right.top_k, right.num_experts):
        raise MismatchError(
            f"routing: top-{left.top_k} of {left.num_experts} experts against "
            f"top-{right.top_k} of {right.num_experts}",
            "both sides must run the same model with the same experts per token",
        )
    rows = action_rows(rollout)
    pick_left = np.ix_(rows, np.array([left.layers.index(layer) for layer in layers]))
    pick_right = np.ix_(rows, np.array([right.layers.index(layer) for layer in layers]))
    a, b = left.ids[pick_left], right.ids[pick_right]
    overlap = shared_experts(a, b)
    arrays: dict[str, Array] = {"rollout_ids": a, "train_ids": b, "overlap": overlap}
    if right.margin is not None:
        arrays["margin"] = right.margin[pick_right].astype(np.float64)
    a_weights = None if left.weights is None else left.weights[pick_left]
    b_weights = None if right.weights is None else right.weights[pick_right]
    if a_weights is not None and b_weights is not None:
        arrays["rollout_top_expert"] = top_expert(a, a_weights)
        arrays["train_top_expert"] = top_expert(b, b_weights)
    same_set = overlap == 1.0
    reordered = same_set & (a != b).any(axis=2)
    if _share_an_order(a_weights, b_weights, same_set, reordered):
        arrays["reordered"] = reordered
    return PairedRouting(layers, arrays)


def _share_an_order(
    left: Array | None, right: Array | None, same_set: Bools, reordered: Bools
) -> bool:
    """Whether slot order means the same on both sides: descending weight.

    A side without weights counts as sorted where its order nearly always follows the other's.
    """
    known = [weights for weights in (left, right) if weights is not None]
    if not known or not all((np.diff(weights, axis=2) <= 0).all() for weights in known):
        return False
    if len(known) == 2:
        return True
    return bool(same_set.any() and 1.0 - reordered[same_set].mean() > SORTED_ENOUGH)
