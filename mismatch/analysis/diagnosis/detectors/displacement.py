"""Function or rounding? The displacement of the log-odds, and each side's distance from float32.

eps = logit(p_train) - logit(p_rollout). Its spread hardly depends on confidence where weights or
rounding differ, and is far larger on confident tokens where the two sides compute other functions
of the context (rope, window, sinks, softcap, template).
"""

from __future__ import annotations

import numpy as np

from mismatch.analysis.diagnosis.case import Case, above
from mismatch.analysis.diagnosis.detector import Detector, Evidence, Finding, Look, Repair, Side
from mismatch.run.scorings import FLOAT32, REFERENCE
from mismatch.types import Bools, Floats, NotTested

CONFIDENT = (0.5, 0.9)
UNLIKELY = 0.1
MIN_TOKENS = 40
NO_ROUNDING = 1e-5  # nats that a float32 pass may be away from another one
SAME = 0.01  # of the engine's distance, that two implementations may differ by in float32
RISING = 7.0
FAR = 1.5  # times the other side's distance from float32; clean runs of one precision: 0.93 to 1.02
FUNCTIONS = ("rope-config", "yarn-attention-factor", "attention-sinks", "sliding-window",
             "logit-softcap", "template-drift", "packing-leak", "lora-scale", "fp8-kv")  # fmt: skip
WEIGHTS = ("stale-weights", "tied-head-stale", "experts-differ", "lora-scale", "norm-eps",
           "quantised-rollout", "quantised-module-list", "fp8-kv")  # fmt: skip


def log_odds(logprobs: Floats) -> Floats:
    """logit(p) of a log-probability, [A]."""
    value = np.minimum(logprobs, -1e-9)
    return np.asarray(value - np.log(-np.expm1(value)))


def spread_ratio(case: Case) -> tuple[float, int, int]:
    """Interquartile range of eps at p in 0.5 to 0.9 over that below 0.1, and both counts."""
    eps = np.clip(log_odds(case.right) - log_odds(case.left), -30, 30)
    p = np.exp(np.minimum(case.left, 0.0))
    confident = (p > CONFIDENT[0]) & (p < CONFIDENT[1]) & case.kept
    unlikely = (p < UNLIKELY) & case.kept
    wide, narrow = _iqr(eps, confident), _iqr(eps, unlikely)
    ratio = wide / narrow if narrow > 0 else float("nan")
    return ratio, int(confident.sum()), int(unlikely.sum())


def _iqr(values: Floats, where: Bools) -> float:
    if where.sum() < MIN_TOKENS:
        return float("nan")
    low, high = np.percentile(values[where], [25, 75])
    return float(high - low)


def displacement(case: Case) -> Look | NotTested:
    """Whether the log-odds move more where both sides are confident, and which side moved."""
    ratio, confident, unlikely = spread_ratio(case)
    if min(confident, unlikely) < MIN_TOKENS:
        have = f"{confident} and {unlikely}"
        reason = f"needs {MIN_TOKENS} confident and {MIN_TOKENS} unlikely tokens, there are {have}"
        return NotTested("log-odds displacement", reason, "sample more prompts: --num-prompts")
    if not np.isfinite(ratio):
        return NotTested("log-odds displacement", "the two sides agree on unlikely tokens")
    evidence = (Evidence("spread of the log-odds, confident over unlikely", ratio, "1 to 4"),)
    legs = _legs(case)
    if ratio < RISING or legs is not None:  # with float32 at hand the other detector decides
        return Look(evidence)
    finding = Finding("function-differs", "either", None, evidence, alike=FUNCTIONS)
    return Look(evidence, (finding,) if above(case.mean(np.abs(case.delta)), 0.01) else ())


def _legs(case: Case) -> tuple[Floats, Floats] | None:
    """Both sides' differences from float32; None where there is no common yardstick."""
    reference = case.reference
    kinds = [case.engine.fingerprint.get("dtype"), case.trainer.fingerprint.get("dtype")]
    if reference is None or (None not in kinds and kinds[0] != kinds[1]):
        return None
    legs = case.left - reference, case.right - reference
    sizes = sorted(float(np.abs(leg[case.kept]).mean()) for leg in legs)
    # A side that is in float32 itself has no rounding to hold against.
    return legs if sizes[0] > NO_ROUNDING else None


def _agree_in_float32(case: Case) -> bool:
    """Whether the engine started in float32 computes what the reference computes: then its distance
    is of its kernels, its cache, or what happened to its numbers later."""
    exact = case.others.get(f"{case.engine.name.partition(':')[0]}:{FLOAT32}")
    reference = case.reference
    if exact is None or reference is None:
        return False
    gap, leg = np.abs(reference - exact.logprobs), np.abs(case.left - reference)
    return float(gap[case.kept].mean()) < SAME * float(leg[case.kept].mean())


def far_side(case: Case) -> Look | NotTested:
    """Which side stands far from float32, and whether its weights or its function differ."""
    legs = _legs(case)
    if legs is None:
        return NotTested(
            "distance from float32",
            f"needs {REFERENCE} and both sides in one dtype",
            "drop --no-noise-floor",
        )
    limits = [float(np.quantile(np.abs(leg[case.kept]), 0.995)) for leg in legs]
    engine, trainer = (
        np.minimum(np.abs(leg), limit) for leg, limit in zip(legs, limits, strict=True)
    )
    ratios = {
        "engine": case.ratio(engine, trainer + 1e-9),
        "trainer": case.ratio(trainer, engine + 1e-9),
    }
    side: Side = "engine" if ratios["engine"].value >= 1 else "trainer"
    spread, _confident, _unlikely = spread_ratio(case)
    evidence = [Evidence(f"distance of the {side} from float32 over the other side's",
                         ratios[side].value, "0.9 to 1.1")]  # fmt: skip
    if np.isfinite(spread):
        evidence.append(
            Evidence("spread of the log-odds, confident over unlikely", spread, "1 to 4")
        )
    if not above(ratios[side], FAR):
        return Look(tuple(evidence))
    # The side at fault replaced by float32: what remains is the other side's own rounding.
    good = legs[1] if side == "engine" else -legs[0]
    effect = case.share(good)
    if not above(effect, 0.1):
        return Look(tuple(evidence))
    reference = case.reference
    assert reference is not None
    repaired = (reference, case.right) if side == "engine" else (case.left, reference)
    rising = spread >= RISING
    unsure = not np.isfinite(spread)
    alike = FUNCTIONS + WEIGHTS if unsure else FUNCTIONS if rising else WEIGHTS
    cause = "function-differs" if rising else "weights-differ"
    if unsure or (side == "engine" and _agree_in_float32(case)):
        cause = "side-off"
    return Look(
        tuple(evidence),
        (Finding(cause, side, effect, tuple(evidence), alike=alike, repair=Repair(*repaired)),),
    )


DETECTORS = (
    Detector("displacement", "function", ("function-differs",), displacement, order=50),
    Detector(
        "far-side",
        "function",
        ("function-differs", "weights-differ", "side-off"),
        far_side,
        f"the pass {REFERENCE}",
        51,
    ),
)
