"""Function or rounding? The displacement of the log-odds, and each side's distance from float32.

eps = logit(p_train) - logit(p_rollout). Its spread hardly depends on confidence where weights or
rounding differ, and is far larger on confident tokens where the two sides compute other functions
of the context (rope, window, sinks, softcap, template).
"""

from __future__ import annotations

import numpy as np

from mismatch.analysis.diagnosis.case import Case, above, below, correlation
from mismatch.analysis.diagnosis.detector import Detector, Evidence, Finding, Look, Repair, Side
from mismatch.run.store import FLOAT32, PLAIN, REFERENCE
from mismatch.types import Bools, Floats, NotTested

CONFIDENT = (0.5, 0.9)
UNLIKELY = 0.1
MIN_TOKENS = 40
NO_ROUNDING = 1e-5  # nats that a float32 pass may be away from another one
EXACT_FLOOR = 3e-5  # nats, added to a distance that another one is held against
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
COARSER = ("precision", "trainer-autocast", "bf16-lm-head", "router-precision", "fsdp-cast-inputs",
           "fp8-kv")  # fmt: skip
ALIKE = 1.3  # times a plain forward's, that a side's rounding may be; clean sides: 0.78 to 1.06


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
    # With float32 at hand the other detector decides.
    if ratio < RISING or of_two_precisions(case) is not None:
        return Look(evidence)
    finding = Finding("function-differs", "either", None, evidence, alike=FUNCTIONS)
    return Look(evidence, (finding,) if above(case.mean(np.abs(case.delta)), 0.01) else ())


def legs_of(case: Case) -> tuple[Floats, Floats] | None:
    """Both sides' differences from float32; None where there is no common yardstick.

    Sides of two dtypes have one where one of them is in float32 itself.
    """
    reference = case.reference
    if reference is None or _repaired_by(reference, case):
        return None
    kinds = [case.engine.fingerprint.get("dtype"), case.trainer.fingerprint.get("dtype")]
    legs = case.left - reference, case.right - reference
    finer = min(float(np.abs(leg[case.kept]).mean()) for leg in legs)
    return None if None not in kinds and kinds[0] != kinds[1] and finer > NO_ROUNDING else legs


def _repaired_by(reference: Floats, case: Case) -> bool:
    """Whether a side is the reference only since a cause was taken out: its rounding is lost."""
    sides = (case.left, case.engine.logprobs), (case.right, case.trainer.logprobs)
    near = [[float(np.abs(values - reference)[case.kept].mean()) <= NO_ROUNDING for values in side]
            for side in sides]  # fmt: skip
    return any(now and not before for now, before in near)


def of_two_precisions(case: Case) -> tuple[Floats, Floats, float] | None:
    """Both sides' differences from float32, and how many times the trainer's rounding the engine's
    is expected to be; None where a plain forward of a side's dtype is not known.
    """
    if (legs := legs_of(case)) is not None:
        return *legs, 1.0
    if case.reference is None or _repaired_by(case.reference, case):
        return None
    costs = []
    for side in (case.engine, case.trainer):
        dtype = side.fingerprint.get("dtype")
        plain = case.others.get(f"{PLAIN}:{dtype}")
        if plain is None and dtype != "fp32":
            return None
        cost = 0.0 if plain is None else np.abs(plain.logprobs - case.reference)[case.kept].mean()
        costs.append(max(float(cost), EXACT_FLOOR))
    return case.left - case.reference, case.right - case.reference, costs[0] / costs[1]


def exact_side(case: Case) -> Side | None:
    """The side that is in float32; None where both round, or neither does."""
    legs = legs_of(case)
    if legs is None:
        return None
    engine, trainer = (float(np.abs(leg[case.kept]).mean()) for leg in legs)
    if max(engine, trainer) < FAR * EXACT_FLOOR or min(engine, trainer) > NO_ROUNDING:
        return None
    return "engine" if engine < trainer else "trainer"


def precision(case: Case) -> Look | NotTested:
    """One side in float32, the other as far from it as a plain forward of a lower precision."""
    exact = exact_side(case)
    what = "a side in float32 beside one that rounds"
    if exact is None or case.reference is None:
        return NotTested(what, f"needs {REFERENCE} and one side in float32")
    coarse: Side = "trainer" if exact == "engine" else "engine"
    leg = (case.right if coarse == "trainer" else case.left) - case.reference
    evidence: list[Evidence] = []
    for name, plain in case.others.items():
        cost = np.abs(plain.logprobs - case.reference)
        if not name.startswith(f"{PLAIN}:") or float(cost[case.kept].mean()) < NO_ROUNDING:
            continue
        times = case.ratio(np.abs(leg), cost)
        seen = Evidence(f"distance of the {coarse} from float32 over that of {name}", times.value)
        evidence.append(seen)
        if not above(times, 1 / ALIKE) or not below(times, ALIKE):
            continue
        repaired = (
            (case.left, case.reference) if coarse == "trainer" else (case.reference, case.right)
        )
        effect = case.share(repaired[1] - repaired[0])
        finding = Finding("precision", coarse, effect, (seen,), alike=COARSER[1:],
                          repair=Repair(*repaired))  # fmt: skip
        return Look((seen,), (finding,))
    if not evidence:
        return NotTested(what, f"needs {PLAIN}:<dtype>", "drop --no-noise-floor")
    return Look(tuple(evidence))


def agree_in_float32(case: Case) -> bool:
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
    return sizes[1] / max(sizes[0], NO_ROUNDING)


DETECTORS = (
    Detector("precision", "function", ("precision",), precision,
             f"the passes {REFERENCE} and {PLAIN}:<dtype>", 49),
    Detector("displacement", "function", ("function-differs",), displacement, order=50),
)  # fmt: skip
