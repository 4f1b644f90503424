"""Causes of a mismatch, read off the data of a run: named, ranked, or ruled out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mismatch.analysis.cause_results import KINDS, LITTLE, Cause, Causes, Evidence, Side
from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.detector import detectors
from mismatch.analysis.diagnosis.ranking import diagnose
from mismatch.analysis.explained import lead_of, led, unled
from mismatch.analysis.plugins import RunArtefacts
from mismatch.analysis.results import Square, sides_at_fault
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

    Modules of a side that is right differ from the reference too, by rounding.
    """
    trainer = {side == "trainer" for side in (sides_at_fault(square) if square else ())}
    return [cause for cause in found if (cause.side == "trainer") in trainer]


def led_by(causes: Causes, found: Sequence[Cause]) -> Causes:
    """Return the causes with those that were found by running modules before all that was guessed.

    Digests and settings that differ stay first, and take the module as evidence where they explain
    it. A cause that the module could be gets it as evidence and leads. What only says that the same
    side is off is the same finding without a place: its share and its side are kept, and it goes.
    """
    facts = [cause for cause in causes.ranked if cause.fact]
    rest = [cause for cause in causes.ranked if not cause.fact]
    led: list[Cause] = []
    for each in found:
        sides = ("engine", "either") if each.side == "either" else (each.side, "either")
        vague = [cause for cause in rest if cause.id in KINDS and cause.side in sides]
        rest = [cause for cause in rest if cause not in vague]
        names = (each.id, *each.alike)
        known = next((cause for cause in facts if cause.id in names), None)
        likely = next((c for c in rest if c.id in each.alike and c.side in sides), None)
        effect = next((cause.effect for cause in vague if cause.effect is not None), None)
        if known is not None:
            effect = effect if known.effect is None else known.effect
            status = each.status if each.status == "confirmed" else known.status
            more = replace(
                known,
                status=status,
                side=_narrower(known.side, each.side),
                effect=effect,
                evidence=known.evidence + each.evidence,
            )
            facts[facts.index(known)] = more
        elif likely is not None:
            rest.remove(likely)
            side = _narrower(likely.side, each.side)
            evidence = each.evidence + likely.evidence
            led.append(replace(likely, side=side, fact=True, evidence=evidence))
        else:
            side = next((cause.side for cause in vague), each.side)
            led.append(replace(each, effect=effect, side=_narrower(each.side, side)))
    return replace(causes, ranked=(*facts, *led, *rest))


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
    share = "" if first.effect is None else f", {first.effect.value:.0%} of mean |delta|"
    more = f" (and {len(named) - 1} more)" if len(named) > 1 else ""
    detail = f"{first.id} is {first.status}, side {first.side}{share}{more}"
    known = explained or first.made_here or first.status == "confirmed"
    more = "" if known else "; --explain confirms or rules out"
    return [Check("causes", "warning", detail, f"see Causes{more}")]


def with_causes(report: Report, causes: Causes, explained: bool) -> Report:
    """Return the report with the causes that experiments left, also in its check and verdict."""
    old_lead = lead_of(report.result("causes"), report.checks)
    report = report.with_analyses(causes=causes)
    before = next((check for check in report.checks if check.id == "causes"), None)
    if before is None:  # no cause is named
        return report
    gone = replace(before, detail=f"{before.detail}; ruled out by experiment", fix="see Causes")
    now = next(iter(cause_checks(causes, explained)), gone)
    checks = tuple(now if check is before else check for check in report.checks)
    old, said = unled(report.verdict, old_lead, report.checks), (before.detail, now.detail)
    of = old.correctness and replace(old.correctness, reason=old.correctness.reason.replace(*said))
    verdict = replace(old, reason=old.reason.replace(*said), correctness=of)
    fixes = report.result("fixes")
    if fixes is None or fixes.verdict_as_is is None:  # else it is the verdict with fixes
        verdict = led(verdict, lead_of(causes, checks), checks)
    return replace(report, checks=checks, verdict=verdict)
