"""Is one side's logits a multiple of the other's? Read off whole distributions, one number fitted.

softmax(c z) follows from softmax(z) alone: log p_c(x) = c log p(x) - log sum p^c. So a factor that
one side lacks (Granite's logits_scaling, Cohere's logit_scale, an undeclared temperature) leaves
nothing but rounding once it is applied, and no other fault does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mismatch.analysis.cause_results import Evidence, Side
from mismatch.analysis.diagnosis.case import Case, Repair, above
from mismatch.analysis.diagnosis.detector import Detector, Finding, Look
from mismatch.keys import REFERENCE, TRAINER_FLOAT32
from mismatch.types import Bools, Estimate, Floats, Ints, NotTested, Scoring

WHAT = "a factor on the logits"
LEAST = 1e-4  # nats of mean |difference|, below which no factor is looked for
NEARLY_ALL = 0.9  # share of a side's difference that the factor takes out
OTHER = 0.003  # relative, from which a factor is none of 1
DECLARED = 0.02  # relative, by which it may miss what config.json says
REST = 0.01  # probability outside the ids that are kept, at which a position still counts
RANGE = np.log(20.0)  # of factors that are tried, either way
STEPS = 60  # of the search by golden sections, which then knows the factor to 1e-9


class Held(NamedTuple):
    """Whole distributions at some tokens."""

    tokens: Ints
    """Among all action tokens."""
    law: Floats
    """[M, k] log-probabilities that sum to 1."""
    column: Ints
    """[M] of the sampled token."""

    def times(self, factor: float) -> Floats:
        """Return the sampled tokens' log-probabilities [M] with the logits multiplied."""
        rows = factor * self.law
        top = rows.max(axis=1)
        total = top + np.log(np.exp(rows - top[:, None]).sum(axis=1))
        return np.asarray(rows[np.arange(len(rows)), self.column] - total)

    def fitted(self, values: Floats) -> float:
        """Return the factor with which these distributions come nearest to log-probabilities."""

        def apart(log_factor: float) -> float:
            return float(np.abs(self.times(np.exp(log_factor)) - values).mean())

        grid = np.linspace(-RANGE, RANGE, 61)
        best = int(np.argmin([apart(each) for each in grid]))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        golden = (np.sqrt(5.0) - 1.0) / 2.0
        for _ in range(STEPS):
            first, second = high - golden * (high - low), low + golden * (high - low)
            low, high = (low, second) if apart(first) < apart(second) else (first, high)
        return float(np.exp((low + high) / 2.0))


def factor(case: Case) -> Look | NotTested:
    """Fit the factor of each side's logits over the reference's, in float32 where the run has it.

    The side whose factor is not 1 is named where the trainer's own float32 shows it, or where
    config.json declares that factor: then the reference applies it as it is declared.
    """
    reference = case.others.get(REFERENCE)
    held = None if reference is None else held_of(reference, case.kept)
    if reference is None or held is None:
        return NotTested(WHAT, f"needs {REFERENCE} with whole distributions", "--exact-kl 512")
    exact = held.times(1.0)
    sides: tuple[tuple[Side, Scoring | None, Scoring], ...] = (
        ("engine", case.others.get(case.float32_name), case.engine),
        ("trainer", case.others.get(TRAINER_FLOAT32), case.trainer),
    )
    temperature, findings = case.rollout.sampling.temperature, list[Finding]()
    evidence: tuple[Evidence, ...] = ()
    field, declared = declared_factor(reference)
    for side, in_float32, as_run in sides:
        values = (in_float32 or as_run).logprobs[held.tokens]
        before = np.abs(values - exact)
        if not np.isfinite(values).all() or float(before.mean()) < LEAST:
            continue
        times = held.fitted(values)
        part = held.times(times)
        seen: tuple[Evidence, ...] = (Evidence(factor_of(side), float(f"{times:.4g}"), "1"),)
        gone = _share(case, held.tokens, values - part, before)
        evidence += (*seen, Evidence("share of its difference that this factor is", gone.value))
        of_temperature = temperature not in (0.0, 1.0) and any(
            abs(times * t - 1.0) < DECLARED for t in (temperature, 1.0 / temperature)
        )
        if of_temperature or abs(times - 1.0) < OTHER or not above(gone, NEARLY_ALL):
            continue
        repair = _repaired(case, side, held.tokens, part - exact)
        known = bool(field) and any(
            abs(times * f - 1.0) < DECLARED for f in (declared, 1.0 / declared)
        )
        advice = ""
        if known:
            advice = (
                f"Apply {field} = {declared:g} of config.json to the {side}'s logits, which are "
                f"{times:.4g} times the reference's."
            )
            seen += (Evidence(f"{field} of config.json", declared),)
        wrong: Side = side if known or side == "trainer" else "either"
        findings.append(
            Finding("logit-scale", wrong, case.gone(repair), evidence + seen[1:], confirmed=True,
                    alike=() if known else ("temperature-semantics",), repair=repair,
                    advice=advice)
        )  # fmt: skip
    return Look(evidence, tuple(findings))


def factor_of(side: Side) -> str:
    """Return the name of the evidence that is the factor of a side's logits."""
    return f"logits of the {side} over the reference's"


def held_of(scoring: Scoring, kept: Bools) -> Held | None:
    """Return the distributions of a scoring at tokens that count; None where it holds none."""
    distributions = scoring.distributions
    if distributions is None:
        return None
    law, tokens = distributions.law(scoring.name), distributions.positions
    column = distributions.column(scoring.token_ids[tokens])
    able = kept[tokens] & np.isfinite(law).all(axis=1)
    if distributions.rest is not None:
        able &= (law[:, -1] < np.log(REST)) & (column < law.shape[1] - 1)
    return Held(tokens[able], law[able], column[able]) if able.any() else None


def declared_factor(reference: Scoring) -> tuple[str, float]:
    """Return the field of config.json that multiplies or divides logits, and its value; "", 1."""
    config: dict[str, Any] = dict(reference.fingerprint.get("config") or {})
    named = config.get("logit_factor") or {}
    return next(((name, float(value)) for name, value in named.items() if value), ("", 1.0))


def _share(case: Case, tokens: Ints, left: Floats, before: Floats) -> Estimate:
    """Return how much of a difference at these tokens is gone where ``left`` is what is left."""
    here = np.isin(np.arange(len(case.left)), tokens)
    residual, whole = np.zeros((2, len(case.left)))
    residual[tokens], whole[tokens] = left, before
    return Case.share(_only(case, here), residual, whole)


def _only(case: Case, here: Bools) -> Case:
    return case.repaired(case.left, case.right, here)


def _repaired(case: Case, side: Side, tokens: Ints, part: Floats) -> Repair:
    """Return a side without what the factor adds, at the tokens with whole distributions."""
    moved = np.zeros(len(case.left))
    moved[tokens] = part
    here = np.isin(np.arange(len(case.left)), tokens)
    if side == "engine":
        return Repair(case.left - moved, case.right, here)
    return Repair(case.left, case.right - moved, here)


DETECTORS = (Detector("factor", "function", ("logit-scale",), factor, "whole distributions", 20),)
