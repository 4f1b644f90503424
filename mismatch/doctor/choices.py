"""What each way of running the experts would need on this machine, and the one that is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mismatch.doctor.experts import IMPLEMENTATIONS, backward_bytes, forward_bytes
from mismatch.doctor.memory import BYTES, Work, predict_trainer
from mismatch.models.config import ModelConfig
from mismatch.run.machine import gib
from mismatch.specs import Pass, TrainSpec

COPIES = "batched_mm"


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """One experts implementation; bytes.

    Attributes:
        peak_bytes: predicted for one rank of this run's training world, the highest of the passes
            that run the experts in the chosen way.
        token_bytes: what one more token in a micro-batch adds in a layer's experts.
        backward_bytes: of one layer's experts in a trainer's forward and backward pass, beyond
            weights and their gradient; this run has no backward pass.
    """

    name: str
    peak_bytes: int
    token_bytes: int
    backward_bytes: int
    chosen: bool


def expert_choices(
    shape: ModelConfig, passes: Sequence[Pass], world: int, work: Work, device: str
) -> tuple[ExpertChoice, ...]:
    """Every implementation in place of the chosen one, in this run; () for a dense model."""
    if not shape.experts:
        return ()
    spec = passes[0].spec
    chosen = "grouped_mm" if spec.experts == "auto" else spec.experts  # transformers' own choice
    rows, longest = work.largest_batch(spec)
    tokens, b = rows * longest, BYTES[spec.autocast or spec.dtype]
    same = [item for item in passes if item.spec.experts == spec.experts]

    def peak(changed: TrainSpec) -> int:
        return predict_trainer(shape, changed, world, work, device).peak_bytes

    return tuple(
        ExpertChoice(
            name,
            max(peak(replace(item.spec, experts=name)) for item in same),
            forward_bytes(shape, name, tokens + 1, b) - forward_bytes(shape, name, tokens, b),
            backward_bytes(shape, name, tokens, b),
            name == chosen,
        )
        for name in IMPLEMENTATIONS
    )


def expert_warnings(choices: Sequence[ExpertChoice]) -> tuple[str, ...]:
    """The blow-up of copied weights, before it happens."""
    by_name = {choice.name: choice for choice in choices}
    if not choices or not by_name[COPIES].chosen:
        return ()
    copies, bounded = by_name[COPIES], by_name["bounded"]
    return (
        f"{COPIES} experts copy {copies.token_bytes / 1e6:,.1f} MB of weights for every token of a "
        f"micro-batch: {gib(copies.peak_bytes)} at the highest. --experts-implementation bounded "
        f"needs {gib(bounded.peak_bytes)}, with the numbers of eager",
    )
