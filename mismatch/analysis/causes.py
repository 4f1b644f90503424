"""Causes of a mismatch, read off the data of a run: named, ranked, or ruled out."""

from __future__ import annotations

from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.detector import detectors
from mismatch.analysis.diagnosis.ranking import Causes, diagnose
from mismatch.analysis.plugins import Analysis, RunArtefacts
from mismatch.specs import CheckSpec
from mismatch.types import Scoring


def measure(run: RunArtefacts, spec: CheckSpec) -> Causes:
    """What every detector says of the headline's two sides."""
    others = others_of(run.usable, run.decode, run.train)
    return diagnose(Case.of(run.rollout, run.decode, run.train, others), detectors())


def others_of(usable: dict[str, Scoring], decode: Scoring, train: Scoring) -> dict[str, Scoring]:
    """The passes beside the headline's two."""
    return {n: scoring for n, scoring in usable.items() if n not in (decode.name, train.name)}


ANALYSIS = Analysis("causes", Causes, measure, order=5)
