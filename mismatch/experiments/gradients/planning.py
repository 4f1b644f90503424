"""Which passes take a gradient, and of what. Pure.

``--gradients`` alone takes those of the trainer, of the float32 reference, and of the fixes of the
trainer that are worth a gradient; with ``--fix`` it takes those of the fixes that are measured.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from mismatch.codec import from_json
from mismatch.experiments.gradients.coefficients import Batch, choose_batch, normalised
from mismatch.experiments.gradients.types import Trainer
from mismatch.specs import CheckSpec, Pass, TrainSpec, weights_key
from mismatch.types import Floats, Rollout

if TYPE_CHECKING:
    from mismatch.experiments.fixes.context import Context
    from mismatch.experiments.fixes.planning import Variant


@dataclass(frozen=True)
class GradientSchedule:
    """All gradients of a plan, with their coefficients."""

    batch: Batch
    coefficients: Floats
    """[A] of every action token, the same for all passes."""
    passes: tuple[Planned, ...]
    """The reference first; passes with the same weights next to each other."""
    same_as: dict[str, str]
    """Name of a pass -> the earlier pass of equal settings, whose gradient it has."""

    @classmethod
    def of(cls, rollout: Rollout, plan: GradientPlan) -> GradientSchedule:
        """Schedule a plan's gradients on the tokens of a rollout.

        Raises:
            MismatchError: no prompt, or no action token.
        """
        batch = choose_batch(rollout, plan.prompts, plan.seed)
        sequence = rollout.sequence_of_token[rollout.actions]
        passes, same_as = in_order(plan)
        return cls(batch, normalised(batch, sequence, "token"), passes, same_as)


def in_order(plan: GradientPlan) -> tuple[tuple[Planned, ...], dict[str, str]]:
    """Return the passes in the order that they run, and those that equal an earlier one."""
    first: dict[Any, int] = {}
    for number, planned in enumerate(plan.passes):
        first.setdefault(weights_key(planned.spec), number)
    passes = tuple(sorted(plan.passes, key=lambda each: first[weights_key(each.spec)]))
    taken: dict[TrainSpec, str] = {}
    same_as = {}
    for planned in passes:
        source = taken.setdefault(planned.spec, planned.trainer.name)
        if source != planned.trainer.name:
            same_as[planned.trainer.name] = source
    return passes, same_as


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
        not_tested: one sentence each.
    """

    passes: tuple[Planned, ...]
    prompts: int
    seed: int
    not_tested: tuple[str, ...] = ()

    @property
    def made_by(self) -> str:
        """Twelve hex digits that change with anything in the plan."""
        text = json.dumps(self.to_json(), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def lines(self) -> list[str]:
        """The plan in words."""
        names = ", ".join(planned.trainer.id for planned in self.passes)
        return [
            f"gradients: of one batch of at most {self.prompts} prompts, in the check's own world",
            f"  {names}",
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
    from mismatch.experiments.scoring_passes import reference_of
    from mismatch.run.store import REFERENCE, TRAIN

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
    return GradientPlan(
        passes=tuple(passes),
        prompts=spec.gradient_prompts,
        seed=spec.seed,
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
    rank, host = gib(2.0 * size / spec.nproc_per_node), gib(size)
    return (
        f"  memory beside the passes': {rank} per rank (a prompt's gradient and the batch's), "
        f"{host} of the host's (the reference's)"
    )


def _variants(spec: CheckSpec, context: Context | None) -> tuple[list[Variant], list[str]]:
    """Fixes of the trainer on the check's own tokens, and what is left out."""
    from mismatch.experiments.fixes.context import context_of
    from mismatch.experiments.fixes.planning import plan_fixes

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
