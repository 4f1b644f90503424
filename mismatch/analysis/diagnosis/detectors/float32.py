"""What float32 scorings tell: implementations that differ, a side far from float32, a precision.

These detectors say which side is off and by how much. Whether its weights or its function differ is
not read off the numbers: digests say it (:mod:`.stated`), and ``mismatch locate`` module by module.
"""

from __future__ import annotations

import numpy as np

from mismatch.analysis.cause_results import Evidence, Side
from mismatch.analysis.diagnosis.case import Case, above, below
from mismatch.analysis.diagnosis.detector import Detector, Finding, Look
from mismatch.analysis.diagnosis.detectors.position import BOUNDARIES, onset
from mismatch.analysis.diagnosis.legs import (
    EXACT_FLOOR,
    NO_ROUNDING,
    agree_in_float32,
    gap_of,
    legs_of,
    of_two_precisions,
    ranks_off,
)
from mismatch.analysis.diagnosis.loaded_weights import same_weights
from mismatch.analysis.displaced import device_class, levels_for
from mismatch.analysis.square import PlainCost, gap_side
from mismatch.keys import PLAIN, REFERENCE, REPEATED, TRAINER_FLOAT32, Key
from mismatch.types import Floats, NotTested

WHAT = "implementations in float32"
FAR = 1.5  # times the other side's distance from float32; clean runs of one precision: 0.93 to 1.02
ALIKE = 1.3  # times a plain forward's, that a side's rounding may be; clean sides: 0.78 to 1.06
EXPLAINED = -0.5  # share of |delta| gone, where taking the gap out puts it back in
VARIES, LARGELY = 1e-4, 0.5  # nats from pass to pass, and their share of the gap: chance
ROUNDINGS = 2.0  # times what a plain forward rounds: kernels that add in any order stay below
TAIL = 0.995  # of distances; the rest is cut to it
FUNCTIONS: tuple[str, ...] = (
    *("rope-config", "yarn-attention-factor", "attention-sinks", "sliding-window"),
    *("logit-softcap", "template-drift", "packing-leak", "norm-eps"),
)
WEIGHTS: tuple[str, ...] = (
    *("stale-weights", "tied-head-stale", "experts-differ", "lora-scale"),
    *("quantised-rollout", "quantised-module-list"),
)
COARSER: tuple[str, ...] = (
    *("precision", "trainer-autocast", "bf16-lm-head", "router-precision"),
    *("fsdp-cast-inputs", "fp8-kv"),
)
KINDS = ("function-differs", "side-off")
IN_FLOAT32 = FUNCTIONS + WEIGHTS  # what float32 on both sides leaves possible
ANY = (*IN_FLOAT32, "fp8-kv")


def implementation(case: Case) -> Look | NotTested:
    """Look at the gap of each side that ran in float32.

    The gap is taken out of the side's log-probabilities, so that what is left of that side's
    rounding, cache or kernels can be looked at.
    """
    both = (case.float32_name, TRAINER_FLOAT32)
    names = [name for name in both if name in case.others]
    if not names or case.reference is None:
        return NotTested(WHAT, f"needs the float32 reference, and {' or '.join(both)}")
    looks = [_gap(case, name, case.reference) for name in names]
    findings = tuple(finding for look in looks for finding in look.findings)
    return Look(tuple(item for look in looks for item in look.evidence), findings, KINDS)


def _gap(case: Case, name: str, reference: Floats) -> Look:
    """Look at one side's implementation, by its scoring in float32."""
    own = case.others[name]
    off, trainers = own.logprobs - reference, name == TRAINER_FLOAT32
    size = case.mean(np.abs(off))
    plain = PlainCost.of(case.others, reference)
    levels = levels_for(device_class(case.engine.fingerprint, case.trainer.fingerprint))
    level = levels.gap_bounds(plain.floor, plain.nats).failed
    evidence: tuple[Evidence, ...] = (Evidence(gap_of(name), size.value, f"below {level:g}"),)
    if not above(size, level):
        return Look(evidence)
    side = gap_side(own, case.others, level)
    sides = (reference, own.logprobs) if trainers else (own.logprobs, reference)
    # Weights that were digested in memory and are equal leave the function alone.
    facts = case.engine.fingerprint, case.trainer.fingerprint
    known = trainers or (facts[0].get("weights_in_memory") and same_weights(*facts))
    cause, alike = ("function-differs", FUNCTIONS) if known else ("side-off", IN_FLOAT32)
    evidence += ranks_off(case, np.abs(off)) if trainers else ()
    # What differs from pass to pass is no function, unless it is what rounding alone may do.
    again = case.others.get(REPEATED) if trainers else None
    varies = 0 * off if again is None else np.abs(again.logprobs - case.trainer.logprobs)
    least = max(VARIES, ROUNDINGS * (plain.nats or 0.0))
    chance = above(case.mean(varies), least) and above(case.ratio(varies, np.abs(off)), LARGELY)
    cause, alike = ("nondeterminism", ()) if chance else (cause, alike)
    look = onset(case.repaired(*sides))  # a place says more than a size
    for finding in look.findings if isinstance(look, Look) and not chance else ():
        cause, alike, evidence = finding.cause, finding.alike, evidence + finding.evidence
    repair = case.moved("trainer", off) if trainers else case.moved("engine", -off)
    removed = case.gone(repair)
    effect = removed if removed.value > 0 else None  # drowned in the rounding of the precision
    before = (case.trainer, case.right) if trainers else (case.engine, case.left)
    moved = not np.array_equal(before[0].logprobs, before[1])
    # An earlier repair of this side has done so, in other numbers.
    taken_out = removed.value < (0.0 if moved else EXPLAINED)
    finding = Finding(cause, side, effect, evidence, alike=alike, confirmed=chance,
                      repair=None if taken_out else repair)  # fmt: skip
    return Look(evidence, (finding,))


def exact_side(case: Case) -> Side | None:
    """Return the side that is in float32; None where both round, or neither does."""
    legs = legs_of(case)
    if legs is None:
        return None
    engine, trainer = (float(np.abs(leg[case.kept]).mean()) for leg in legs[:2])
    if max(engine, trainer) < FAR * EXACT_FLOOR or min(engine, trainer) > NO_ROUNDING:
        return None
    return "engine" if engine < trainer else "trainer"


def precision(case: Case) -> Look | NotTested:
    """Look for one side in float32 while the other is as far from it as a lower precision is."""
    exact = exact_side(case)
    what = "a side in float32, the other rounds"
    if exact is None or case.reference is None:
        return NotTested(what, f"needs {REFERENCE} and one side in float32")
    coarse: Side = "trainer" if exact == "engine" else "engine"
    leg = (case.right if coarse == "trainer" else case.left) - case.reference
    evidence: list[Evidence] = []
    for name, plain in case.others.items():
        cost = np.abs(plain.logprobs - case.reference)
        if Key(name).side != PLAIN or float(cost[case.kept].mean()) < NO_ROUNDING:
            continue
        times = case.ratio(np.abs(leg), cost)
        seen = Evidence(f"distance of the {coarse} from float32 over that of {name}", times.value)
        evidence.append(seen)
        if not above(times, 1 / ALIKE) or not below(times, ALIKE):
            continue
        repair, alike = case.by_float32(coarse), COARSER[1:]
        effect = case.gone(repair)
        finding = Finding("precision", coarse, effect, (seen,), alike=alike, repair=repair)
        return Look((seen,), (finding,))
    if not evidence:
        return NotTested(what, f"needs {PLAIN}:<dtype>", "run without --no-noise-floor")
    return Look(tuple(evidence))


def far_side(case: Case) -> Look | NotTested:
    """Look which side is far from float32, measured against the other side."""
    legs = of_two_precisions(case)
    if legs is None or case.reference is None:
        reason = f"needs {REFERENCE}, and {PLAIN}:<dtype> where the sides' dtypes differ"
        return NotTested("distance from float32", reason, "run without --no-noise-floor")
    engine, trainer = (
        np.minimum(np.abs(leg), float(np.quantile(np.abs(leg[case.kept]), TAIL)))
        for leg in legs[:2]
    )
    ratios = {
        "engine": case.ratio(engine, legs.times * trainer + EXACT_FLOOR),
        "trainer": case.ratio(legs.times * trainer, engine + EXACT_FLOOR),
    }
    side: Side = "engine" if ratios["engine"].value >= 1 else "trainer"
    what = f"distance of the {side} from float32 over the other side's"
    what += "" if legs.times == 1 else ", over that of their precisions"
    evidence = (Evidence(what, ratios[side].value, "0.9 to 1.1"),)
    if not above(ratios[side], FAR):
        return Look(evidence)
    repair = case.by_float32(side)
    effect = case.gone(repair)
    if not above(effect, 0.1):
        return Look(evidence)
    alike: tuple[str, ...] = ANY
    if exact_side(case) is not None:
        alike = (*alike, *COARSER)
    elif side == "engine" and agree_in_float32(case):
        alike = ("fp8-kv", "decode-vs-prefill", "prefix-cache-stale", "quantised-rollout")
    # The reference is the trainer's model code: that may be what is off.
    unsure = side == "engine" and case.float32_name not in case.others
    finding = Finding("side-off", "either" if unsure else side, effect, evidence, repair=repair,
                      alike=tuple(dict.fromkeys(alike)))  # fmt: skip
    return Look(evidence, (finding,))


DETECTORS = (
    Detector(
        "implementation",
        "function",
        ("function-differs", "side-off", "onset", "nondeterminism", *BOUNDARIES.values()),
        implementation,
        "both implementations in float32",
        39,
    ),
    Detector(
        "precision",
        "function",
        ("precision",),
        precision,
        f"the passes {REFERENCE} and {PLAIN}:<dtype>",
        49,
    ),
    Detector("far-side", "function", ("side-off",), far_side, f"the pass {REFERENCE}", 51),
)
