"""Gradients beside the float32 reference's: how long, and in what direction. Pure.

Sizes and directions are exact: squared norms and inner products of the whole batch's gradients.
Only where those cannot tell (two gradients nearer than 1e-5, whose squares cancel), and for
everything over prompts, sketches speak; see :mod:`mismatch.experiments.gradients.coefficients`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.experiments.gradients.coefficients import Sketched, cosine_of, exp, fisher
from mismatch.experiments.gradients.types import (
    ALL,
    LOSSES,
    PPO_OVERRIDE,
    PPO_RATIO,
    GradientBatch,
    GradientCheck,
    GradientRow,
    Gradients,
    GroupGradient,
    Loss,
    Trainer,
)
from mismatch.metrics.importance_weights import BY_ID, CORRECTIONS
from mismatch.metrics.inference import FEW_PROMPTS, jackknife
from mismatch.types import Bools, Check, Estimate, Floats

RATIO_LABELS = {
    PPO_RATIO: "PPO, old and new from two passes",
    PPO_OVERRIDE: "PPO, ratio 1 (override)",
}
KINDS = ("baseline", "fix", "correction", "ratio")
_WEIGHTS = [*(correction.id for correction in CORRECTIONS), PPO_RATIO, PPO_OVERRIDE]


def trainer_of(own: Gradients, batch: GradientBatch) -> Trainer:
    """The pass that it was taken of."""
    trainer = next((candidate for candidate in batch.trainers if candidate.name == own.name), None)
    return trainer or Trainer(own.name, own.name, "fix", own.name)


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


def same_as(own: Gradients, gradients: Iterable[Gradients], batch: GradientBatch) -> str:
    """Id of the row whose gradient it is by construction, "reference", or ""."""
    if not own.same_as:
        return ""
    name, _, coefficients = own.same_as.partition(" ")
    source = [g for g in gradients if (g.name, g.coefficients) == (name, coefficients)]
    return row_id(source[0], batch) if source else "reference"


def row_order(own: Gradients, batch: GradientBatch) -> tuple[int, int, int]:
    """Sorts rows: baseline, fixes and corrections in their own order, PPO last."""
    names = [trainer.name for trainer in batch.trainers]
    return (
        KINDS.index(kind(own, batch)) if kind(own, batch) in KINDS else len(KINDS),
        names.index(own.name) if own.name in names else len(names),
        _WEIGHTS.index(own.weight) if own.weight in _WEIGHTS else -1,
    )


CHECK = "gradients"
EXACT = 1e-10  # |g - ref|² / |ref|² below which float64 squares have lost it to cancellation


def check_gradients(gradients: Sequence[Gradients], batch: GradientBatch) -> GradientCheck:
    """Every gradient beside the reference's of the same loss.

    Args:
        gradients: as they were taken; the reference's without weight among them, for every loss.
        batch: what they were taken of, with the trainers' labels.

    Raises:
        EmptyComparison: no gradient beside the reference's, or a reference of 0: all advantages
            are equal.
        MismatchError: gradients of other prompts or groups than the reference's.
    """
    reference = next(trainer.name for trainer in batch.trainers if trainer.kind == "reference")
    first = {g.loss: g for g in gradients if g.name == reference and not g.weight}
    others = [g for g in gradients if g.name != reference]
    if not first or not others:
        why = "; ".join(batch.failed.values()) or "their passes did not come to an end"
        raise EmptyComparison(f"gradients: nothing to compare: {why}", "mismatch check --gradients")
    missing = [*batch.not_tested, *(f"gradients of {k}: {v}" for k, v in batch.failed.items())]
    rows: list[GradientRow] = []
    for loss in LOSSES:
        of_loss = sorted((g for g in others if g.loss == loss), key=lambda g: row_order(g, batch))
        if of_loss and loss in first:
            rows += _of_loss(loss, of_loss, first[loss], batch, missing)
    if not rows:
        raise EmptyComparison("gradients: no finite one to compare", "see the reasons beside it")
    return GradientCheck(
        reference=reference,
        prompts=len(batch.prompts),
        deciding=batch.deciding,
        sequences=batch.sequences,
        tokens=batch.tokens,
        advantages=batch.advantages,
        sketch_size=batch.sketch_size,
        clip=batch.clip,
        clipped=batch.clipped,
        rows=tuple(rows),
        not_tested=tuple(missing),
    )


def gradient_checks(check: GradientCheck | None) -> list[Check]:
    """Fail where a group of parameters gets no gradient in the trainer and one in the reference.

    Such a trainer can have all log-probabilities right: it never trains these parameters. No
    interval is needed, since a sum over a batch is 0 to the last bit only where nothing was added.
    """
    baseline = None if check is None else check.row("baseline", check.loss)
    if baseline is None:
        return []
    dead = [group.group for group in baseline.groups[1:] if group.silent]
    if not dead:
        return [Check(CHECK, "passed", "no group of parameters is without one")]
    detail = f"the trainer gives no gradient to: {', '.join(dead)}; the float32 reference does"
    fix = "a kernel that differentiates them, e.g. --attention eager; mismatch kernels tests one"
    return [Check(CHECK, "failed", detail, fix)]


@dataclass(frozen=True, slots=True)
class _Measure:
    """What all rows of one loss share.

    Attributes:
        prompts: [P] bool, those that have a gradient at all.
        size: of the whole reference, squared.
    """

    loss: Loss
    reference: Gradients
    batch: GradientBatch
    prompts: Bools
    size: float

    @classmethod
    def of(cls, loss: Loss, reference: Gradients, batch: GradientBatch) -> _Measure:
        size = float(reference.squared_norm.sum())
        if not math.isfinite(size) or size == 0.0:
            raise EmptyComparison(
                f"gradients: the reference's is {'0' if size == 0.0 else 'not finite'} "
                f"({loss}-level loss)",
                "samples of one prompt need different rewards: --task, or more --samples",
            )
        deciding = np.asarray(reference.sketches.any(axis=(1, 2)), np.bool_)
        return cls(loss, reference, batch, deciding, size)

    def sketched(self, own: Gradients, group: slice) -> Sketched:
        rows = self.prompts
        return Sketched.of(own.sketches[rows, group], self.reference.sketches[rows, group])

    def estimate(self, value: float, ends: tuple[float, float] | None) -> Estimate:
        prompts = int(self.prompts.sum())
        few = "one-prompt" if prompts < 2 else "few-prompts"
        flags = (few,) if prompts < FEW_PROMPTS else ()
        low, high = (None, None) if ends is None else (min(ends[0], value), max(ends[1], value))
        return Estimate(
            value, low, high, self.batch.tokens, self.batch.sequences, prompts, flags=flags
        )


def _of_loss(
    loss: Loss,
    gradients: Sequence[Gradients],
    reference: Gradients,
    batch: GradientBatch,
    missing: list[str],
) -> list[GradientRow]:
    measure = _Measure.of(loss, reference, batch)
    finite = [g for g in gradients if np.isfinite(g.squared_norm).all()]
    missing += [
        f"gradients of {g.name}, {g.coefficients}: not finite"
        for g in gradients
        if not np.isfinite(g.squared_norm).all()
    ]
    rows: list[GradientRow] = []
    for own in finite:
        _same_batch(own, reference)
        rows.append(
            GradientRow(
                id=row_id(own, batch),
                kind=kind(own, batch),
                loss=loss,
                label=label(own, batch),
                groups=tuple(_group(measure, own, name) for name in (ALL, *own.groups)),
                same_as=same_as(own, gradients, batch),
                seconds=own.seconds,
                peak_bytes=own.peak_bytes,
            )
        )
    return rows


def _group(measure: _Measure, own: Gradients, name: str) -> GroupGradient:
    at = None if name == ALL else own.groups.index(name)
    part = slice(None) if at is None else slice(at, at + 1)
    size = float(own.squared_norm[part].sum())
    reference = float(measure.reference.squared_norm[part].sum())
    if reference == 0.0:
        return GroupGradient(name, math.sqrt(size), None, None)
    sketched = measure.sketched(own, part)
    weights, ratio = sketched.weights, math.sqrt(size / reference)
    log = math.log(ratio) if ratio > 0.0 else -math.inf
    return GroupGradient(
        group=name,
        norm=math.sqrt(size),
        norm_ratio=measure.estimate(ratio, jackknife(sketched.log_norm(weights), log, exp)),
        cosine=None if size == 0.0 else _cosine(measure, own, part, sketched.gap(weights)),
    )


def _cosine(measure: _Measure, own: Gradients, part: slice, gaps: Floats) -> Estimate:
    assert own.dot is not None
    sizes = own.squared_norm[part].sum(), measure.reference.squared_norm[part].sum()
    gap = float(1.0 - own.dot[part].sum() / math.sqrt(sizes[0] * sizes[1]))
    gap = min(gap, 2.0) if gap > EXACT else float(gaps[0])
    z = fisher(np.array([gap]))[0]
    return measure.estimate(1.0 - gap, jackknife(fisher(gaps), float(z), cosine_of))


def _same_batch(own: Gradients, reference: Gradients) -> None:
    same = own.groups == reference.groups and np.array_equal(own.prompts, reference.prompts)
    if not same or own.sketches.shape != reference.sketches.shape or own.dot is None:
        raise MismatchError(
            f"gradients: {own.name} was taken of another batch or model than {reference.name}",
            "take them again: mismatch check --gradients without --resume",
        )
