"""Two sides' experts of the same tokens, paired: what the routing metrics are computed from.

Row rule: action token t was predicted by the forward of t - 1, so its experts are row t - 1
(:func:`action_rows`). Layers are matched by the model's own numbers. Ids are read in chunks: beyond
its input, a pairing holds a few bytes per (token, layer), whatever K is.

A choice flips when the gap between the K-th and the (K+1)-th score (the margin) moves by more than
itself. So the router's noise in a layer is how far the trainer's own margins move when nothing but
the arithmetic changes, and a margin within that noise is a near-tie: either choice may come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mismatch.errors import MismatchError
from mismatch.metrics.registry import Array, floats
from mismatch.types import Bools, Floats, Ints, Rollout, Routing, Scoring

SLOTS = 32  # up to which comparing each slot with each is faster than sorting
CHUNK = 1 << 20  # expert ids of a side that are worked on at a time
NOISE_QUANTILE = 0.99  # of the moves; the rest are tokens whose hidden state was already off
# Unit roundoff: half the distance from 1 to the next number.
ROUNDOFF = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}


@dataclass(frozen=True, slots=True)
class PairedRouting:
    """Both sides' experts of R tokens, on the L layers that both captured.

    Attributes:
        layers: the model's numbers of those layers.
        arrays: inputs of the routing metrics by name; those that the data allow.
            differs: [R, L] bool, the two sets of experts differ. overlap: [R] mean of |A ∩ B| / K.
            rollout_load, train_load: [L, E] how often a side chose an expert.
            rollout_top_expert, train_top_expert: [R, L]. weight_l1: [R, L] float32.
            margin: [R, L] float32, train side.
    """

    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    arrays: dict[str, Array]

    @property
    def differs(self) -> Bools:
        """Whether the two sets of experts differ, [R, L]."""
        return self.arrays["differs"]

    @property
    def flips(self) -> Ints:
        """Layers whose sets of experts differ, per token, [R]."""
        return np.asarray(self.differs.sum(axis=1), dtype=np.int64)


def action_rows(rollout: Rollout) -> Ints:
    """Return rows of T that predicted the action tokens, [A]: one before each."""
    return rollout.actions - 1


def other_rows(rollout: Rollout, left: Routing, right: Routing) -> Ints:
    """Return rows that predicted no action and that both sides captured: prompt and tool output."""
    free = left.present & right.present
    free[action_rows(rollout)] = False
    return np.flatnonzero(free)


def pair_routing(
    rollout: Rollout, left: Routing, right: Routing, rows: Ints | None = None
) -> PairedRouting:
    """Return both sides' choices on common layers.

    Args:
        rows: of T, [R]; the rows of the action tokens unless given.

    Raises:
        MismatchError: no common layer, or another number of experts on either side.
    """
    layers = tuple(layer for layer in left.layers if layer in right.layers)
    if not layers:
        fault = f"routing: no MoE layer in common: {left.layers} against {right.layers}"
        fix = "capture the same layers on both sides, or run without routing: --no-routing"
        raise MismatchError(fault, fix)
    if (left.top_k, left.num_experts) != (right.top_k, right.num_experts):
        raise MismatchError(
            f"routing: top-{left.top_k} of {left.num_experts} experts against "
            f"top-{right.top_k} of {right.num_experts}",
            "both sides must run the same model with the same experts per token",
        )
    rows = action_rows(rollout) if rows is None else rows
    experts, shape = left.num_experts, (len(rows), len(layers))
    arrays: dict[str, Array] = {
        "differs": np.zeros(shape, bool),
        "overlap": np.zeros(len(rows)),
        "rollout_load": np.zeros((len(layers), experts), np.int64),
        "train_load": np.zeros((len(layers), experts), np.int64),
    }
    if left.weights is not None and right.weights is not None:
        arrays["rollout_top_expert"] = np.zeros(shape, left.ids.dtype)
        arrays["train_top_expert"] = np.zeros(shape, right.ids.dtype)
        arrays["weight_l1"] = np.zeros(shape, np.float32)
    step = max(1, CHUNK // (len(layers) * left.top_k))
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step]
        at = slice(start, start + len(chunk))
        a, b = (_slots(side.ids, side, layers, chunk) for side in (left, right))
        in_common = common(a, b)
        arrays["differs"][at] = in_common < left.top_k
        arrays["overlap"][at] = in_common.mean(axis=1) / left.top_k
        for name, ids in (("rollout_load", a), ("train_load", b)):
            code = ids + np.arange(len(layers), dtype=np.int64) * experts
            counted = np.bincount(code.ravel(), minlength=len(layers) * experts)
            arrays[name] += counted.reshape(len(layers), experts)
        if left.weights is not None and right.weights is not None:
            a_weights = _slots(left.weights, left, layers, chunk)
            b_weights = _slots(right.weights, right, layers, chunk)
            arrays["rollout_top_expert"][at] = top_expert(a, a_weights)
            arrays["train_top_expert"][at] = top_expert(b, b_weights)
            arrays["weight_l1"][at] = weight_distance(a, a_weights, b, b_weights)
    if right.margin is not None:
        arrays["margin"] = _picked(right.margin, right, layers, rows)
    return PairedRouting(layers, experts, left.top_k, arrays)


def _picked(values: Array, side: Routing, layers: tuple[int, ...], rows: Ints) -> Array:
    """Return some rows of [T, every layer, ...] on these layers in their order, [R, L, ...]."""
    picked = values[rows]
    if side.layers == layers:
        return picked
    return picked[:, [side.layers.index(layer) for layer in layers]]


def _slots(values: Array, side: Routing, layers: tuple[int, ...], rows: Ints) -> Array:
    """Return the same with the slots in front, [K, R, L]: quick to compare."""
    return np.ascontiguousarray(np.moveaxis(_picked(values, side, layers, rows), 2, 0))


def in_other(ids: Array, other: Array) -> Bools:
    """Return whether each chosen expert was chosen by the other side too, [K, ...].

    Both [K, ...], distinct within a token. Summed over K and divided by K: |A ∩ B| / K.
    """
    chosen = np.zeros(ids.shape, bool)
    for slot in range(len(ids)):
        for elsewhere in other:
            chosen[slot] |= ids[slot] == elsewhere
    return chosen


def common(ids: Array, other: Array) -> Ints:
    """Count |A ∩ B| of sets [K, ...]: by sorting where K is large, as in sparse attention."""
    if len(ids) <= SLOTS:
        return np.asarray(in_other(ids, other).sum(axis=0, dtype=np.int64))
    both = np.sort(np.concatenate([ids, other]), axis=0)
    return np.asarray((both[1:] == both[:-1]).sum(axis=0, dtype=np.int64))


def top_expert(ids: Array, weights: Array) -> Array:
    """Expert of the highest weight, [...], of slots [K, ...]; the lowest id where weights tie."""
    heaviest = weights.max(axis=0)
    last = np.iinfo(ids.dtype).max
    return np.asarray(np.where(weights == heaviest, ids, last).min(axis=0))


def weight_distance(ids: Array, weights: Array, other_ids: Array, other: Array) -> Floats:
    """L1 distance of two sides' routing weights as vectors over all experts, [...].

    All [K, ...]. An expert that a side did not choose weighs 0 there.
    """
    total = np.zeros(ids.shape[1:])
    for slot in range(len(ids)):
        same = other_ids == ids[slot]
        total += np.abs(weights[slot] - np.where(same, other, 0.0).sum(axis=0))
    alone = np.where(in_other(other_ids, ids), 0.0, np.abs(other)).sum(axis=0)
    return floats(total + alone)


def load_variation(rollout_load: Array, train_load: Array) -> Floats:
    """½ Σ_e |load_left(e) - load_right(e)| per layer, [L]; load = share of the (token, slot).

    Both [L, E] counts, of equally many tokens.
    """
    slots = floats(rollout_load).sum(axis=1)
    return floats(0.5 * np.abs(floats(rollout_load) - train_load).sum(axis=1) / slots)


# ---------------------------------------------------------------- near-ties


@dataclass(frozen=True, slots=True)
class RouterNoise:
    """Per layer of the model, the margin up to which a choice is a near-tie.

    Attributes:
        source: what it was measured from: the name of the trainer's other pass, or "rounding"
            where no other pass moved any margin, so that the level is assumed.

    >>> RouterNoise({0: 1e-3, 1: 2e-3}, "fsdp:regrouped").level[1]
    0.002
    """

    level: dict[int, float]
    source: str


def router_noise(rollout: Rollout, train: Scoring, passes: Sequence[Scoring]) -> RouterNoise | None:
    """Return the trainer's router noise from the first pass that shows any, else from rounding.

    ``level[l]`` is the 99 % quantile, over action tokens, of |margin_train - margin_pass| in layer
    l. Without that pass: roundoff of the trainer's dtype, times the largest margin of the layer
    (scores are at least about as large as the gap between two of them).

    Args:
        passes: of the same trainer, best first: regrouped micro-batches, float32 reference.

    Returns:
        None where the trainer captured no margin, or ran in a dtype of unknown rounding.
    """
    rows = action_rows(rollout)
    return _noise(train, train.routing, {each.name: each.routing for each in passes}, rows)


def keys_noise(train: Scoring, passes: Sequence[Scoring]) -> RouterNoise | None:
    """Return the same of the indexers of sparse attention, over all tokens whose keys were kept."""
    if train.keys is None:
        return None
    others = {each.name: None if each.keys is None else each.keys.choices for each in passes}
    return _noise(train, train.keys.choices, others, np.arange(len(train.keys.rows)))


def _noise(
    train: Scoring, routing: Routing | None, passes: dict[str, Routing | None], rows: Ints
) -> RouterNoise | None:
    if routing is None or routing.margin is None:
        return None
    for name, other in passes.items():
        moves = _moves(routing, other, rows)
        if any(moves.values()):
            return RouterNoise(moves, name)
    facts = train.fingerprint
    roundoff = ROUNDOFF.get(str(facts.get("autocast") or facts.get("dtype")))
    if roundoff is None:
        return None
    largest = routing.margin[rows].max(axis=0)
    level = {
        layer: roundoff * float(gap) for layer, gap in zip(routing.layers, largest, strict=True)
    }
    return RouterNoise(level, "rounding")


def with_noise(routes: PairedRouting, noise: RouterNoise | None) -> PairedRouting:
    """Return the same pairing with ``near_tie`` [R, L] among its arrays, where that can be said."""
    margin = routes.arrays.get("margin")
    if noise is None or margin is None or not set(routes.layers) <= set(noise.level):
        return routes
    levels = np.array([noise.level[layer] for layer in routes.layers], dtype=np.float32)
    return replace(routes, arrays=routes.arrays | {"near_tie": margin <= levels})


def _moves(routing: Routing, other: Routing | None, rows: Array) -> dict[int, float]:
    """Per layer, the quantile of how far the margins lie apart; empty where not comparable."""
    if other is None or other.margin is None or other.layers != routing.layers:
        return {}
    if not other.present[rows].all() or other.ids.shape != routing.ids.shape:
        return {}
    assert routing.margin is not None
    level = {}
    for column, layer in enumerate(routing.layers):
        moved = np.abs(routing.margin[rows, column] - other.margin[rows, column])
        level[layer] = float(np.quantile(moved, NOISE_QUANTILE, method="inverted_cdf"))
    return level if np.isfinite(list(level.values())).all() else {}
