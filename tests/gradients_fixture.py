"""Planted gradients: a reference, a trainer without sinks, and fixes that repair and worsen it."""

from __future__ import annotations

from functools import cache

import numpy as np

from mismatch.features.gradients.plan import Batch, GradientPlan, Planned
from mismatch.features.gradients.results import GradientCheck, Sums, Taken, compare_gradients
from mismatch.specs import TrainSpec
from mismatch.types import Floats

SIZES = {"attention": 400, "sinks": 20, "experts": 600, "head": 300}
DIMENSION = sum(SIZES.values())
IDS = ("reference", "baseline", "attention-sinks", "fp16")


def slices() -> dict[str, slice]:
    """Where each group lies in a gradient [D]."""
    ends = np.cumsum([0, *SIZES.values()])
    return {name: slice(*ends[n : n + 2].tolist()) for n, name in enumerate(SIZES)}


def sums_of(own: Floats, reference: Floats) -> Sums:
    """Return what a training world measures of a gradient [D]."""
    return {
        name: (float(own[at] @ own[at]), float(own[at] @ reference[at]))
        for name, at in slices().items()
    }


def compared(sums: dict[str, Sums], failed: dict[str, str] | None = None) -> GradientCheck:
    """Return the check of a plan whose passes are these and those that failed."""
    ids = [*sums, *(failed or {})]
    plan = GradientPlan(
        tuple(Planned(id, id, TrainSpec()) for id in ids),
        16,
        0,
        {"fp32": "reference"},
        ("gradient of vllm-fp32: it samples other tokens",),
    )
    batch = Batch(np.arange(16), 16, 64, 3200, "rewards", np.zeros(3200))
    return compare_gradients(Taken(sums, failed or {}), plan, batch)


def reference_gradient() -> Floats:
    """Return a reference's gradient [D]."""
    gradient: Floats = np.random.default_rng(0).normal(size=DIMENSION)
    return gradient


def planted() -> dict[str, Sums]:
    """Return the sums of every pass."""
    reference, draw = reference_gradient(), np.random.default_rng(1)
    bias = draw.normal(size=DIMENSION)
    blind = reference + 0.5 * bias
    blind[slices()["sinks"]] = 0.0
    gradients = (reference, blind, reference + 0.05 * bias, reference + 0.9 * bias)
    each = zip(IDS, gradients, strict=True)
    return {id: sums_of(gradient, reference) for id, gradient in each}


@cache
def make_check() -> GradientCheck:
    """Return the check of the planted gradients."""
    return compared(planted())
