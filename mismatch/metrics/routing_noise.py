"""How far a router's own scores move without any mismatch: what makes a flipped choice a near-tie.

A choice flips when the gap between the K-th and the (K+1)-th score (the margin) moves by more than
itself. So the noise of a layer is how far the trainer's own margins move when nothing but the
arithmetic changes, and a margin within that noise is a near-tie: either choice may come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mismatch.metrics.registry import Array
from mismatch.metrics.routing_pairs import PairedRouting, action_rows
from mismatch.types import Rollout, Routing, Scoring

NOISE_QUANTILE = 0.99  # of the moves; the rest are tokens whose hidden state was already off
# Unit roundoff: half the distance from 1 to the next number.
ROUNDOFF = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}


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
    """The trainer's router noise from the first pass that shows any, else from rounding.

    ``level[l]`` is the 99 % quantile, over action tokens, of |margin_train - margin_pass| in layer
    l. Without such a pass: roundoff of the trainer's dtype, times the largest margin of the layer
    (scores are at least about as large as the gap between two of them).

    Args:
        passes: of the same trainer, best first: regrouped micro-batches, float32 reference.

    Returns:
        None where the trainer captured no margin, or ran in a dtype of unknown rounding.
    """
    routing = train.routing
    if routing is None or routing.margin is None:
        return None
    rows = action_rows(rollout)
    for other in passes:
        moves = _moves(routing, other.routing, rows)
        if any(moves.values()):
            return RouterNoise(moves, other.name)
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
    """The same pairing with ``near_tie`` [R, L] among its arrays, where that can be said."""
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
