"""What the detectors find in a drawn pair."""

from __future__ import annotations

from dataclasses import replace

from mismatch.analysis.cause_results import Cause, Causes
from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.detector import detectors
from mismatch.analysis.diagnosis.ranking import diagnose
from tests import drawn_pair as drawn


def causes(case: Case) -> Causes:
    result = diagnose(case, detectors())
    assert result.failures == ()
    return result


def first(case: Case) -> Cause:
    return causes(case).ranked[0]


def healthy(seed: int, **how: float) -> Case:
    return drawn.draw(seed, **how).case()  # type: ignore[arg-type]


def stating(case: Case, engine: dict[str, object], trainer: dict[str, object]) -> Case:
    return replace(
        case,
        engine=replace(case.engine, fingerprint=case.engine.fingerprint | engine),
        trainer=replace(case.trainer, fingerprint=case.trainer.fingerprint | trainer),
    )
