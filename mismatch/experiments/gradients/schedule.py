"""All gradients of a plan with their coefficients, each taken once. Pure, but for what it reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch.experiments.gradients.coefficients import (
    Batch,
    Vectors,
    add_corrections,
    add_ratio,
    choose_batch,
    plain_vectors,
)
from mismatch.experiments.gradients.planning import GradientPlan, Planned
from mismatch.experiments.gradients.types import LOSSES, PPO_OVERRIDE, PPO_RATIO
from mismatch.metrics.corrections import CORRECTIONS, NONE, OVERRIDE
from mismatch.run import store
from mismatch.specs import weights_key
from mismatch.types import Rollout


@dataclass(frozen=True)
class Item:
    """One gradient to take, or the earlier one that it equals by construction."""

    planned: Planned
    coefficients: str
    vector: str
    same_as: tuple[str, str] | None = None

    def entry(self, made_by: str) -> dict[str, str]:
        """As ``batch.json`` lists it."""
        entry = {"name": self.planned.trainer.name, "coefficients": self.coefficients}
        if self.same_as is None:
            return entry | {"made_by": made_by}
        return entry | {"same_as": self.same_as[0], "same_coefficients": self.same_as[1]}


@dataclass(frozen=True)
class Work:
    """All gradients of a plan, with their coefficients.

    Attributes:
        items: the reference's first; passes with the same weights next to each other.
        inputs: recorded artefacts that the coefficients were made from.
    """

    batch: Batch
    vectors: Vectors
    clipped: float | None
    items: tuple[Item, ...]
    inputs: tuple[str, ...]

    @classmethod
    def of(cls, run_dir: Path, rollout: Rollout, plan: GradientPlan) -> Work:
        """Of the scorings that lie in a run directory.

        Raises:
            MismatchError: scorings that are missing or cannot be paired.
        """
        batch = choose_batch(rollout, plan.prompts, plan.seed)
        vectors = plain_vectors(rollout, batch)
        right = store.load_scoring(run_dir, plan.right)
        add_corrections(vectors, rollout, store.load_scoring(run_dir, plan.left), right)
        clipped = None
        if plan.new is not None:
            new = store.load_scoring(run_dir, plan.new)
            clipped = add_ratio(vectors, rollout, right, new, plan.clip)
        names = [plan.left, plan.right, *([plan.new] if plan.new else [])]
        inputs = (store.ROLLOUT, *(store.scoring_file(name) for name in names))
        return cls(batch, vectors, clipped, tuple(items_of(plan, vectors)), inputs)


def items_of(plan: GradientPlan, vectors: Vectors) -> list[Item]:
    """Every gradient of a plan, in the order that they are taken in; the reference's first."""
    first: dict[Any, int] = {}
    for number, planned in enumerate(plan.passes):
        first.setdefault(weights_key(planned.spec), number)
    taken: dict[Any, tuple[str, str]] = {}
    items = []
    for planned in sorted(plan.passes, key=lambda one: first[weights_key(one.spec)]):
        for name in _coefficients(planned, plan):
            vector = vectors.same_as.get(name, name)
            place = (planned.trainer.name, name)
            known = taken.setdefault((planned.spec, vector), place)
            items.append(Item(planned, name, vector, None if known == place else known))
    return items


def _coefficients(planned: Planned, plan: GradientPlan) -> list[str]:
    """Names of the vectors of one pass."""
    kind, noisy = planned.trainer.kind, any(p.trainer.kind == "ratio" for p in plan.passes)
    ratio = [PPO_RATIO, PPO_OVERRIDE] if plan.new is not None else []
    if kind == "ratio":
        weights = ratio
    elif kind == "baseline":
        corrections = [one.id for one in CORRECTIONS if one.id not in (NONE, OVERRIDE)]
        weights = ["", *corrections, *([] if noisy else ratio)]
    else:
        weights = [""]
    return [f"{loss}:{weight}" if weight else loss for weight in weights for loss in LOSSES]
