"""Which fixes are tried, each as a separate spec, and what they can share. Pure.

A variant that leaves the rollout as it is needs one more pass of the trainer over the same tokens;
one that changes the engine needs new tokens, in a directory under ``RUN/fixes``, which
variants with the same engine share.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from mismatch.errors import MismatchError
from mismatch.experiments.fixes.applies import reason_against
from mismatch.experiments.fixes.base import Fix
from mismatch.experiments.fixes.catalogue import FIXES, chosen_of
from mismatch.experiments.fixes.context import Context
from mismatch.experiments.results import FixOutcome
from mismatch.experiments.scoring_passes import training_passes
from mismatch.keys import FIX, FLOAT32, TRAIN, TRAINER_FLOAT32, TRAINER_LONG, Key
from mismatch.models.moe import require_routes
from mismatch.specs import CheckSpec, Pass

ALL = "all"
SIDES = ("train", "engine", "estimator")
# Each alone is half a fix.
NATURAL = ("fp32+engine-fp32", "fp16+engine-fp16", "fp32-lm-head+engine-fp32-lm-head")
PAIRED_SINGLES = 4  # pairs are made of the best so many
DIRECTORY = "fixes"  # inside the run
# Rows whose settings show the trainer's function, and those that are made where it changes.
FUNCTIONS = {TRAINER_FLOAT32: (TRAINER_FLOAT32,), TRAINER_LONG: (TRAINER_LONG, TRAIN.over_long())}


@dataclass(frozen=True, slots=True)
class Variant:
    """One thing to measure."""

    chosen: tuple[Fix, ...]
    spec: CheckSpec
    """The whole check with it, without fixes."""
    folder: str
    """Of its rollout inside the run; "" is the run's own."""

    @property
    def id(self) -> str:
        return "+".join(item.label for item in self.chosen)

    @property
    def key(self) -> Key:
        """Of the trainer's pass as it runs with it."""
        return Key.of(FIX, self.id)

    def passes(self, run: CheckSpec) -> list[Pass]:
        """Return the trainer's rows of a check with it, by its name: as it runs, then the others.

        Left out are rows that the run's own show as well: a fix of precision or grouping leaves the
        function of the trainer as it is. Other tokens are scored once, as the trainer runs.
        """
        passes = [Pass(self.key, self.spec.train, self.folder, "any")]
        if self.folder:
            return passes
        own = {row.name: row.spec for row in training_passes(run)}
        made = {row.name: row for row in training_passes(self.spec)}
        for function, names in FUNCTIONS.items():
            if function not in made:
                continue
            spec = replace(made[function].spec, micro_batch_tokens=run.train.micro_batch_tokens)
            if spec != own.get(function):
                keys = [(name, Key.of(FIX, self.id, name.precision, name.tokens)) for name in names]
                passes += [replace(made[name], name=key) for name, key in keys if name in made]
        return passes

    def outcome(self, reason: str = "", *, applies: bool = True) -> FixOutcome:
        """Return a row without numbers."""
        sides = {item.side for item in self.chosen}
        return FixOutcome(
            id=self.id,
            side=sides.pop() if len(sides) == 1 else "both",
            summary="; ".join(item.summary for item in self.chosen),
            flags=" ".join(str(item.flags) for item in self.chosen),
            applies=applies,
            reason=reason,
        )


@dataclass(frozen=True, slots=True)
class FixPlan:
    """What is going to be tried."""

    variants: tuple[Variant, ...] = ()
    """In the order that they are measured in."""
    refused: tuple[FixOutcome, ...] = ()
    """Rows of what does not apply, with the reason."""
    estimators: tuple[Fix, ...] = ()
    """Corrections to list."""
    pairs: bool = False
    """Pairs of those that help are tried afterwards."""

    def lines(self, run: CheckSpec) -> list[str]:
        """Return the plan in words."""
        count, budget_minutes = len(self.variants), run.budget_minutes
        keys = [Key(pass_.name) for each in self.variants for pass_ in each.passes(run)]
        exact = sum(key.precision == FLOAT32 and not key.tokens for key in keys)
        engines = len({variant.folder for variant in self.variants} - {""})
        lines = [
            f"fixes: {count} variant{'s' * (count != 1)} to measure: "
            f"{count} pass{'es' * (count != 1)} of the trainer in the check's own world "
            f"and {exact} in float32, "
            f"{engines} further start{'s' * (engines != 1)} of the engine"
        ]
        if self.variants:
            lines.append(f"  {', '.join(variant.id for variant in self.variants)}")
        lines += [f"  not tried: {row.id}: {row.reason}" for row in self.refused]
        if self.pairs:
            lines.append(f"  then pairs of the best {PAIRED_SINGLES} that help significantly")
        if budget_minutes is not None:
            lines.append(f"  at most {budget_minutes:g} minutes beyond the check itself")
        return lines


def parse_requests(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the requests of ``--fix`` as typed; each is checked.

    >>> parse_requests(["fp32, router-replay=ids+weights+fp32-router"])
    ('fp32', 'router-replay=ids+weights+fp32-router')

    Raises:
        MismatchError: no such fix, a value that means nothing or for a fix that takes none, an
            estimator fix combined.
    """
    requests = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    for request in requests:
        if request in (ALL, *SIDES):
            continue
        chosen = chosen_of(request)
        with_all(chosen, CheckSpec())  # a value that means nothing is refused before a run exists
        if len(chosen) > 1 and any(item.side == "estimator" for item in chosen):
            raise MismatchError(
                f"--fix {request}: a fix of the estimator changes no log-probability",
                "ask for it by itself",
            )
    return tuple(dict.fromkeys(requests))


def plan_fixes(spec: CheckSpec, context: Context, known: Sequence[Variant] = ()) -> FixPlan:
    """Return the variants that a spec's ``fixes`` ask for.

    Args:
        known: what is measured already; nothing is planned twice.

    Raises:
        MismatchError: see :func:`parse_requests`.
    """
    wanted: list[tuple[Fix, ...]] = []
    for request in spec.fixes:
        if request not in (ALL, *SIDES):
            wanted.append(chosen_of(request))
            continue
        fixes = [fix for fix in FIXES if request in (ALL, fix.side)]
        wanted += [(fix.taking(value),) for fix in fixes for value in fix.values or ("",)]
        wanted += map(chosen_of, NATURAL if request == ALL else ())
    builder = Builder(spec, context, known)
    estimators: dict[str, Fix] = {}
    for chosen in wanted:
        if chosen[0].side == "estimator":
            estimators[chosen[0].id] = chosen[0]
        else:
            builder.add(chosen)
    return FixPlan(
        variants=tuple(sorted(builder.variants[len(known) :], key=lambda each: bool(each.folder))),
        refused=tuple(builder.refused.values()),
        estimators=tuple(estimators.values()),
        pairs=ALL in spec.fixes,
    )


def pairs_of(best: Sequence[str]) -> tuple[str, ...]:
    """Return requests for pairs of the best fixes, which are given best first.

    >>> pairs_of(["fp32", "micro-batch=64", "micro-batch=128"])
    ('fp32+micro-batch=64', 'fp32+micro-batch=128')
    """
    pairs = combinations(best[:PAIRED_SINGLES], 2)
    return tuple(f"{a}+{b}" for a, b in pairs if a.partition("=")[0] != b.partition("=")[0])


class Builder:
    """Variants of one check, each spec once, and rows of what cannot be tried."""

    def __init__(self, spec: CheckSpec, context: Context, known: Sequence[Variant] = ()) -> None:
        self.base = bare(spec)
        self.context = context
        self.variants = list(known)
        self.refused: dict[str, FixOutcome] = {}

    def add(self, chosen: tuple[Fix, ...]) -> Variant | None:
        """Return the new variant of these fixes; None where it is there, or cannot be tried."""
        changed = with_all(chosen, self.base)
        folder = ""
        if changed.rollout != self.base.rollout:
            label = "+".join(item.label for item in chosen if item.side == "engine")
            folder = f"{DIRECTORY}/{re.sub(r'[^A-Za-z0-9.=+-]', '_', label)}"
            shared = [v.folder for v in self.variants if v.spec.rollout == changed.rollout]
            folder = shared[0] if shared else folder
        variant = Variant(chosen, changed, folder)
        if variant.id in {earlier.id for earlier in self.variants}:
            return None
        if reason := self._reason_against(variant):
            self.refused.setdefault(variant.id, variant.outcome(reason, applies=False))
            return None
        self.variants.append(variant)
        return variant

    def _reason_against(self, variant: Variant) -> str:
        for item in variant.chosen:
            if reason := reason_against(item.needs, self.context):
                return f"{item.label}: {reason}" if len(variant.chosen) > 1 else reason
        if variant.spec == self.base:
            return "this is how the check runs already"
        if with_all(variant.chosen[::-1], self.base) != variant.spec:
            return "these set the same thing to different values"
        for earlier in self.variants:
            if earlier.spec == variant.spec:
                return f"the same as {earlier.id}"
        try:
            require_routes(variant.spec)
        except MismatchError as error:
            return error.message
        return ""


def bare(spec: CheckSpec) -> CheckSpec:
    """Return the check without its fixes."""
    return replace(spec, fixes=(), budget_minutes=None, verdict="as-is")


def with_all(chosen: Iterable[Fix], spec: CheckSpec) -> CheckSpec:
    """Return the check with all of these fixes."""
    for item in chosen:
        spec = item.apply(spec)
    return spec
