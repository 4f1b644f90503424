"""Function or rounding? The displacement of the log-odds, and each side's distance from float32.

eps = logit(p_train) - logit(p_rollout). Its spread hardly depends on confidence where weights or
rounding differ, and is far larger on confident tokens where the two sides compute other functions
of the context (rope, window, sinks, softcap, template).
"""

from __future__ import annotations

import numpy as np

from mismatch.analysis.diagnosis.case import Case, above, correlation
from mismatch.analysis.diagnosis.detector import Detector, Evidence, Finding, Look, Repair, Side
from mismatch.run.store import FLOAT32, REFERENCE
from mismatch.types import Bools, Floats, NotTested

CONFIDENT = (0.5, 0.9)
UNLIKELY = 0.1
MIN_TOKENS = 40
NO_ROUNDING = 1e-5  # nats that a float32 pass may be away from another one
SAME = 0.01  # of the engine's distance, that two implementations may differ by in float32
RISING = 7.0
EVEN, UNEVEN = 0.55, 0.45  # median over mean |eps|; weights: 0.7 to 0.9, a context: 0.2 to 0.4
NEARLY, LIKELY = float(np.log(0.99)), float(np.log(0.9))
UNLIKE = 0.5  # correlation of the sides, below which nothing of the one law is left in the other
CALM = 1.3  # ratio of both sides' distances from float32, in tokens that a fault leaves alone
FAR = 1.5  # times the other side's distance from float32; clean runs of one precision: 0.93 to 1.02
FUNCTIONS = ("rope-config", "yarn-attention-factor", "attention-sinks", "sliding-window",
             "logit-softcap", "template-drift", "packing-leak", "lora-scale", "fp8-kv",
             "experts-differ")  # fmt: skip
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


def evenness(case: Case) -> float:
    """Median over mean of |eps|, of tokens of which neither side is nearly certain."""
    open_ = (np.maximum(case.left, case.right) < NEARLY) & case.kept
    if open_.sum() < MIN_TOKENS:
        return float("nan")
    eps = np.abs(log_odds(case.right) - log_odds(case.left))[open_]
    return float(np.median(eps) / eps.mean()) if eps.any() else float("nan")


def tellable(case: Case) -> bool:
    """Whether function and weights can be told apart: something of the one law is left in the
    other, and there are tokens that the context makes likely (an untrained model has none).
    """
    likely = (np.maximum(case.left, case.right) > LIKELY) & case.kept
    return correlation(case) > UNLIKE and int(likely.sum()) >= MIN_TOKENS


def kind(case: Case) -> tuple[str, tuple[str, ...], tuple[Evidence, ...]]:
    """Function, weights, or not to be told, of one side that is off: the cause, what has the same
    mark, and the numbers.

    Another function of the context moves confident tokens most, and few tokens far; other weights
    move all tokens alike.
    """
    spread, even = spread_ratio(case)[0], evenness(case)
    evidence = tuple(
        Evidence(what, value, normal)
        for what, value, normal in (
            ("spread of the log-odds, confident over unlikely", spread, "1 to 4"),
            ("displacement of the log-odds, median over mean", even, ""),
        )
        if np.isfinite(value)
    )
    both = tuple(dict.fromkeys(FUNCTIONS + WEIGHTS))
    clear = np.isfinite(spread) and np.isfinite(even) and tellable(case)
    if spread >= RISING or (clear and even < UNEVEN):
        return "function-differs", FUNCTIONS, evidence
    if clear and even > EVEN:
        return "weights-differ", WEIGHTS, evidence
    return "side-off", both, evidence


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
    legs = legs_of(case)
    if ratio < RISING or legs is not None:  # with float32 at hand the other detector decides
        return Look(evidence)
    finding = Finding("function-differs", "either", None, evidence, alike=FUNCTIONS)
    return Look(evidence, (finding,) if above(case.mean(np.abs(case.delta)), 0.01) else ())


def legs_of(case: Case) -> tuple[Floats, Floats] | None:
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


def imbalance(case: Case, where: Bools) -> float:
    """The larger over the smaller of both sides' mean distances from float32 in these tokens;
    infinite where there is no common yardstick.
    """
    legs = legs_of(case)
    if legs is None:
        return float("inf")
    sizes = sorted(float(np.abs(leg[where & case.kept]).mean()) for leg in legs)
    return sizes[1] / max(sizes[0], 1e-12)


def far_side(case: Case) -> Look | NotTested:
    """Which side stands far from float32, and whether its weights or its function differ."""
    legs = legs_of(case)
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
    cause, alike, numbers = kind(case)
    distance = f"distance of the {side} from float32 over the other side's"
    evidence = (Evidence(distance, ratios[side].value, "0.9 to 1.1"), *numbers)
    if not above(ratios[side], FAR):
        return Look(evidence)
    # The side at fault replaced by float32: what remains is the other side's own rounding.
    good = legs[1] if side == "engine" else -legs[0]
    effect = case.share(good)
    if not above(effect, 0.1):
        return Look(evidence)
    reference = case.reference
    assert reference is not None
    repaired = (reference, case.right) if side == "engine" else (case.left, reference)
    if side == "engine" and _agree_in_float32(case):
        cause = "side-off"
    finding = Finding(cause, side, effect, evidence, alike=alike, repair=Repair(*repaired))
    return Look(evidence, (finding,))


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
