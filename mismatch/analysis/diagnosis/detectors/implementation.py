"""Two implementations in float32: where they differ, precision is innocent."""

from __future__ import annotations

import numpy as np

from mismatch.analysis.diagnosis.case import Case, above
from mismatch.analysis.diagnosis.detector import Detector, Evidence, Finding, Look, Repair
from mismatch.analysis.diagnosis.detectors.position import first_token, onset
from mismatch.analysis.diagnosis.detectors.smooth import kind_of
from mismatch.analysis.displaced import LEVELS, device_class
from mismatch.analysis.levels import PRECISION
from mismatch.analysis.square import BITS
from mismatch.run.store import FLOAT32, PLAIN
from mismatch.types import NotTested

WHAT = "implementations in float32"


def implementation(case: Case) -> Look | NotTested:
    """The engine's implementation in float32 against the reference, and the mark of their gap.

    The gap is taken out of the engine's log-probabilities, so that what is left of its own
    rounding, cache or kernels can be looked at.
    """
    name = f"{case.engine.name.partition(':')[0]}:{FLOAT32}"
    exact, reference = case.others.get(name), case.reference
    if exact is None or reference is None:
        return NotTested(WHAT, f"needs the passes {name} and float32 of the trainer")
    device = device_class(case.engine.fingerprint, case.trainer.fingerprint)
    if device not in LEVELS:
        return NotTested(WHAT, f"no clean gap is known on {device}")
    gap = reference - exact.logprobs
    size = case.mean(np.abs(gap))
    level = LEVELS[device].gap_level(_floor(case))
    evidence: tuple[Evidence, ...] = (
        Evidence("mean |difference| in float32, nats", size.value, f"below {level:g}"),
    )
    if not above(size, level):
        return Look(evidence)
    pair = case.repaired(exact.logprobs, reference)
    cause, alike, numbers = kind_of(pair, "engine")
    evidence += numbers
    for look in (onset(pair), first_token(pair)):  # a place says more than a spread
        for finding in look.findings if isinstance(look, Look) else ():
            cause, alike, evidence = finding.cause, finding.alike, evidence + finding.evidence
    removed = case.share(case.delta - gap)
    effect = removed if removed.value > 0 else None  # drowned in the rounding of the precision
    repair = Repair(case.left + gap, case.right)
    return Look(evidence, (Finding(cause, "engine", effect, evidence, alike=alike, repair=repair),))


def _floor(case: Case) -> float | None:
    """What float32 is expected to cost: the cost of a plain forward, by its significant bits."""
    for dtype in reversed(PRECISION[1:]):
        plain = case.others.get(f"{PLAIN}:{dtype}")
        if plain is not None and case.reference is not None:
            cost = float(np.abs(plain.logprobs - case.reference).mean())
            return cost * 2.0 ** (BITS[dtype] - BITS["fp32"])
    return None


DETECTORS = (
    Detector("implementation", "function", ("function-differs", "weights-differ", "side-off",
             "onset", "sliding-window", "grows-with-position", "first-token", "chunked-prefill",
             "kv-block"), implementation, "both implementations in float32", 39),
)  # fmt: skip
