"""What a gradient is called: id, kind, label and place of its row. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from mismatch.experiments.gradients.types import (
    PPO_OVERRIDE,
    PPO_RATIO,
    GradientBatch,
    Gradients,
    Trainer,
)
from mismatch.metrics.corrections import BY_ID, CORRECTIONS

RATIO_LABELS = {
    PPO_RATIO: "PPO, old and new from two passes",
    PPO_OVERRIDE: "PPO, ratio 1 (override)",
}
KINDS = ("baseline", "fix", "correction", "ratio")
_WEIGHTS = [*(one.id for one in CORRECTIONS), PPO_RATIO, PPO_OVERRIDE]


def trainer_of(own: Gradients, batch: GradientBatch) -> Trainer:
    """The pass that it was taken of."""
    found = next((one for one in batch.trainers if one.name == own.name), None)
    return found or Trainer(own.name, own.name, "fix", own.name)


def row_id(own: Gradients, batch: GradientBatch) -> str:
    """``baseline``, a fix's id, a correction's id, PPO's."""
    trainer = trainer_of(own, batch)
    if not own.weight:
        return trainer.id
    return own.weight if trainer.kind in ("baseline", "ratio") else f"{trainer.id}+{own.weight}"


def kind(own: Gradients, batch: GradientBatch) -> str:
    """One of :data:`KINDS`."""
    if own.weight in RATIO_LABELS:
        return "ratio"
    return "correction" if own.weight else trainer_of(own, batch).kind


def label(own: Gradients, batch: GradientBatch) -> str:
    """The row in words."""
    if not own.weight:
        return trainer_of(own, batch).label
    if own.weight in BY_ID:
        return BY_ID[own.weight].label
    return RATIO_LABELS.get(own.weight, own.weight)


def same_as(own: Gradients, known: Iterable[Gradients], batch: GradientBatch) -> str:
    """Id of the row whose gradient it is by construction, "reference", or ""."""
    if not own.same_as:
        return ""
    name, _, coefficients = own.same_as.partition(" ")
    source = [one for one in known if (one.name, one.coefficients) == (name, coefficients)]
    return row_id(source[0], batch) if source else "reference"


def place(own: Gradients, batch: GradientBatch) -> tuple[int, int, int]:
    """Sorts rows: baseline, fixes and corrections in their own order, PPO last."""
    names = [one.name for one in batch.trainers]
    return (
        KINDS.index(kind(own, batch)) if kind(own, batch) in KINDS else len(KINDS),
        names.index(own.name) if own.name in names else len(names),
        _WEIGHTS.index(own.weight) if own.weight in _WEIGHTS else -1,
    )
