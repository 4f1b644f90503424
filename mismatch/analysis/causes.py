"""Causes of a mismatch, read off the data of a run: named, ranked, or ruled out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mismatch.analysis.catalogue import title_of
from mismatch.analysis.cause_results import (
    KINDS,
    LITTLE,
    Cause,
    Causes,
    Evidence,
    Excluded,
    RuledOut,
    Side,
)
from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.detector import detectors
from mismatch.analysis.diagnosis.ranking import diagnose, in_order
from mismatch.analysis.explained import lead_of, led, unled
from mismatch.analysis.plugins import RunArtefacts
from mismatch.analysis.results import Square, rounds_alike, sides_at_fault
from mismatch.specs import CheckSpec
from mismatch.types import Check, Report, Scoring, SideFacts


def measure(run: RunArtefacts, spec: CheckSpec) -> Causes:
    """Return what every detector says of the headline's two sides."""
    others = others_of(run.usable, run.decode, run.train)
    return diagnose(Case.of(run.rollout, run.decode, run.train, others), detectors())


def others_of(usable: dict[str, Scoring], decode: Scoring, train: Scoring) -> dict[str, Scoring]:
    """Return the passes other than the headline's two."""
    return {n: scoring for n, scoring in usable.items() if n not in (decode.name, train.name)}


def of_sides_at_fault(found: Sequence[Cause], square: Square | None) -> list[Cause]:
    """Return those of the causes found by running modules whose side is beyond its level.

    Modules of a side that is right differ from the reference too, by rounding. Of two sides that do
    not round alike either may be wrong.
    """
    trainer = {side == "trainer" for side in (sides_at_fault(square) if square else ())}
    if square is not None and rounds_alike(square) is False:
        trainer = {True, False}
    return [cause for cause in found if (cause.side == "trainer") in trainer]


def led_by(causes: Causes, found: Sequence[Cause]) -> Causes:
    """Return the causes with what was found by running modules in place of what was guessed.

    A difference of digests or settings that a module's source can be, on its side, takes the module
    as evidence, and so does any cause that it could be: the module confirms it. What only says that
    the same side is off is the same finding without a place: its share and its side are kept, and
    it goes. Other causes stay as they are, in the order of all shares.
    """
    rest, led = list(causes.ranked), list[Cause]()
    for each in found:
        sides = ("engine", "either") if each.side == "either" else (each.side, "either")
        vague = [
            c for c in rest if c.id in KINDS and not c.fact and not c.stated and c.side in sides
        ]
        rest = [cause for cause in rest if not any(cause is other for other in vague)]
        effect = next((cause.effect for cause in vague if cause.effect is not None), None)
        names = (each.id, *each.alike)
        able = [cause for cause in rest if cause.id in names and cause.side in sides]
        able.sort(key=lambda cause: (not (cause.fact or cause.stated), names.index(cause.id)))
        if able:
            known = able[0]
            rest = [cause for cause in rest if cause is not known]
            certain = known.fact or known.stated
            own_first = certain or known.status == "confirmed"
            parts = known.evidence, each.evidence
            led.append(
                replace(
                    known,
                    status=each.status if certain else known.status,
                    side=_narrower(known.side, each.side),
                    effect=effect if known.effect is None else known.effect,
                    evidence=sum(parts if own_first else parts[::-1], ()),
                    fact=True,
                    alike=() if certain and each.status == "confirmed" else known.alike,
                    advice=each.advice if known.id in KINDS else known.advice,
                )
            )
        else:
            side = next((cause.side for cause in vague), each.side)
            led.append(replace(each, effect=effect, side=_narrower(each.side, side)))
    facts, others = ([c for c in rest if c.fact is fact] for fact in (True, False))
    ranked, measured = [*facts, *led, *others], [*map(_share, (*facts, *led, *others))]
    for place in range(len(led) - 1):
        # The side that is farther off comes first in what is found: rounding can drown its share.
        first = len(facts) + place
        nearer = [share for share in measured[first:][: len(led) - place] if share is not None]
        measured[first] = max(nearer, default=None)
    for place in range(1, len(led)):
        before, own = measured[len(facts) + place - 1], measured[len(facts) + place]
        measured[len(facts) + place] = before if own is None else own
    return replace(causes, ranked=tuple(in_order(ranked, measured)))


def without(causes: Causes, detector: str, excluded: Sequence[Excluded]) -> Causes:
    """Return the causes less what running the parts of their side excludes.

    What only says that a side is off loses names, and keeps the evidence. Of what is excluded on
    both sides, what no cause is called is ruled out.
    """
    ranked = []
    for cause in causes.ranked:
        sides = {"engine", "trainer"} if cause.side == "either" else {cause.side}
        against = [each for each in excluded if each.side in sides]
        vague = cause.id in KINDS and not (cause.fact or cause.stated)
        if vague and cause.status != "confirmed" and len(against) == len(sides):
            cannot = _common(against)
            cause = replace(
                cause,
                id="side-off" if cause.id in cannot else cause.id,
                alike=tuple(name for name in cause.alike if name not in cannot),
                evidence=(*cause.evidence, *(each.evidence for each in against)),
            )
        ranked.append(cause)
    named = {name for cause in ranked for name in (cause.id, *cause.alike)}
    out = tuple(sorted(_common(excluded) - named)) if len(excluded) == 2 else ()
    looked = RuledOut(detector, out, tuple(each.evidence for each in excluded))
    ruled_out = (*causes.ruled_out, looked) if out else causes.ruled_out
    return replace(causes, ranked=tuple(ranked), ruled_out=ruled_out)


def _common(excluded: Sequence[Excluded]) -> set[str]:
    return set[str].intersection(*(set(each.causes) for each in excluded))


def _share(cause: Cause) -> float | None:
    return None if cause.effect is None else cause.effect.value


def of_this_machine(causes: Causes, trainer: SideFacts) -> Causes:
    """Return the causes; one that a replaced setting can make is suspected at best.

    The run's own setting was not measured, so that nothing confirms the cause of it.
    """
    ranked = []
    for cause in causes.ranked:
        makers = [each for each in trainer.get("replaced", ()) if cause.id in each["causes"]]
        if makers and cause.side != "engine":
            seen = tuple(
                Evidence(f"{each['what']} that ran, which can make it", each["ran"], each["asked"])
                for each in makers
            )
            if cause.status == "confirmed":
                cause = replace(cause, status="suspected", made_here=True)
            new = tuple(item for item in seen if item not in cause.evidence)
            cause = replace(cause, evidence=cause.evidence + new)
        ranked.append(cause)
    return replace(causes, ranked=tuple(ranked))


def _narrower(side: Side, other: Side) -> Side:
    """Return the side that is named, of two findings of one cause."""
    return other if side == "either" else side


def cause_checks(causes: Causes | None, explained: bool = False) -> list[Check]:
    """Return a warning where a cause is named: what is suspected of a fault is not healthy.

    Args:
        explained: experiments were asked for.
    """
    named = [cause for cause in causes.ranked if cause.status != LITTLE] if causes else []
    if not named:
        return []
    first = named[0]
    more = f" (and {len(named) - 1} more)" if len(named) > 1 else ""
    where = "side not known" if first.side == "either" else f"in the {first.side}"
    detail = f"{title_of(first.id)} ({first.id}): {first.status}, {where}{more}"
    known = explained or first.made_here or first.status == "confirmed"
    return [Check("causes", "warning", detail, "" if known else "--explain confirms or rules out")]


def with_causes(report: Report, causes: Causes, explained: bool) -> Report:
    """Return the report with the causes that experiments left, also in its check and verdict."""
    old_lead = lead_of(report.result("causes"), report.checks)
    report = report.with_analyses(causes=causes)
    before = next((check for check in report.checks if check.id == "causes"), None)
    if before is None:  # no cause is named
        return report
    gone = replace(before, detail=f"{before.detail}; ruled out by experiment", fix="")
    now = next(iter(cause_checks(causes, explained)), gone)
    checks = tuple(now if check is before else check for check in report.checks)
    old, said = unled(report.verdict, old_lead, report.checks), (before.detail, now.detail)
    of = old.correctness and replace(old.correctness, reason=old.correctness.reason.replace(*said))
    verdict = replace(old, reason=old.reason.replace(*said), correctness=of)
    fixes = report.result("fixes")
    if fixes is None or fixes.verdict_as_is is None:  # else it is the verdict with fixes
        verdict = led(verdict, lead_of(causes, checks), checks)
    return replace(report, checks=checks, verdict=verdict)
