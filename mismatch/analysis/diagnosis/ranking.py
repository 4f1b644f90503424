"""From what detectors saw to causes in their order: one is explained away, the rest is looked at.

Of two explanations the more specific one is taken first (a shift before "another function"); its
repair is applied, and all detectors look at what is left. What they saw before and see no more
was a consequence and gets no advice. Settings and digests that differ are joined to the cause of
the numbers that they explain.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.detector import Detector, Evidence, Finding, Look, Repair, Side
from mismatch.types import Estimate, NotTested

ROUNDS = 4
NEGLIGIBLE = 1e-5  # nats of mean |delta|, below which there is nothing to explain
TIER = 10  # detectors of one tens digit look for causes that are equally specific
PAIRING = 1  # tens digit of detectors whose repair gives every token its partner
TERMINAL = 40  # where a side computes another function, its rest says nothing about a second cause
WHOLE = ("by-turn",)  # such detectors of a lower order: another context is another function
KINDS = ("function-differs", "weights-differ", "side-off")  # of cause, where none is named
MARKS = (*KINDS, "onset", "grows-with-position", "first-token")  # what a stated fact explains
FUNCTION = 50  # detectors from here on ask only how far a side is off
# What these see is wrong, however little it costs.
SURE = ("padding", "ends", "scattered", "constant", "implementation", "unsampled", "lag")
TURNS = "turns that it moves"
SMALL = 0.05  # share of the mismatch below which a cause is not worth a name

Status = Literal["suspected", "confirmed", "of little weight"]
LITTLE: Final = "of little weight"  # stated, and the mismatch stays without it


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause, with what speaks for it.

    Attributes:
        id: its entry in causes.toml.
        effect: share of the run's mean |delta|; None where this run did not measure it.
        alike: causes that these data cannot tell from it.
        consequences: what other detectors saw and no longer see once this is taken out.
        stated: a difference in what the sides state: it is there, whatever its share.
        kind: what the data alone would call it, where such a statement gave it its name; else "".
    """

    id: str
    status: Status
    side: Side
    effect: Estimate | None
    evidence: tuple[Evidence, ...]
    alike: tuple[str, ...] = ()
    consequences: tuple[str, ...] = ()
    stated: bool = False
    kind: str = ""


@dataclass(frozen=True, slots=True)
class RuledOut:
    """A detector that looked and saw what a healthy pair has."""

    detector: str
    causes: tuple[str, ...]
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """A detector that raised: its causes were not looked for."""

    detector: str
    error: str


@dataclass(frozen=True, slots=True)
class Causes:
    """The result of the analysis.

    Attributes:
        ranked: by share of the mismatch; () where nothing is above normal.
        unexplained: share of mean |delta| that no cause explains: rounding, and what is not known.
    """

    ranked: tuple[Cause, ...]
    ruled_out: tuple[RuledOut, ...]
    not_tested: tuple[NotTested, ...]
    failures: tuple[Failure, ...]
    mean_abs_delta: float
    unexplained: float


Looks = dict[str, Look | NotTested]


def diagnose(case: Case, detectors: Sequence[Detector]) -> Causes:
    """All causes that these detectors can name, in their order."""
    failures: dict[str, Failure] = {}
    first = _look(case, detectors, failures)
    whole = _size(case)
    causes: list[Cause] = []
    rest, looks, left, fitted = case, first, list(detectors), False
    if whole > NEGLIGIBLE:
        for _ in range(ROUNDS):
            before = _size(rest) / whole
            # Behind a re-pairing the rest is a run of its own, however small a part it is.
            worth = before if fitted else 1.0
            taken = _next(left, looks, {cause.id for cause in causes}, worth)
            if taken is None:
                break
            detector, finding = taken
            repair = finding.repair
            assert repair is not None
            # What is more specific was not there before, and a repair can only imitate it.
            left = [d for d in left if d.order // TIER >= detector.order // TIER]
            fitted |= detector.order // TIER > PAIRING
            left = [d for d in left if not d.alone]
            if not repair.exact:  # its misfit looks like another function
                left = [d for d in left if d.order < FUNCTION]
            left = [] if detector.order >= TERMINAL or detector.id in WHOLE else left
            cause = _cause(finding, before, first, _turns_moved(rest, repair))
            rest = rest.repaired(repair.left, repair.right, repair.kept)
            again = _look(rest, left, failures)
            causes.append(replace(cause, consequences=_gone(looks, again, finding)))
            looks = again
    facts = [f for look in first.values() if isinstance(look, Look) for f in look.findings]
    stated = [fact for fact in facts if fact.effect is None] if whole > NEGLIGIBLE else []
    if causes:  # a kind without a share is only said where nothing better is
        open_ = {each for cause in causes if cause.id == "side-off" for each in cause.alike}
        stated = [fact for fact in stated if fact.cause not in KINDS or fact.cause in open_]
    causes = _joined(causes, stated)
    causes.sort(
        key=lambda cause: -1.0 if cause.effect is None else cause.effect.value, reverse=True
    )
    named = {cause.id for cause in causes}
    return Causes(
        tuple(
            replace(cause, consequences=tuple(id for id in cause.consequences if id not in named))
            for cause in causes
        ),
        tuple(
            RuledOut(detector.id, detector.causes, look.evidence)
            for detector in detectors
            if isinstance(look := first.get(detector.id), Look)
            and not look.findings
            and not named & set(detector.causes)
        ),
        tuple(look for look in first.values() if isinstance(look, NotTested)),
        tuple(failures.values()),
        whole,
        _size(rest) / whole if whole else 0.0,
    )


def _size(case: Case) -> float:
    """mean |delta| of the tokens that count."""
    return float(np.abs(case.delta[case.kept]).mean()) if case.kept.any() else 0.0


def _look(case: Case, detectors: Sequence[Detector], failures: dict[str, Failure]) -> Looks:
    """What each detector sees; one that raises is written down and never ends the check."""
    looks: Looks = {}
    for detector in detectors:
        look = look_of(detector.id, detector.find, case)
        if isinstance(look, Failure):
            failures[detector.id] = look
        else:
            looks[detector.id] = look
    return looks


def look_of(
    id: str, find: Callable[[Case], Look | NotTested], case: Case
) -> Look | NotTested | Failure:
    """What a detector sees, or that it raised."""
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
            return find(case)
    except Exception as error:
        return Failure(id, f"{type(error).__name__}: {error}")


def _next(
    detectors: Sequence[Detector], looks: Looks, named: set[str], worth: float
) -> tuple[Detector, Finding] | None:
    """The most specific finding of a measured share that can be taken out."""
    for detector in detectors:
        look = looks.get(detector.id)
        for finding in look.findings if isinstance(look, Look) else ():
            large = finding.effect is not None and finding.effect.value * worth > SMALL
            large |= detector.id in SURE
            if finding.cause not in named and finding.repair is not None and large:
                return detector, finding
    return None


def _turns_moved(case: Case, repair: Repair) -> tuple[Evidence, ...]:
    """The turns that a cause moves, where there are several: those with a tenth of what its repair
    changes, or with tokens that it changes by a tenth of what it does at most."""
    last = int(case.turn.max())
    if last < 2:
        return ()
    moved = np.abs(repair.right - repair.left - case.delta)
    if repair.kept is not None:
        moved = np.where(repair.kept, moved, 1.0)
    count = np.bincount(case.turn[case.kept], minlength=last + 1)
    total = np.bincount(case.turn[case.kept], moved[case.kept], last + 1)
    mean = total / np.maximum(count, 1)
    large = (mean >= mean.max() / 10) | (total >= total.sum() / 10)
    turns = np.flatnonzero((mean > 0) & large)
    named = [str(turns[0])] + ([str(turns[-1])] if len(turns) > 1 else [])
    return (Evidence(TURNS, " to ".join(named)),) if mean.any() else ()


def _cause(finding: Finding, before: float, first: Looks, turns: tuple[Evidence, ...]) -> Cause:
    """A finding of what was left, its share scaled to the whole mismatch."""
    effect = finding.effect
    if effect is not None:
        low = None if effect.low is None else effect.low * before
        high = None if effect.high is None else effect.high * before
        effect = replace(effect, value=effect.value * before, low=low, high=high)
    side = finding.side
    evidence = finding.evidence + turns
    if side == "either" and isinstance(look := first.get("far-side"), Look):  # float32 may know
        for other in look.findings:
            side, evidence = other.side, evidence + other.evidence[:1]
    status: Status = "confirmed" if finding.confirmed else "suspected"
    return Cause(finding.cause, status, side, effect, evidence, finding.alike)


def _gone(before: Looks, after: Looks, finding: Finding) -> tuple[str, ...]:
    """Causes that were seen before a repair and are not seen after it."""
    seen = _named(before) - {finding.cause}
    return tuple(sorted(seen - _named(after)))


def _named(looks: Looks) -> set[str]:
    return {
        finding.cause
        for look in looks.values()
        if isinstance(look, Look)
        for finding in look.findings
        if finding.effect is not None or finding.certain
    }


def _joined(causes: list[Cause], stated: list[Finding]) -> list[Cause]:
    """Differences without a share, joined to the cause that they explain, else added.

    A difference that is certain wins over one that is only a setting in use, and of those the one
    whose mark is most like the cause's.
    """
    joined = list(causes)
    free: list[Finding] = []

    def order(fact: Finding) -> tuple[bool, int]:
        alike = [(c.id, *c.alike) for c in causes if c.id != "side-off" and _explains(fact, c)]
        places = [names.index(fact.cause) for names in alike if fact.cause in names]
        return not fact.certain, min(places, default=len(alike) * 99)

    for fact in sorted(stated, key=order):
        index = next((n for n, cause in enumerate(joined) if _explains(fact, cause)), None)
        if index is None:
            free.append(fact)
        else:
            joined[index] = _merged(joined[index], fact)
    for fact in free:
        if fact.certain:
            index = next((n for n, cause in enumerate(joined) if _explains(fact, cause)), None)
            if index is None:
                joined.append(
                    Cause(fact.cause, "suspected", fact.side, None, fact.evidence, fact.alike,
                          stated=fact.stated)
                )  # fmt: skip
            else:
                joined[index] = _merged(joined[index], fact)
    return joined


def _explains(fact: Finding, cause: Cause) -> bool:
    """Whether a stated difference is one of those that a cause could be."""
    meant = fact.cause == cause.id or fact.cause in cause.alike or cause.id in fact.alike
    meant |= fact.stated and fact.certain and cause.id in MARKS
    return meant and _agree(fact.side, cause.side)


def _agree(side: Side, other: Side) -> bool:
    return "either" in (side, other) or side == other


def _merged(cause: Cause, fact: Finding) -> Cause:
    """The cause under the name of the difference that explains it."""
    alike = tuple(fact.alike) if fact.certain else cause.alike
    side = cause.side if cause.side != "either" else fact.side
    id = fact.cause if fact.certain or fact.cause == cause.id else cause.id
    if cause.effect is None and fact.cause not in cause.alike:
        id = cause.id
    evidence = cause.evidence + tuple(e for e in fact.evidence if e not in cause.evidence)
    return replace(
        cause, id=id, side=side, evidence=evidence, alike=tuple(a for a in alike if a != id),
        stated=cause.stated or (fact.stated and fact.certain and id == fact.cause),
        kind=cause.kind or (cause.id if id != cause.id else ""),
    )  # fmt: skip
