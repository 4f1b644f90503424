"""Which fixes are tried, each as a spec of its own, and what they can share. Pure.

A variant that leaves the rollout as it is needs one more pass of the trainer over the same tokens;
one that changes the engine needs tokens of its own, in a directory under ``RUN/fixes``, which
variants with the same engine share.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from mismatch.errors import MismatchError
from mismatch.experiments.fixes.base import Chosen, Context, Fix, FixOutcome
from mismatch.experiments.fixes.catalogue import FIXES, fix_named, labels
from mismatch.models.moe import require_routes
from mismatch.run.store import FIX_PREFIX
from mismatch.specs import CheckSpec, Pass

ALL = "all"
SIDES = ("train", "engine", "estimator")
# Each alone is half a fix.
NATURAL = ("fp32+engine-fp32", "fp16+engine-fp16", "fp32-lm-head+engine-fp32-lm-head")
PAIRED_SINGLES = 4  # pairs are made of the best so many
DIRECTORY = "fixes"  # inside the run


@dataclass(frozen=True, slots=True)
class Variant:
    """One thing to measure.

    Attributes:
        spec: the whole check with it, without fixes of its own.
        folder: of its rollout inside the run; "" is the run's own.
    """

    chosen: tuple[Chosen, ...]
    spec: CheckSpec
    folder: str

    @property
    def id(self) -> str:
        return "+".join(item.label for item in self.chosen)

    @property
    def side(self) -> str:
        sides = {item.fix.side for item in self.chosen}
        return sides.pop() if len(sides) == 1 else "both"

    @property
    def scoring(self) -> Pass:
        """The trainer's pass, by the name that it is saved under."""
        return Pass(f"{FIX_PREFIX}{self.id}", self.spec.train)

    def outcome(self, reason: str = "", *, applies: bool = True) -> FixOutcome:
        """A row without numbers."""
        return FixOutcome(
            id=self.id,
            side=self.side,
            summary="; ".join(item.fix.summary for item in self.chosen),
            flags=" ".join(str(item.flags) for item in self.chosen),
            applies=applies,
            reason=reason,
        )


@dataclass(frozen=True, slots=True)
class FixPlan:
    """What is going to be tried.

    Attributes:
        variants: in the order that they are measured in.
        refused: rows of what does not apply, with the reason.
        estimators: corrections to list.
        pairs: pairs of those that help are tried afterwards.
    """

    variants: tuple[Variant, ...]
    refused: tuple[FixOutcome, ...]
    estimators: tuple[Fix, ...]
    pairs: bool

    @property
    def engines(self) -> tuple[Variant, ...]:
        """One variant for every rollout that has to be sampled."""
        first: dict[str, Variant] = {}
        for variant in self.variants:
            if variant.folder:
                first.setdefault(variant.folder, variant)
        return tuple(first.values())

    def lines(self, budget_minutes: float | None) -> list[str]:
        """The plan in words."""
        engines = len(self.engines)
        text = (
            f"fixes: {_count(len(self.variants), 'variant')} to measure: "
            f"{_count(len(self.variants), 'pass', 'passes')} of the trainer in the check's own "
            f"world, {_count(engines, 'further start')} of the engine"
        )
        lines = [text]
        if self.variants:
            lines.append(f"  {', '.join(variant.id for variant in self.variants)}")
        lines += [f"  not tried: {row.id}: {row.reason}" for row in self.refused]
        if self.pairs:
            lines.append(f"  then pairs of the best {PAIRED_SINGLES} that help significantly")
        if budget_minutes is not None:
            lines.append(f"  at most {budget_minutes:g} minutes beyond the check itself")
        return lines


def parse_requests(texts: Iterable[str]) -> tuple[str, ...]:
    """``--fix`` as typed, to requests; each is checked.

    >>> parse_requests(["fp32, router-replay=ids+weights+fp32-router"])
    ('fp32', 'router-replay=ids+weights+fp32-router')

    Raises:
        MismatchError: no such fix, a value that means nothing or for a fix that takes none, an
            estimator fix combined.
    """
    requests = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    for request in requests:
        if request not in (ALL, *SIDES):
            chosen = chosen_of(request)
            for item in chosen:
                item.apply(CheckSpec())  # a value that means nothing is refused before a run exists
            sides = [item.fix.side for item in chosen]
            if len(chosen) > 1 and "estimator" in sides:
                raise MismatchError(
                    f"--fix {request}: a fix of the estimator changes no log-probability",
                    "ask for it by itself",
                )
    return tuple(dict.fromkeys(requests))


def chosen_of(request: str) -> tuple[Chosen, ...]:
    """The fixes of one request, each with its value.

    Raises:
        MismatchError: see :func:`parse_requests`.
    """
    chosen = []
    for part in labels(request):
        name, equals, value = part.strip().partition("=")
        fix = fix_named(name)
        if equals and not fix.values:
            raise MismatchError(f"--fix {part}: {name} takes no value", f"--fix {name}")
        chosen.append(Chosen(fix, value or (fix.values[0] if fix.values else "")))
    return tuple(chosen)


def plan_fixes(spec: CheckSpec, context: Context) -> FixPlan:
    """Expand what a spec's ``fixes`` ask for into variants.

    Raises:
        MismatchError: see :func:`parse_requests`.
    """
    wanted: list[tuple[Chosen, ...]] = []
    estimators: list[Fix] = []
    for request in spec.fixes:
        for chosen in _expanded(request):
            if chosen[0].fix.side == "estimator":
                estimators.append(chosen[0].fix)
            else:
                wanted.append(chosen)
    builder = Builder(spec, context)
    for chosen in dict.fromkeys(wanted):
        builder.add(chosen)
    return FixPlan(
        variants=tuple(sorted(builder.variants, key=lambda variant: bool(variant.folder))),
        refused=tuple(builder.refused),
        estimators=tuple(dict.fromkeys(estimators)),
        pairs=ALL in spec.fixes,
    )


def plan_pairs(
    spec: CheckSpec, context: Context, variants: Sequence[Variant], best: Sequence[str]
) -> tuple[list[Variant], list[str]]:
    """Pairs of the fixes that help, best first, and what is left out.

    Args:
        variants: what was measured already.
        best: ids of the single fixes that help significantly, best first.
    """
    builder = Builder(spec, context, list(variants))
    singles = {variant.id: variant for variant in variants if len(variant.chosen) == 1}
    used, more = best[:PAIRED_SINGLES], best[PAIRED_SINGLES:]
    for first, second in combinations(used, 2):
        chosen = (*singles[first].chosen, *singles[second].chosen)
        if chosen[0].fix.id != chosen[1].fix.id:
            builder.add(chosen)
    left = [f"pairs with {', '.join(more)}: only the best {PAIRED_SINGLES} are paired"]
    return builder.variants[len(variants) :], left if more else []


class Builder:
    """Variants of one check, each spec once."""

    def __init__(
        self, spec: CheckSpec, context: Context, variants: list[Variant] | None = None
    ) -> None:
        self.base = bare(spec)
        self.context = context
        self.variants = variants or []
        self.refused: list[FixOutcome] = []

    def add(self, chosen: tuple[Chosen, ...]) -> None:
        """Make a variant of these fixes, or a row that says why not."""
        changed = self.base
        reason = next((text for item in chosen if (text := self._unfit(item, len(chosen)))), "")
        if not reason:
            for item in chosen:
                changed = item.apply(changed)
            reason = self._pointless(changed, chosen)
        variant = Variant(chosen, changed, self._folder(changed, chosen))
        if variant.id in [earlier.id for earlier in self.variants]:
            return
        if reason:
            self.refused.append(variant.outcome(reason, applies=False))
        else:
            self.variants.append(variant)

    def _unfit(self, item: Chosen, of: int) -> str:
        reason = item.fix.applies(self.context)
        return f"{item.label}: {reason}" if reason and of > 1 else reason

    def _pointless(self, changed: CheckSpec, chosen: tuple[Chosen, ...]) -> str:
        if changed == self.base:
            return "this is how the check runs already"
        if len(chosen) > 1 and conflict(self.base, chosen):
            return "these set the same thing to different values"
        same = next((variant.id for variant in self.variants if variant.spec == changed), None)
        if same is not None and same != "+".join(item.label for item in chosen):
            return f"the same as {same}"
        try:
            require_routes(changed)
        except MismatchError as error:
            return error.message
        return ""

    def _folder(self, changed: CheckSpec, chosen: tuple[Chosen, ...]) -> str:
        if changed.rollout == self.base.rollout:
            return ""
        for variant in self.variants:
            if variant.spec.rollout == changed.rollout:
                return variant.folder
        label = "+".join(item.label for item in chosen if item.fix.side == "engine")
        return f"{DIRECTORY}/{re.sub(r'[^A-Za-z0-9.=+-]', '_', label)}"


def bare(spec: CheckSpec) -> CheckSpec:
    """The check without its fixes."""
    return replace(spec, fixes=(), budget_minutes=None, verdict="as-is")


def conflict(spec: CheckSpec, chosen: tuple[Chosen, ...]) -> bool:
    """Whether the order of these fixes makes a difference: they set the same thing."""
    forward = backward = bare(spec)
    for item in chosen:
        forward = item.apply(forward)
    for item in reversed(chosen):
        backward = item.apply(backward)
    return forward != backward


def _expanded(request: str) -> list[tuple[Chosen, ...]]:
    if request not in (ALL, *SIDES):
        return [chosen_of(request)]
    singles = [
        (Chosen(fix, value),)
        for fix in FIXES
        if request in (ALL, fix.side)
        for value in fix.values or ("",)
    ]
    together = [chosen_of(text) for text in NATURAL] if request == ALL else []
    return [*singles, *together]


def _count(number: int, what: str, several: str = "") -> str:
    return f"{number} {what if number == 1 else several or what + 's'}"
