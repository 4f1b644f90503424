"""Causes of a mismatch, read off the data of a run: named, ranked, or ruled out."""

from __future__ import annotations

from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.detector import detectors
from mismatch.analysis.diagnosis.ranking import Causes, diagnose
from mismatch.analysis.registry import Analysis, Measured
from mismatch.specs import CheckSpec


def measure(run: Measured, spec: CheckSpec) -> Causes:
    """What every detector says of the headline's two sides."""
    others = {
        name: scoring
        for name, scoring in run.usable.items()
        if name not in (run.decode.name, run.train.name)
    }
    return diagnose(Case.of(run.rollout, run.decode, run.train, others), detectors())


ANALYSIS = Analysis("causes", Causes, measure, order=5)
