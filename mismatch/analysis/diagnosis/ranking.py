"""From what detectors saw to causes in their order: one is explained away, the rest is looked at.

Of two explanations the more specific one is taken first (a shift before a side that is off); its
repair is applied, and all detectors look at what is left. What they saw before and see no more
was a consequence and gets no advice. Settings and digests that differ are facts: each takes the
share of the one cause that it explains, on a side that it can be on. Causes come in the order of
their shares; one that was not measured counts as what the others leave.
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
from mismatch.analysis.diagnosis.legs import gap_of
from mismatch.analysis.diagnosis.loaded_weights import NOT_OF_CHECKPOINT
from mismatch.analysis.diagnosis.possible import impossible
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
OF_WEIGHTS = (  # what digests see
    *("weights-differ", "stale-weights", "tied-head-stale", "experts-differ", "lora-scale"),
    "quantised-rollout",
)
FUNCTION = 50  # detectors from here on ask only how far a side is off
# What these see is wrong, however little it costs.
SURE = ("padding", "ends", "constant", "implementation", "unsampled", "lag", "samples-alike")
TURNS = "turns that it moves"
SMALL = 0.05  # share of the mismatch below which a cause is not worth a name

Looks = dict[str, Look | NotTested]
Elsewhere = Callable[[Finding, Cause], bool]


def diagnose(case: Case, detectors: Sequence[Detector]) -> Causes:
    """Return all causes that these detectors can name, by their shares."""
    failures: dict[str, Failure] = {}
    first = _look(case, detectors, failures)
    whole = _size(case)
    causes: list[Cause] = []
    rest, looks, left, fitted = case, first, list(detectors), False
    for _ in range(ROUNDS if whole > NEGLIGIBLE else 0):
        before = min(_size(rest) / whole, 1.0)  # a repair may leave more than there was
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
        unseen = {  # for want of data, now that fewer tokens are left
            name
            for other in left
            if isinstance(again.get(other.id), NotTested)
            for name in other.causes
        }
        gone = _named(looks) - {finding.cause} - _named(again) - unseen
        causes.append(replace(cause, consequences=tuple(sorted(gone))))
        looks = again
    found = [f for look in first.values() if isinstance(look, Look) for f in look.findings]
    # What a repair takes out was looked at above, behind what is more specific.
    stated = [f for f in found if f.effect is None and (f.repair is None or f.cause in KINDS)]
    stated = [f for f in stated if whole > NEGLIGIBLE or f.fact]
    followed = {name for cause in causes for name in cause.consequences}
    stated = [f for f in stated if f.stated or f.fact or f.cause not in followed]
    if causes:  # a kind without a share is only said where nothing better is
        stated = [each for each in stated if each.cause not in KINDS or each.fact]
    as_in_files = case.trainer.fingerprint.get(NOT_OF_CHECKPOINT) == []
    of_engine = gap_of(case.float32_name)

    def elsewhere(each: Finding, cause: Cause) -> bool:
        """Return whether a difference cannot be seen in what made this cause known.

        The reference holds the values of the trainer's checkpoint: a trainer that does so too is
        not away from it because of weights. And it has none of the trainer's own settings: the
        engine is not away from it because of them.
        """
        engines = any(item.what == of_engine for item in cause.evidence)
        weights = as_in_files and each.cause in OF_WEIGHTS and cause.side == "trainer"
        return weights or (engines and each.side == "trainer")

    cannot = impossible(case.engine.fingerprint, case.trainer.fingerprint)
    causes = [
        replace(cause, alike=tuple(name for name in cause.alike if name not in cannot))
        for cause in in_order(_joined(causes, stated, elsewhere))
    ]
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


def in_order(causes: Sequence[Cause], shares: Sequence[float | None] | None = None) -> list[Cause]:
    """Return the causes as they are shown: the larger share first.

    A share that was not measured is what the others leave at most. What is confirmed, or found in
    settings and digests, comes before what only says that a side is off, if it carries half.

    Args:
        shares: by which they are ordered; None: those of their effects.
    """
    own = [None if cause.effect is None else cause.effect.value for cause in causes]
    left = max(0.0, 1.0 - sum(share for share in own if share is not None))
    known = [left if share is None else share for share in shares or own]

    def order(pair: tuple[float, Cause]) -> tuple[bool, float]:
        share, cause = pair
        sure = cause.status == "confirmed" or cause.fact
        return not (sure and share >= LEADS), -share

    return [cause for _, cause in sorted(zip(known, causes, strict=True), key=order)]


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
        value, *ends = (None if part is None else min(part * before, 1.0)
                        for part in (effect.value, effect.low, effect.high))  # fmt: skip
        effect = replace(effect, value=value or 0.0, low=ends[0], high=ends[1])
    status: Status = "confirmed" if finding.confirmed else "suspected"
    return Cause(finding.cause, status, finding.side, effect, finding.evidence + turns,
                 finding.alike, stated=finding.stated, fact=finding.fact,
                 advice=finding.advice)  # fmt: skip


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


def _joined(causes: list[Cause], stated: list[Finding], elsewhere: Elsewhere) -> list[Cause]:
    """Join each cause to the one difference without a share that explains it best; add the other
    differences that are certain.

    A difference whose name the cause could have comes before one that only says that something
    differs; then facts, then what is certain.

    Args:
        elsewhere: tells that a difference cannot be seen in what made a cause known.
    """
    joined, left = list(causes), list(stated)

    def order(each: Finding, cause: Cause) -> tuple[int, bool, bool]:
        names = (cause.id, *cause.alike)
        place = names.index(each.cause) if each.cause in names else len(names)
        return place, not each.fact, not each.certain

    for index in range(len(joined)):
        # A side may state one difference in two ways: both are evidence of this cause.
        while able := [each for each in left if _explains(each, joined[index], elsewhere)]:
            best = min(able, key=lambda each: order(each, joined[index]))
            left.remove(best)
            joined[index] = _merged(joined[index], best)
    for each in left:
        if not each.certain:
            continue
        same = next(
            (n for n, cause in enumerate(joined) if _explains(each, cause, elsewhere)), None
        )
        if same is None:
            joined.append(_cause(each))
        else:
            joined[same] = _merged(joined[same], each)
    return joined


def _explains(each: Finding, cause: Cause, elsewhere: Elsewhere) -> bool:
    """Return whether a stated difference is what a cause could be, on a side that it can be on.

    What a cause has become by one difference, no other one explains but one of the same name; what
    an experiment confirmed, no guess does.
    """
    if cause.stated or cause.fact or (cause.status == "confirmed" and not each.stated):
        return each.cause == cause.id and _same_side(each, cause)
    meant = each.cause == cause.id or each.cause in cause.alike or cause.id in each.alike
    meant |= each.stated and each.certain and cause.id in MARKS
    return meant and not elsewhere(each, cause) and _same_side(each, cause)


def _same_side(each: Finding, cause: Cause) -> bool:
    return "either" in (each.side, cause.side) or each.side == cause.side


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
    first = each.fact or (each.stated and each.certain and id == each.cause)
    return replace(
        cause,
        id=id,
        side=side,
        alike=tuple(a for a in alike if a != id),
        fact=each.fact,
        evidence=evidence + cause.evidence if first else cause.evidence + evidence,
        stated=cause.stated or (each.stated and each.certain and id == each.cause),
        kind=cause.kind or (cause.id if id != cause.id else ""),
        advice=(each.advice if id == each.cause else "") or cause.advice,
    )
