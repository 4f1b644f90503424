"""A side against itself: the trainer scored again, an engine's decode against its prefill.

These passes are experiments that the run has made: what they remove is confirmed.
"""

from __future__ import annotations

import numpy as np

from mismatch.analysis.cause_results import Evidence
from mismatch.analysis.diagnosis.case import FEW_PROMPTS, Case, Repair, above
from mismatch.analysis.diagnosis.detector import Detector, Finding, Look
from mismatch.analysis.diagnosis.legs import ranks_off
from mismatch.analysis.diagnosis.twins import Odd, odd_pairs, twins_of
from mismatch.keys import ALONE, GRAD, PLAIN, REGROUPED, REPEATED, Key
from mismatch.types import Floats, NotTested

PASSES = {
    ALONE: "packing-leak",
    REGROUPED: "microbatch-dependence",
    GRAD: "train-eval-paths",
    REPEATED: "nondeterminism",
}
OWN = 1.6  # times the side's rounding, that a side may move against itself; two roundings: 1.4
LEAST = 1e-4  # nats, under which no pass moves enough to look for a cause
FAR = 5.0  # the same of one prompt; seen of clean runs: 1
CLEAR = 0.3
LEAST_PROMPTS = 3  # in which the same tokens have several values, or that move by far


def trainer_itself(case: Case) -> Look | NotTested:
    """Judge whether the trainer moves against itself by more than the trainer's rounding."""
    passes = {name: case.others[name] for name in PASSES if name in case.others}
    if not passes:
        return NotTested(
            "the trainer against itself", "no second pass", "run without --no-noise-floor"
        )
    evidence: list[Evidence] = []
    findings: list[Finding] = []
    for name, other in passes.items():
        moved = other.logprobs - case.trainer.logprobs
        of_gap = case.ratio(np.abs(moved), np.abs(case.delta) + 1e-12)
        evidence.append(Evidence(f"mean |{name} - trainer| over mean |delta|", of_gap.value))
        own = _own_rounding(case, other.logprobs)
        large = above(case.mean(np.abs(moved)), LEAST)
        if own is None:
            loud = large and above(of_gap, 1.0)
        else:
            of_rounding = case.ratio(np.abs(moved), own + 1e-12)
            evidence.append(
                Evidence(
                    "the same over the nearer pass's distance from float32",
                    of_rounding.value,
                    "below 1.4",
                )
            )
            loud = large and above(of_rounding, OWN)
            loud |= of_rounding.value > OWN and _far_prompts(case, moved, own) >= LEAST_PROMPTS
        if not loud:
            continue
        effect = case.share(case.delta + moved)
        shown = (*evidence[-2 if own is not None else -1 :], *ranks_off(case, np.abs(moved)))
        repair = Repair(case.left, case.right + moved) if above(effect, 0.05) else None
        if name == REPEATED and case.reference is not None:  # the other pass is as far off
            repair = case.by_float32("trainer")
            effect = case.gone(repair)
        if name == REGROUPED and any(finding.cause == PASSES[ALONE] for finding in findings):
            continue  # other packs leak in another way: the same cause
        packed = case.trainer.fingerprint.get("layout") == "packing"
        cause = PASSES[REGROUPED] if name == ALONE and not packed else PASSES[name]
        findings.append(
            Finding(cause, "trainer", effect, shown, confirmed=above(effect, CLEAR), repair=repair)
        )
    return Look(tuple(evidence), tuple(findings))


def _far_prompts(case: Case, moved: Floats, own: Floats) -> int:
    """Return how many prompts move by far more than rounding: a batch that spoils few of its rows
    leaves the mean without a certain interval."""
    count = case.by_prompt(np.ones(len(own)))
    rounding = np.maximum(case.by_prompt(own), count * own[case.kept].mean())
    return int((case.by_prompt(np.abs(moved)) > FAR * rounding + count * LEAST).sum())


def _own_rounding(case: Case, other: Floats) -> Floats | None:
    """|distance from float32| of the trainer's pass, of the other one or of a plain forward,
    whichever is nearest: two passes that are off by chance are as far from each other.
    """
    if case.reference is None:
        return None
    plain = case.others.get(Key.of(PLAIN, precision=case.trainer.fingerprint.get("dtype") or ""))
    passes = [case.trainer.logprobs, other, *([] if plain is None else [plain.logprobs])]
    legs = [np.abs(logprobs - case.reference) for logprobs in passes]
    return min(legs, key=lambda leg: float(leg[case.kept].mean()))


def decode_path(case: Case) -> Look | NotTested:
    """How much goes when the engine scores its tokens in one prefill and not token by token."""
    prefill, what = case.prefill, "decode against prefill"
    if prefill is None:
        return NotTested(what, "no rescoring by the engine", "run without --no-prefill")
    if case.engine.fingerprint.get("logprobs_penalised"):
        return NotTested(
            what, "prefill has no repetition penalty", "run without --repetition-penalty"
        )
    moved = prefill.logprobs - case.engine.logprobs
    repair = case.moved("engine", moved)
    effect = case.gone(repair)
    own = case.ratio(np.abs(moved), np.abs(case.delta) + 1e-12)
    evidence = (
        Evidence("share of mean |delta| gone against the engine's prefill", effect.value, "0"),
        Evidence("mean |prefill - decode| over mean |delta|", own.value),
    )
    rounding = _own_rounding(case, prefill.logprobs)
    # By its interval: choices of experts that flipped in a few prompts are no separate path.
    loud = rounding is None or above(case.ratio(np.abs(moved), rounding + 1e-12), OWN)
    if not above(effect, CLEAR) or not loud or not case.beyond_rounding(case.kept):
        return Look(evidence)
    cached = case.engine.fingerprint.get("kv_cache_dtype")
    alike = (
        ("fp8-kv", "fp8-kv-tile")
        if cached and "fp8" in str(cached)
        else ("spec-decode", "prefix-cache-stale")
    )
    finding = Finding("decode-vs-prefill", "engine", effect, evidence, confirmed=True,
                      alike=alike, repair=repair)  # fmt: skip
    return Look(evidence, (finding,))


def samples_alike(case: Case) -> Look | NotTested:
    """Look whether the trainer gives one token after the same tokens several values.

    The responses of a prompt differ later, and so do their lengths, their padding and their
    neighbours in a batch: a value that moves with these is of the batch.
    """
    what = "the same tokens in several rows"
    twins = twins_of(case)
    if len(np.unique(case.prompt[twins.first[twins.same]])) < FEW_PROMPTS:
        return NotTested(what, f"needs {FEW_PROMPTS} prompts whose responses begin alike")
    odd = odd_pairs(case, twins)
    same = (odd.engine & twins.same, odd.trainer & twins.same)
    prompts = len(np.unique(case.prompt[twins.first[same[1]]]))
    evidence = (
        Evidence("pairs of one token after the same tokens", int(twins.same.sum())),
        Evidence("of these, pairs that the trainer alone sets apart", int(same[1].sum()), "0"),
        Evidence("prompts that these are of", prompts, "0"),
    )
    if Odd(*same).side != "trainer" or prompts < LEAST_PROMPTS:
        return Look(evidence)
    apart = np.zeros(len(case.left), bool)
    apart[twins.first[same[1]]] = apart[twins.second[same[1]]] = True
    finding = Finding("microbatch-dependence", "trainer", None, evidence,
                      alike=("packing-leak", "position-ids"),
                      repair=Repair(case.left, case.right, ~apart))  # fmt: skip
    return Look(evidence, (finding,))


DETECTORS = (
    Detector("samples-alike", "trainer", ("microbatch-dependence",), samples_alike,
             "several samples a prompt", 16),
    Detector("trainer-itself", "trainer", tuple(PASSES.values()), trainer_itself,
             "a second pass of the trainer", 15),
    Detector("decode-path", "engine", ("decode-vs-prefill",), decode_path,
             "the engine's rescoring", 23),
)  # fmt: skip
