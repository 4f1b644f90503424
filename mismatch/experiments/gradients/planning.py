"""Which passes take a gradient, and of what. Pure.

``--gradients`` alone takes those of the trainer, of the float32 reference, and of the fixes of the
trainer that are worth a gradient; with ``--fix`` it takes those of the fixes that are measured.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch.codec import from_json
from mismatch.experiments.gradients.coefficients import (
    Batch,
    Vectors,
    add_corrections,
    add_ratio,
    choose_batch,
    plain_vectors,
)
from mismatch.experiments.gradients.types import LOSSES, PPO_OVERRIDE, PPO_RATIO, Trainer
from mismatch.metrics.importance_weights import CORRECTIONS, NONE, OVERRIDE
from mismatch.metrics.ppo_passes import CLIP
from mismatch.run import store
from mismatch.specs import CheckSpec, Pass, TrainSpec, weights_key
from mismatch.types import Rollout

if TYPE_CHECKING:
    from mismatch.experiments.fixes.base import Context
    from mismatch.experiments.fixes.planning import Variant


@dataclass(frozen=True)
class ScheduledGradient:
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
class GradientSchedule:
    """All gradients of a plan, with their coefficients.

    Attributes:
        items: the reference's first; passes with the same weights next to each other.
        inputs: recorded artefacts that the coefficients were made from.
    """

    batch: Batch
    vectors: Vectors
    clipped: float | None
    items: tuple[ScheduledGradient, ...]
    inputs: tuple[str, ...]

    @classmethod
    def of(cls, run_dir: Path, rollout: Rollout, plan: GradientPlan) -> GradientSchedule:
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
        return cls(batch, vectors, clipped, tuple(scheduled(plan, vectors)), inputs)


def scheduled(plan: GradientPlan, vectors: Vectors) -> list[ScheduledGradient]:
    """Every gradient of a plan, in the order that they are taken in; the reference's first."""
    first: dict[Any, int] = {}
    for number, planned in enumerate(plan.passes):
        first.setdefault(weights_key(planned.spec), number)
    taken: dict[Any, tuple[str, str]] = {}
    items = []
    for planned in sorted(plan.passes, key=lambda other: first[weights_key(other.spec)]):
        for name in _coefficients(planned, plan):
            vector = vectors.same_as.get(name, name)
            key = (planned.trainer.name, name)
            held = taken.setdefault((planned.spec, vector), key)
            items.append(ScheduledGradient(planned, name, vector, None if held == key else held))
    return items


def _coefficients(planned: Planned, plan: GradientPlan) -> list[str]:
    """Names of the vectors of one pass."""
    kind, noisy = planned.trainer.kind, any(p.trainer.kind == "ratio" for p in plan.passes)
    ratio = [PPO_RATIO, PPO_OVERRIDE] if plan.new is not None else []
    if kind == "ratio":
        weights = ratio
    elif kind == "baseline":
        corrections = [c.id for c in CORRECTIONS if c.id not in (NONE, OVERRIDE)]
        weights = ["", *corrections, *([] if noisy else ratio)]
    else:
        weights = [""]
    return [f"{loss}:{weight}" if weight else loss for weight in weights for loss in LOSSES]


NATURAL = ("attention-sinks", "router-replay", "fp32-lm-head", "fp16", "fp32")


@dataclass(frozen=True, slots=True)
class Planned:
    """One pass with gradients."""

    trainer: Trainer
    spec: TrainSpec

    @classmethod
    def of(cls, name: str, id: str, kind: str, label: str, spec: TrainSpec) -> Planned:
        """A pass of this spec, with gradients."""
        return cls(Trainer(name, id, kind, label), _with_gradients(spec))

    @property
    def pass_(self) -> Pass:
        """The pass as the training world runs it: train mode, nothing recorded."""
        return Pass(self.trainer.name, self.spec)


@dataclass(frozen=True, slots=True)
class GradientPlan:
    """What ``--gradients`` asks of a training world.

    Attributes:
        passes: the reference first.
        prompts: of the batch, at most.
        seed: of the choice of prompts, and of signs that stand in for rewards.
        left, right: scorings whose ratio corrections weigh by: the engine's decode, the trainer.
        new: PPO's new pass; None where there is none.
        not_tested: one sentence each.
    """

    passes: tuple[Planned, ...]
    prompts: int
    seed: int
    left: str
    right: str
    new: str | None
    clip: float = CLIP
    not_tested: tuple[str, ...] = ()

    @property
    def made_by(self) -> str:
        """Twelve hex digits that change with anything in the plan."""
        text = json.dumps(self.to_json(), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def lines(self) -> list[str]:
        """The plan in words."""
        names = ", ".join(planned.trainer.id for planned in self.passes)
        noisy = any(planned.trainer.kind == "ratio" for planned in self.passes)
        ratio = "" if self.new is None or noisy else " and with PPO's ratio of two passes"
        return [
            f"gradients: of one batch of at most {self.prompts} prompts, both losses, in the "
            "check's own world",
            f"  {names}; the baseline also with each correction{ratio}",
            *(f"  not tested: {text}" for text in self.not_tested),
        ]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GradientPlan:
        """The inverse of :meth:`to_json`."""
        return from_json(cls, data)


def plan_gradients(spec: CheckSpec, context: Context | None = None) -> GradientPlan:
    """The passes that a check's ``--gradients`` takes.

    Args:
        context: of the fixes; found out where it is not given.
    """
    from mismatch.experiments.scoring_passes import reference_of, training_passes
    from mismatch.run.store import NEW, REFERENCE, REGROUPED, TRAIN

    specs = {pass_.name: pass_.spec for pass_ in training_passes(spec)}
    # The plain kernels keep every score for the backward pass.
    reference = replace(reference_of(spec.train), attention="auto", experts="auto")
    variants, missing = _variants(spec, context)
    passes = [
        Planned.of(REFERENCE, "reference", "reference", "float32 reference", reference),
        Planned.of(TRAIN, "baseline", "baseline", "the trainer as it is", spec.train),
        *(
            Planned.of(fix.scoring.name, fix.id, "fix", fix.outcome().summary, fix.spec.train)
            for fix in variants
        ),
    ]
    new = next((name for name in (NEW, REGROUPED) if name in specs), None)
    if new is None or spec.two_passes is False:
        new = None
        missing.append("gradient of PPO's ratio: needs two forward passes: --two-passes")
    elif new == NEW:
        label = "PPO's new pass, with injected noise"
        passes.append(Planned.of(NEW, "ppo", "ratio", label, specs[NEW]))
    return GradientPlan(
        passes=tuple(passes),
        prompts=spec.gradient_prompts,
        seed=spec.seed,
        left=f"{spec.rollout.engine.engine}:decode",
        right=TRAIN,
        new=new,
        not_tested=tuple(missing),
    )


def memory_line(spec: CheckSpec) -> str:
    """What gradients need beside their passes, from the model's sizes; see ``require_room``."""
    from mismatch.models.config import find_config
    from mismatch.models.sizes import UnknownSize, sized
    from mismatch.run.machine import gib

    try:
        size = 4.0 * sized(find_config(spec.train.model, spec.train.revision)).parameters
    except UnknownSize as error:
        return f"  memory beside the passes' is not predicted: {error.message}"
    rank, host = gib(2.0 * size / spec.nproc_per_node), gib(len(LOSSES) * size)
    return (
        f"  memory beside the passes': {rank} per rank (a prompt's gradient and the batch's), "
        f"{host} of the host's (the reference's)"
    )


def _variants(spec: CheckSpec, context: Context | None) -> tuple[list[Variant], list[str]]:
    """Fixes of the trainer on the check's own tokens, and what is left out."""
    from mismatch.experiments.fixes.planning import plan_fixes
    from mismatch.experiments.fixes.spec_edits import context_of

    asked = spec if spec.fixes else replace(spec, fixes=NATURAL)
    planned = plan_fixes(asked, context or context_of(spec))
    here = [variant for variant in planned.variants if not variant.folder]
    there = [variant.id for variant in planned.variants if variant.folder]
    missing = []
    if there:
        missing.append(
            f"gradient of {', '.join(there)}: these sample tokens of their own; the gradients here "
            "are of one batch"
        )
    return here, missing


def _with_gradients(spec: TrainSpec) -> TrainSpec:
    # FSDP2 keeps a gradient in the dtype of its parameter at rest: float32, as frameworks do.
    master = "fp32" if spec.master_dtype == "auto" else spec.master_dtype
    return replace(spec, grad=True, routing=False, master_dtype=master)
