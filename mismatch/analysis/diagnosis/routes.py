"""Checks of the captured routes: no worse than chance, and of the same tokens.

Experts that are captured from other rows, or drawn at random, are valid ids: only their agreement
with the other side tells. Chance is what two sides with these loads agree in when they choose
independently: per layer the sum over experts of a_e b_e / K, with a_e the share of tokens that one
side sends to e, b_e the other's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mismatch.analysis.diagnosis.declared import failed
from mismatch.types import Check, Floats, Ints, Rollout, Routing, Scoring

ID = "routes-agree"
LAGS = (-2, -1, 1, 2)
LEAST_TOKENS = 64
CHANCE, WEAK = 0.2, 0.5  # of what there is beyond chance: under these failed, a warning
ROWS = 4096  # tokens that are looked at: agreement with chance shows in far fewer
FIX = "look at the capture of routes: its rows, its layers, the order of its tokens"


def routing_checks(rollout: Rollout, left: Scoring, right: Scoring) -> list[Check]:
    """Check agreement beyond chance per layer, and at which shift of the rows it is best.

    Empty where a side has no routes, or replays the other's.
    """
    if left.routing is None or right.routing is None or right.fingerprint.get("replay"):
        return []
    routes, other = left.routing, right.routing
    layers = [layer for layer in routes.layers if layer in other.layers]
    if not layers or (routes.top_k, routes.num_experts) != (other.top_k, other.num_experts):
        return []  # the comparison of routes says what is wrong
    rows = rollout.actions - 1
    if len(rows) < LEAST_TOKENS:
        return [Check(ID, "not_tested", f"nothing to check: needs {LEAST_TOKENS} tokens")]
    if routes.top_k == routes.num_experts:
        return [Check(ID, "not_tested", "nothing to check: every expert takes every token")]
    rows = rows[:: max(1, len(rows) // ROWS)]
    return [_agreement(rollout, routes, other, layers, rows)]


def _agreement(
    rollout: Rollout, left: Routing, right: Routing, layers: list[int], rows: Ints
) -> Check:
    columns = [[side.layers.index(layer) for layer in layers] for side in (left, right)]
    a, b = left.ids[rows][:, columns[0]], right.ids[rows][:, columns[1]]
    agreement = beyond_chance(a, b, left.num_experts)
    total = float(agreement.mean())
    detail = f"expert agreement {total:.2f} (0: chance, 1: equal), over {len(layers)} layers"
    sequence = rollout.sequence_of_token
    for lag in LAGS:
        at = rows + lag
        keep = (at >= 0) & (at < len(sequence))
        keep[keep] &= sequence[at[keep]] == sequence[rows[keep]]
        keep[keep] &= right.present[at[keep]]
        if keep.sum() < LEAST_TOKENS:
            continue
        shifted = right.ids[at[keep]][:, columns[1]]
        better = float(beyond_chance(a[keep], shifted, left.num_experts).mean())
        if better > total + 0.2 and better > WEAK:
            shift = f"expert agreement {better:.2f} shifted by {lag:+d} rows, {total:.2f} unshifted"
            return failed(ID, shift, FIX)
    worst = int(agreement.argmin())
    where = f"; layer {layers[worst]}: {float(agreement[worst]):.2f}"
    if total < CHANCE:
        return failed(ID, detail + where, FIX)
    if total < WEAK or agreement[worst] < CHANCE:
        return Check(ID, "warning", detail + where, FIX)
    return Check(ID, "passed", detail)


def beyond_chance(a: NDArray[np.integer], b: NDArray[np.integer], experts: int) -> Floats:
    """Per layer: overlap of the sets beyond chance, over what there is beyond it, [L].

    1: equal sets. 0: as good as independent choices with these loads. Where chance leaves nothing
    (both sides always choose the same experts), equal sets count as 1.

    Args:
        a, b: expert ids, [R, L, K].
    """
    top = a.shape[2]
    overlap = (a[..., :, None] == b[..., None, :]).sum(axis=(2, 3)).mean(axis=0) / top
    offset = np.arange(a.shape[1])[None, :, None] * experts
    loads = [
        np.bincount((side.astype(np.int64) + offset).ravel(), minlength=a.shape[1] * experts)
        .reshape(a.shape[1], experts) / len(side)
        for side in (a, b)
    ]  # fmt: skip
    chance = (loads[0] * loads[1]).sum(axis=1) / top
    room = 1.0 - chance
    return np.where(room > 1e-9, (overlap - chance) / np.maximum(room, 1e-9), overlap)
