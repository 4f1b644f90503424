"""Each side's distance from float32, and what a plain forward at its precision costs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mismatch.analysis.cause_results import Evidence, Side
from mismatch.analysis.diagnosis.case import Case, above
from mismatch.keys import REFERENCE, yardsticks
from mismatch.types import RANK, Bools, Floats, Scoring

NO_ROUNDING = 1e-5  # nats that two float32 passes of one function may lie apart; seen: 2e-6
EXACT_FLOOR = 3e-5  # nats, added to a distance that others are divided by
CALM = (
    1.3  # ratio of both sides' distances in tokens that a fault leaves alone; clean: 0.78 to 1.06
)
ELSEWHERE = 10.0  # times closer to float32: a rank that is not off where another is
SAME = 0.01  # of the engine's distance, that two implementations may differ by in float32


def ranks_off(case: Case, size: Floats) -> tuple[Evidence, ...]:
    """Return the trainer's ranks that ``size`` [A] nats are of, where they are not of all."""
    rank = case.trainer.extra.get(RANK)
    if rank is None:
        return ()
    count = np.bincount(rank[case.kept].astype(int))
    sums = np.bincount(rank[case.kept].astype(int), size[case.kept])
    means = sums[count > 0] / count[count > 0]
    off = means > means.max() / ELSEWHERE
    if off.all():
        return ()
    named = ", ".join(map(str, np.flatnonzero(count > 0)[off]))
    return (Evidence("rank of the trainer that is off", named, f"none of {len(means)}"),)


def gap_of(name: str) -> str:
    """Return the name of the evidence that says how far a scoring in float32 is off."""
    return f"mean |{name} - {REFERENCE}|, nats"


class Legs(NamedTuple):
    """Both sides' differences from float32, [A] each, nats."""

    engine: Floats
    trainer: Floats
    times: float = 1.0
    """How many times the trainer's rounding the engine's is expected to be."""


def legs_of(case: Case) -> Legs | None:
    """Return both legs where one yardstick serves both sides, else None.

    Sides of two dtypes have one where one of them is in float32 itself.
    """
    reference = case.reference
    if reference is None or _repaired_by(reference, case):
        return None
    kinds = [side.fingerprint.get("dtype") for side in (case.engine, case.trainer)]
    legs = Legs(case.left - reference, case.right - reference)
    finer = min(float(np.abs(leg[case.kept]).mean()) for leg in legs[:2])
    return None if None not in kinds and kinds[0] != kinds[1] and finer > NO_ROUNDING else legs


def _repaired_by(reference: Floats, case: Case) -> bool:
    """Return whether a side is the reference only since a cause was taken out."""
    sides = (case.left, case.engine.logprobs), (case.right, case.trainer.logprobs)
    near = [
        [float(np.abs(values - reference)[case.kept].mean()) <= NO_ROUNDING for values in side]
        for side in sides
    ]
    return any(now and not before for now, before in near)


def plain_for(case: Case, side: Scoring) -> Scoring | None:
    """Return the plain forward that rounds as a side declares to; None where the run has none."""
    names = yardsticks(side.fingerprint, side.fingerprint.get("dtype"), side is case.trainer)
    return next((case.others[name] for name in names if name in case.others), None)


def of_two_precisions(case: Case) -> Legs | None:
    """Return both legs, also of sides that round differently where plain forwards say how much."""
    reference = case.reference
    if reference is None or _repaired_by(reference, case):
        return None
    plains = [plain_for(case, side) for side in (case.engine, case.trainer)]
    same = legs_of(case)
    if same is not None and (plains[0] is plains[1] or None in plains):
        return same
    costs = []
    for side, plain in zip((case.engine, case.trainer), plains, strict=True):
        if plain is None and side.fingerprint.get("dtype") != "fp32":
            return same
        cost = 0.0 if plain is None else np.abs(plain.logprobs - reference)[case.kept].mean()
        costs.append(max(float(cost), EXACT_FLOOR))
    return Legs(case.left - reference, case.right - reference, costs[0] / costs[1])


def agree_in_float32(case: Case) -> bool:
    """Return whether the engine started in float32 computes what the reference computes.

    Then its distance is of its kernels, its cache, or what happened to its numbers later.
    """
    exact, reference = case.others.get(case.float32_name), case.reference
    if exact is None or reference is None:
        return False
    gap, leg = np.abs(reference - exact.logprobs), np.abs(case.left - reference)
    return float(gap[case.kept].mean()) < SAME * float(leg[case.kept].mean())


def imbalance(case: Case, where: Bools) -> float:
    """Return the larger over the smaller of both mean distances in these tokens.

    Infinite where there is no common yardstick.
    """
    legs = legs_of(case)
    if legs is None:
        return float("inf")
    sizes = sorted(float(np.abs(leg[where & case.kept]).mean()) for leg in legs[:2])
    return sizes[1] / max(sizes[0], NO_ROUNDING)


def farther(case: Case, where: Bools) -> Side:
    """Return the side that is farther from float32 in these tokens, by its whole interval."""
    if (legs := legs_of(case)) is None:
        return "either"
    engine, trainer = (np.where(where, np.abs(leg), 0.0) for leg in legs[:2])
    if above(case.ratio(engine, trainer), CALM):
        return "engine"
    return "trainer" if above(case.ratio(trainer, engine), CALM) else "either"
