"""Gradients beside the float32 reference's: how long, and in what direction. Pure.

Sizes and directions are exact: squared norms and inner products of the whole batch's gradients.
Only where those cannot tell (two gradients nearer than 1e-5, whose squares cancel), and for
everything over prompts, sketches speak; see :mod:`mismatch.experiments.gradients.coefficients`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.experiments.gradients.coefficients import Sketched, cosine_of, exp, fisher
from mismatch.experiments.gradients.types import (
    ALL,
    GradientBatch,
    GradientCheck,
    GradientRow,
    Gradients,
    GroupGradient,
)
from mismatch.metrics.inference import FEW_PROMPTS, jackknife
from mismatch.types import Bools, Check, Estimate, Floats

CHECK = "gradients"
EXACT = 1e-10  # |g - ref|² / |ref|² below which float64 squares have lost it to cancellation


def check_gradients(gradients: Sequence[Gradients], batch: GradientBatch) -> GradientCheck:
    """Compare every gradient with the reference's.

    Args:
        gradients: as they were taken, the reference's among them.
        batch: what they were taken of, with the trainers' labels.

    Raises:
        EmptyComparison: no gradient beside the reference's, or a reference of 0: all advantages
            are equal.
        MismatchError: gradients of other prompts or groups than the reference's.
    """
    trainers = {trainer.name: trainer for trainer in batch.trainers}
    reference = next(trainer.name for trainer in batch.trainers if trainer.kind == "reference")
    first = next((g for g in gradients if g.name == reference), None)
    others = [g for g in gradients if g.name != reference]
    if first is None or not others:
        why = "; ".join(batch.failed.values()) or "their passes did not come to an end"
        raise EmptyComparison(f"gradients: nothing to compare: {why}", "mismatch check --gradients")
    missing = [*batch.not_tested, *(f"gradients of {k}: {v}" for k, v in batch.failed.items())]
    measure = _Measure.of(first, batch)
    rows: list[GradientRow] = []
    for name, trainer in trainers.items():
        own = next((g for g in others if g.name == name), None)
        if own is None:
            continue
        if not np.isfinite(own.squared_norm).all():
            missing.append(f"gradients of {name}: not finite")
            continue
        _same_batch(own, first)
        rows.append(
            GradientRow(
                id=trainer.id,
                kind=trainer.kind,
                label=trainer.label,
                groups=tuple(_group(measure, own, group) for group in (ALL, *own.groups)),
                same_as=trainers[own.same_as].id if own.same_as else "",
                seconds=own.seconds,
                peak_bytes=own.peak_bytes,
            )
        )
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
        rows=tuple(rows),
        not_tested=tuple(missing),
    )


def gradient_checks(check: GradientCheck | None) -> list[Check]:
    """Fail where a group of parameters gets no gradient in the trainer and one in the reference.

    Such a trainer can have all log-probabilities right: it never trains these parameters. No
    interval is needed, since a sum over a batch is 0 to the last bit only where nothing was added.
    """
    baseline = None if check is None else check.row("baseline")
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
    """What all rows share.

    Attributes:
        prompts: [P] bool, those that have a gradient at all.
        size: of the whole reference, squared.
    """

    reference: Gradients
    batch: GradientBatch
    prompts: Bools
    size: float

    @classmethod
    def of(cls, reference: Gradients, batch: GradientBatch) -> _Measure:
        size = float(reference.squared_norm.sum())
        if not math.isfinite(size) or size == 0.0:
            raise EmptyComparison(
                f"gradients: the reference's is {'0' if size == 0.0 else 'not finite'}",
                "samples of one prompt need different rewards: --task, or more --samples",
            )
        deciding = np.asarray(reference.sketches.any(axis=(1, 2)), np.bool_)
        return cls(reference, batch, deciding, size)

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
