"""A side that is a little farther from float32 than the other one and than its precision costs."""

from __future__ import annotations

import numpy as np

from mismatch.analysis.diagnosis.case import FEW_PROMPTS, Case, above
from mismatch.analysis.diagnosis.detector import Detector, Evidence, Finding, Look, Repair, Side
from mismatch.analysis.diagnosis.detectors.displacement import (
    COARSER,
    FUNCTIONS,
    NO_ROUNDING,
    RISING,
    WEIGHTS,
    legs_of,
    spread_ratio,
)
from mismatch.analysis.diagnosis.ranking import SMALL
from mismatch.analysis.displaced import LEVELS, device_class
from mismatch.run.store import PLAIN, REFERENCE
from mismatch.types import NotTested

WHAT = "distance from float32 beyond a plain forward's"
CLEAN = 1.1  # times both yardsticks; in 229 clean blocks the lower end of one is at most 1.01
TAIL = 0.995  # of distances; the rest is cut to it
ALIKE = tuple(dict.fromkeys(("function-differs", "weights-differ", *FUNCTIONS, *WEIGHTS, *COARSER)))


def excess(case: Case) -> Look | NotTested:
    """Both sides against each other, and each against a plain forward at its precision.

    One yardstick alone would not do: another kernel may round more than the plain forward, or
    less than the other side. On devices of which no clean runs are known nothing is said.
    """
    legs, dtype = legs_of(case), str(case.engine.fingerprint.get("dtype"))
    plain = case.others.get(f"{PLAIN}:{dtype}")
    if legs is None or plain is None or case.reference is None or case.n_prompts < FEW_PROMPTS:
        needs = f"needs {REFERENCE}, {PLAIN}:<dtype> and {FEW_PROMPTS} prompts, both in one dtype"
        return NotTested(WHAT, needs, "drop --no-noise-floor")
    device = device_class(case.engine.fingerprint, case.trainer.fingerprint)
    if device not in LEVELS:
        return NotTested(WHAT, f"no clean runs are known on {device}")
    sizes = [np.abs(leg) for leg in (*legs, plain.logprobs - case.reference)]
    if min(float(size[case.kept].mean()) for size in sizes) < NO_ROUNDING:
        return NotTested(WHAT, "a side or the plain forward is in float32")
    engine, trainer, cost = (
        np.minimum(size, float(np.quantile(size[case.kept], TAIL))) for size in sizes
    )
    side: Side = "engine" if engine[case.kept].mean() > trainer[case.kept].mean() else "trainer"
    far, near = (engine, trainer) if side == "engine" else (trainer, engine)
    times = [case.ratio(far, yardstick) for yardstick in (near, cost)]
    evidence = tuple(
        Evidence(f"distance of the {side} from float32 over {what}", ratio.value, "0.9 to 1.1")
        for what, ratio in zip(("the other side's", f"that of {plain.name}"), times, strict=True)
    )
    if not all(above(ratio, CLEAN) for ratio in times):
        return Look(evidence)
    sound = plain.logprobs.astype(np.float64)
    repair = Repair(sound, case.right) if side == "engine" else Repair(case.left, sound)
    effect = case.share(repair.right - repair.left)
    if not above(effect, SMALL):
        return Look(evidence)
    # That few tokens move far says nothing here: so they do in a clean run, where experts flip.
    spread = spread_ratio(case)[0]
    differs = spread >= RISING
    evidence += (Evidence("spread of the log-odds, confident over unlikely", spread, "1 to 4"),)
    cause, alike = ("function-differs", FUNCTIONS) if differs else ("side-off", ALIKE)
    finding = Finding(cause, side, effect, evidence, alike=alike, repair=repair)
    return Look(evidence, (finding,))


DETECTORS = (
    Detector("excess", "function", ("side-off", "function-differs"), excess,
             f"the passes {REFERENCE} and {PLAIN}:<dtype>", 53, alone=True),
)  # fmt: skip
