"""From what detectors saw to causes in their order: one is explained away, the rest is looked at.

Of two explanations the more specific one is taken first (a shift before a side that is off); its
repair is applied, and all detectors look at what is left. What they saw before and see no more
was a consequence and gets no advice. Settings and digests that differ are facts: they come first,
and take the share of the cause that they explain.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mismatch.analysis.cause_results import (
    KINDS,
    LEADS,
    Cause,
    Causes,
    Evidence,
    Failure,
    RuledOut,
    Status,
)
from mismatch.analysis.diagnosis.case import Case, Repair
from mismatch.analysis.diagnosis.detector import Detector, Finding, Look
from mismatch.attempts import LOG
from mismatch.errors import named_line
from mismatch.types import NotTested

ROUNDS = 4
NEGLIGIBLE = 1e-5  # nats of mean |delta|, below which there is nothing to explain
TIER = 10  # detectors of one tens digit look for causes that are equally specific
PAIRING = 1  # tens digit of detectors whose repair gives every token its partner
TERMINAL = 40  # where a side computes another function, its rest says nothing about a second cause
WHOLE = ("by-turn",)  # detectors of a lower order: another context is another function
MARKS = (*KINDS, "onset")  # what a stated difference explains
FUNCTION = 50  # detectors from here on ask only how far a side is off
# What these see is wrong, however little it costs.
SURE = ("padding", "ends", "constant", "implementation", "unsampled", "lag", "samples-alike")
TURNS = "turns that it moves"
SMALL = 0.05  # share of the mismatch below which a cause is not worth a name

Looks = dict[str, Look | NotTested]


def diagnose(case: Case, detectors: Sequence[Detector]) -> Causes:
    """Return all causes that these detectors can name, facts first, then by share."""
    failures: dict[str, Failure] = {}
    first = _look(case, detectors, failures)
    whole = _size(case)
    causes: list[Cause] = []
    rest, looks, left, fitted = case, first, list(detectors), False
    for _ in range(ROUNDS if whole > NEGLIGIBLE else 0):
        before = _size(rest) / whole
        # Behind a re-pairing the rest is a separate run, however small a part it is.
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
        if not repair.exact:  # its misfit looks like another function
            left = [d for d in left if d.order < FUNCTION]
        left = [] if detector.order >= TERMINAL or detector.id in WHOLE else left
        cause = _cause(finding, before, _turns_moved(rest, repair))
        if detector.family != "function":  # of those "either" is what float32 says
            cause = _with_side(cause, first)
        rest = rest.repaired(repair.left, repair.right, repair.kept)
        again = _look(rest, left, failures)
        gone = _named(looks) - {finding.cause} - _named(again)
        causes.append(replace(cause, consequences=tuple(sorted(gone))))
        looks = again
    found = [f for look in first.values() if isinstance(look, Look) for f in look.findings]
    # What a repair takes out was looked at above, behind what is more specific.
    stated = [f for f in found if f.effect is None and (f.repair is None or f.cause in KINDS)]
    stated = [f for f in stated if whole > NEGLIGIBLE or f.fact]
    if causes:  # a kind without a share is only said where nothing better is
        stated = [each for each in stated if each.cause not in KINDS or each.fact]
    causes = _joined(causes, stated)
    causes.sort(key=_order)
    named = {cause.id for cause in causes}
    # Equal settings do not rule out what shows behind a boundary that no token reached.
    unreached = {
        cause
        for detector in detectors
        if detector.family == "position" and isinstance(first.get(detector.id), NotTested)
        for cause in detector.causes
    }
    ruled_out = []
    for detector in detectors:
        look = first.get(detector.id)
        if isinstance(look, Look) and not look.findings:
            able = detector.causes if look.looked_for is None else look.looked_for
            hidden = set() if detector.family == "position" else unreached
            seen = tuple(cause for cause in able if cause not in hidden)
            if seen and not named & set(able):
                ruled_out.append(RuledOut(detector.id, seen, look.evidence))
    return Causes(
        tuple(
            replace(cause, consequences=tuple(id for id in cause.consequences if id not in named))
            for cause in causes
        ),
        tuple(ruled_out),
        tuple(look for look in first.values() if isinstance(look, NotTested)),
        tuple(failures.values()),
        whole,
        _size(rest) / whole if whole else 0.0,
    )


def _order(cause: Cause) -> tuple[bool, bool, float]:
    """Facts first, then what is confirmed and carries the mismatch, then by share."""
    share = cause.effect.value if cause.effect else None
    leads = cause.status == "confirmed" and (share is None or share >= LEADS)
    return not cause.fact, not leads, 1.0 if share is None else -share


def _size(case: Case) -> float:
    """mean |delta| of the tokens that count."""
    return float(np.abs(case.delta[case.kept]).mean()) if case.kept.any() else 0.0


def _look(case: Case, detectors: Sequence[Detector], failures: dict[str, Failure]) -> Looks:
    """Return what each detector sees; one that raises is written down and never ends the check."""
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
    """Return what a detector sees, or that it raised."""
    if not case.kept.any():
        return NotTested(id, "no token is left to compare")
    try:
        return seen_by(find, case)
    except Exception as error:
        LOG.error("detector %s: internal error", id, exc_info=error)
        return Failure(id, named_line(error))


def seen_by(find: Callable[[Case], Look | NotTested], case: Case) -> Look | NotTested:
    """Return what a detector sees, without warnings of what it divides."""
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
        return find(case)


def _next(
    detectors: Sequence[Detector], looks: Looks, named: set[str], worth: float
) -> tuple[Detector, Finding] | None:
    """Return the most specific finding of a measured share that can be taken out."""
    for detector in detectors:
        look = looks.get(detector.id)
        for finding in look.findings if isinstance(look, Look) else ():
            large = finding.effect is not None and finding.effect.value * worth > SMALL
            large |= detector.id in SURE
            if finding.cause not in named and finding.repair is not None and large:
                return detector, finding
    return None


def _turns_moved(case: Case, repair: Repair) -> tuple[Evidence, ...]:
    """Return the turns that a cause moves, of several: those with a tenth of what its repair
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


def _cause(finding: Finding, before: float = 1.0, turns: tuple[Evidence, ...] = ()) -> Cause:
    """Return a finding of what was left, its share scaled to the whole mismatch."""
    effect = finding.effect
    if effect is not None:
        low = None if effect.low is None else effect.low * before
        high = None if effect.high is None else effect.high * before
        effect = replace(effect, value=effect.value * before, low=low, high=high)
    status: Status = "confirmed" if finding.confirmed else "suspected"
    return Cause(finding.cause, status, finding.side, effect, finding.evidence + turns,
                 finding.alike, stated=finding.stated, fact=finding.fact)  # fmt: skip


def _with_side(cause: Cause, first: Looks) -> Cause:
    """Return the cause with the side that is far from float32, where it names none."""
    look = first.get("far-side")
    found = look.findings if isinstance(look, Look) and cause.side == "either" else ()
    for far in found:
        cause = replace(cause, side=far.side, evidence=cause.evidence + far.evidence)
    return cause


def _named(looks: Looks) -> set[str]:
    return {
        finding.cause
        for look in looks.values()
        if isinstance(look, Look)
        for finding in look.findings
        if finding.effect is not None or finding.certain
    }


def _joined(causes: list[Cause], stated: list[Finding]) -> list[Cause]:
    """Join differences without a share to the cause that they explain; add those that are certain.

    Facts come first, then what is certain, and of these the one that is most like the cause.
    """
    joined = list(causes)

    def order(each: Finding) -> tuple[bool, bool, int]:
        alike = [(c.id, *c.alike) for c in causes if c.id != "side-off" and _explains(each, c)]
        places = [names.index(each.cause) for names in alike if each.cause in names]
        return not each.fact, not each.certain, min(places, default=len(alike) * 99)

    for each in sorted(stated, key=order):
        index = next((n for n, cause in enumerate(joined) if _explains(each, cause)), None)
        if index is not None:
            joined[index] = _merged(joined[index], each)
        elif each.certain:
            joined.append(_cause(each))
    return joined


def _explains(each: Finding, cause: Cause) -> bool:
    """Return whether a stated difference is one of those that a cause could be."""
    meant = each.cause == cause.id or each.cause in cause.alike or cause.id in each.alike
    meant |= each.stated and each.certain and cause.id in MARKS and not cause.fact
    same_side = "either" in (each.side, cause.side) or each.side == cause.side
    return meant and (each.fact or cause.fact or same_side)


def _merged(cause: Cause, each: Finding) -> Cause:
    """Return the cause under the name of the difference that explains it."""
    evidence = tuple(item for item in each.evidence if item not in cause.evidence)
    if cause.fact:
        return replace(cause, evidence=cause.evidence + evidence)
    alike = tuple(each.alike) if each.certain else cause.alike
    side = cause.side if cause.side != "either" and not each.fact else each.side
    id = each.cause if each.certain or each.cause == cause.id else cause.id
    if cause.effect is None and each.cause not in cause.alike and not each.fact:
        id = cause.id
    return replace(
        cause,
        id=id,
        side=side,
        alike=tuple(a for a in alike if a != id),
        fact=each.fact,
        evidence=evidence + cause.evidence if each.fact else cause.evidence + evidence,
        stated=cause.stated or (each.stated and each.certain and id == each.cause),
        kind=cause.kind or (cause.id if id != cause.id else ""),
    )
