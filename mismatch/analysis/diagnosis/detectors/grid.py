"""The dtype of the last steps, read off the numbers: log-probabilities on a bf16 or fp16 grid."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mismatch.analysis.cause_results import Evidence, Side
from mismatch.analysis.diagnosis.case import Case, above
from mismatch.analysis.diagnosis.detector import Detector, Finding, Look
from mismatch.types import Floats, NotTested

BITS = {"bf16": 8, "fp16": 11}  # of the significand
MIN_TOKENS = 64
SMALLEST = 0.01  # nats; float32 itself leaves few bits of a log-probability nearer to 0


def grid(case: Case) -> Look | NotTested:
    """Judge whether one side's log-probabilities were rounded to 16 bits, and what that costs."""
    sides: dict[Side, Floats] = {"engine": case.left, "trainer": case.right}
    useful = {name: v[(np.abs(v) > SMALLEST) & case.kept] for name, v in sides.items()}
    if min(map(len, useful.values())) < MIN_TOKENS:
        return NotTested("dtype of the log-probabilities", f"needs {MIN_TOKENS} beyond {SMALLEST}")
    evidence: list[Evidence] = []
    findings: list[Finding] = []
    for side, values in useful.items():
        mantissa, _ = np.frexp(values)
        scaled = {name: mantissa * 2.0**bits for name, bits in BITS.items()}
        shares = {name: float((each == np.round(each)).mean()) for name, each in scaled.items()}
        name = "bf16" if shares["bf16"] > 0.98 else "fp16"
        evidence.append(
            Evidence(
                f"share of the {side}'s log-probabilities that {name} holds", shares[name], "0"
            )
        )
        if shares[name] <= 0.98:
            continue
        exponent = np.frexp(sides[side])[1]
        step = 2.0 ** (exponent.astype(float) - BITS[name])
        lost = step / 4  # mean |error| of rounding to the nearest
        effect = case.share(np.maximum(np.abs(case.delta) - lost, 0.0))
        # Drowned in other differences it is as certain, and has no share.
        shown = tuple(evidence[-1:])
        finding = Finding("bf16-logprobs", side, None, shown, alike=("bf16-lm-head",))
        if above(effect, 0.05):
            repair = case.moved(side, np.clip(case.delta, -lost, lost), exact=False)
            finding = replace(finding, effect=effect, repair=repair)
        findings.append(finding)
    return Look(tuple(evidence), tuple(findings))


DETECTORS = (Detector("grid", "semantics", ("bf16-logprobs",), grid, order=30),)
