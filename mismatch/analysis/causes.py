"""Causes of a mismatch, read off the data of a run: named, ranked, or ruled out."""

from __future__ import annotations

from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.detector import detectors
from mismatch.analysis.diagnosis.ranking import LITTLE, Causes, diagnose
from mismatch.analysis.plugins import Analysis, RunArtefacts
from mismatch.specs import CheckSpec
from mismatch.types import Check, Scoring


def measure(run: RunArtefacts, spec: CheckSpec) -> Causes:
    """What every detector says of the headline's two sides."""
    others = others_of(run.usable, run.decode, run.train)
    return diagnose(Case.of(run.rollout, run.decode, run.train, others), detectors())


def others_of(usable: dict[str, Scoring], decode: Scoring, train: Scoring) -> dict[str, Scoring]:
    """The passes beside the headline's two."""
    return {n: scoring for n, scoring in usable.items() if n not in (decode.name, train.name)}


def cause_checks(causes: Causes | None) -> list[Check]:
    """Return a warning where a cause is named: what is suspected of a fault is not healthy."""
    named = [cause for cause in causes.ranked if cause.status != LITTLE] if causes else []
    if not named:
        return []
    first = named[0]
    share = "" if first.effect is None else f", {first.effect.value:.0%} of mean |delta|"
    more = f" (and {len(named) - 1} more)" if len(named) > 1 else ""
    detail = f"{first.id} is {first.status}, side {first.side}{share}{more}"
    return [Check("causes", "warning", detail, "see Causes; --explain confirms or rules out")]


ANALYSIS = Analysis("causes", Causes, measure, order=5)
