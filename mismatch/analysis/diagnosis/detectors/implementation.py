"""Each side's implementation in float32 against the reference: where they differ, precision is
innocent."""

from __future__ import annotations

import numpy as np

from mismatch.analysis.diagnosis.case import Case, above
from mismatch.analysis.diagnosis.detector import Detector, Evidence, Finding, Look, Repair, Side
from mismatch.analysis.diagnosis.detectors.position import first_token, onset
from mismatch.analysis.diagnosis.detectors.smooth import kind_of
from mismatch.analysis.displaced import device_class, levels_for
from mismatch.analysis.square import PlainCost
from mismatch.run.store import FLOAT32, TRAINER_FLOAT32
from mismatch.types import Floats, NotTested

WHAT = "implementations in float32"


def implementation(case: Case) -> Look | NotTested:
    """Look at the gap of each side that ran in float32, and at its mark.

    The gap is taken out of the side's log-probabilities, so that what is left of its own
    rounding, cache or kernels can be looked at.
    """
    engine = f"{case.engine.name.partition(':')[0]}:{FLOAT32}"
    sides: tuple[tuple[Side, str], ...] = (("engine", engine), ("trainer", TRAINER_FLOAT32))
    scored = [(side, case.others[name]) for side, name in sides if name in case.others]
    if not scored or case.reference is None:
        return NotTested(WHAT, f"needs the float32 reference, and {engine} or {TRAINER_FLOAT32}")
    looks = [_gap(case, side, scoring.logprobs, case.reference) for side, scoring in scored]
    return Look(
        tuple(item for look in looks for item in look.evidence),
        tuple(finding for look in looks for finding in look.findings),
    )


def _gap(case: Case, side: Side, exact: Floats, reference: Floats) -> Look:
    """Look at one side's implementation: ``exact`` [A] is its float32, nats."""
    off = exact - reference
    size = case.mean(np.abs(off))
    plain = PlainCost.of(case.others, reference)
    levels = levels_for(device_class(case.engine.fingerprint, case.trainer.fingerprint))
    level = levels.gap_bounds(plain.floor, plain.nats).failed
    what = f"mean |{side} - reference| in float32, nats"
    evidence: tuple[Evidence, ...] = (Evidence(what, size.value, f"below {level:g}"),)
    if not above(size, level):
        return Look(evidence)
    pair = case.repaired(exact, reference) if side == "engine" else case.repaired(reference, exact)
    cause, alike, numbers = kind_of(pair, side)
    evidence += numbers
    for look in (onset(pair), first_token(pair)):  # a place says more than a spread
        for finding in look.findings if isinstance(look, Look) else ():
            cause, alike, evidence = finding.cause, finding.alike, evidence + finding.evidence
    repair = Repair(case.left - off, case.right)
    if side == "trainer":
        repair = Repair(case.left, case.right - off)
    removed = case.share(repair.right - repair.left)
    effect = removed if removed.value > 0 else None  # drowned in the rounding of the precision
    return Look(evidence, (Finding(cause, side, effect, evidence, alike=alike, repair=repair),))


DETECTORS = (
    Detector("implementation", "function", ("function-differs", "weights-differ", "side-off",
             "onset", "sliding-window", "grows-with-position", "first-token", "chunked-prefill",
             "kv-block"), implementation, "both implementations in float32", 39),
)  # fmt: skip
