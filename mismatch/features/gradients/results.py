"""Gradients compared with the float32 reference's: how long, and in what direction. Pure.

Norms and inner products are of the whole batch's gradient, summed in float64, so that they hold
exactly for this batch. Angles below 0.001° are lost to the cancellation of squares. What another
batch would give is not known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from mismatch.codec import from_json
from mismatch.errors import EmptyComparison
from mismatch.features.gradients.plan import BASELINE, REFERENCE, Batch, GradientPlan
from mismatch.run import store
from mismatch.specs import CheckSpec
from mismatch.types import Check

ID = "gradients"
FILE, SCHEMA = "gradients.json", "mismatch.gradients/3"
ALL = "all"


# Group of parameters -> squared norm of its gradient, and inner product with the reference's.
Sums = dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Taken:
    """What the training world leaves: sums by id of the pass, or why it has no gradient."""

    sums: dict[str, Sums]
    failed: dict[str, str]


@dataclass(frozen=True, slots=True)
class GroupGradient:
    """One parameter group's gradient compared with the float32 reference's.

    Attributes:
        norm: 2-norm of the batch's gradient.
        norm_ratio: over the reference's; None where the reference has none.
        cosine: to the reference's; None where one of the two is 0, which has no direction.
    """

    group: str
    norm: float
    norm_ratio: float | None
    cosine: float | None

    @property
    def silent(self) -> bool:
        """Whether there is no gradient where the reference has one."""
        return self.norm == 0.0 and self.norm_ratio is not None


@dataclass(frozen=True, slots=True)
class GradientRow:
    """One trainer compared with the reference.

    Attributes:
        id: "baseline" or a fix's id.
        groups: the first is :data:`ALL`.
    """

    id: str
    label: str
    groups: tuple[GroupGradient, ...]

    @property
    def whole(self) -> GroupGradient:
        """All parameters together."""
        return self.groups[0]


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """Every row, and what they rest on.

    Attributes:
        prompts, sequences, tokens: of the batch; its samples and their action tokens.
        deciding: how many prompts have samples of different reward; the others have no gradient.
        advantages: "rewards" (group-normalised), or how they were made where rewards do not differ.
        same: fix -> the row, or "reference", whose gradient it has by construction.
        not_tested: one sentence each.
    """

    prompts: int
    deciding: int
    sequences: int
    tokens: int
    advantages: str
    rows: tuple[GradientRow, ...]
    same: dict[str, str]
    not_tested: tuple[str, ...]

    def row(self, id: str) -> GradientRow | None:
        """Return one row, or None where it was not measured."""
        return next((row for row in self.rows if row.id == id), None)


def compare_gradients(taken: Taken, plan: GradientPlan, batch: Batch) -> GradientCheck:
    """Compare every gradient with the reference's.

    Raises:
        EmptyComparison: no gradient but the reference's, or a reference of 0: all advantages
            are equal.
    """
    reference = taken.sums.get(REFERENCE)
    if reference is None or len(taken.sums) == 1:
        why = "; ".join(taken.failed.values())
        raise EmptyComparison(f"gradients: nothing to compare: {why}", "see logs/gradients.log")
    if not sum(squared for squared, _ in reference.values()):
        fault = "gradients: the reference's is 0"
        fix = "samples of one prompt need different rewards: --task, or more --samples"
        raise EmptyComparison(fault, fix)
    rows = []
    for planned in plan.passes[1:]:
        if planned.id in taken.sums:
            own = taken.sums[planned.id]
            groups = [_group(name, own[name], reference[name][0]) for name in own]
            squared, dot = map(sum, zip(*own.values(), strict=True))
            whole = _group(ALL, (squared, dot), sum(each for each, _ in reference.values()))
            rows.append(GradientRow(planned.id, planned.label, (whole, *groups)))
    failed = tuple(f"gradient of {id}: {reason}" for id, reason in taken.failed.items())
    return GradientCheck(
        prompts=len(batch.prompts),
        deciding=batch.deciding,
        sequences=batch.sequences,
        tokens=batch.tokens,
        advantages=batch.advantages,
        rows=tuple(rows),
        same=plan.same,
        not_tested=(*plan.not_tested, *failed),
    )


def _group(name: str, own: tuple[float, float], theirs: float) -> GroupGradient:
    squared, dot = own
    if theirs == 0.0:
        return GroupGradient(name, math.sqrt(squared), None, None)
    cosine = dot / math.sqrt(squared * theirs) if squared else None
    return GroupGradient(
        group=name,
        norm=math.sqrt(squared),
        norm_ratio=math.sqrt(squared / theirs),
        cosine=None if cosine is None else max(-1.0, min(1.0, cosine)),
    )


def gradient_checks(check: GradientCheck) -> tuple[Check, ...]:
    """Fail where a group of parameters gets no gradient in the trainer and one in the reference.

    This trainer can have all log-probabilities right: it never trains these parameters. No
    interval is needed, since a sum over a batch is 0 to the last bit only where nothing was added.
    """
    baseline = check.row(BASELINE)
    if baseline is None:
        return ()
    dead = [group.group for group in baseline.groups[1:] if group.silent]
    if not dead:
        return (Check(ID, "passed", "no group of parameters is without one"),)
    detail = f"the trainer gives no gradient to: {', '.join(dead)}; the float32 reference does"
    fix = "a kernel that differentiates them, e.g. --attention eager; mismatch kernels tests one"
    return (Check(ID, "failed", detail, fix),)


def of_run(run_dir: Path, spec: CheckSpec) -> GradientCheck | None:
    """Return what a check left in its run directory; None where it took no gradient.

    Raises:
        MismatchError: it is damaged.
    """
    if not (run_dir / FILE).exists():
        return None
    return from_json(GradientCheck, store.load_document(run_dir, FILE)[ID])
