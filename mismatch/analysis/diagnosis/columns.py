"""Are the numbers of both sides natural logarithms of probabilities? Asked before anything else.

Each test needs nearly all values, so that no fault of an engine or a trainer looks like it: negated
values, probabilities, logarithms to base 2 or 10, and one number everywhere are mistakes of whoever
wrote the numbers.
"""

from __future__ import annotations

import numpy as np

from mismatch.types import Check, Floats, Scoring

LEAST = 32  # tokens
NEARLY_ALL = 0.999
CERTAIN = 1e-3  # nats: values nearer to 0 tell nothing of their sign or base
TELLING = 0.1  # nats, from which the quotient of two values tells a base
CLOSE = 0.03  # of the quotient that a base gives, for its median
SPREAD = 0.1  # of it, for the distance of its quartiles; a temperature spreads it more
BASES = {"2": np.log(2.0), "10": np.log(10.0)}


def log_scale(left: Scoring, right: Scoring) -> Check:
    """Check that both sides hold natural logarithms of probabilities."""
    named = zip(("the rollout side", "the trainer"), (left, right), strict=True)
    sides = [(who, side.logprobs.astype(np.float64)) for who, side in named]
    name = "logprob-scale"
    if len(sides[0][1]) < LEAST or len(sides[0][1]) != len(sides[1][1]):
        return Check(name, "not_tested", f"needs {LEAST} tokens")
    found, fixes = [], list[str]()
    for (side, values), (_, others) in (sides, sides[::-1]):
        if not np.isfinite(values).all() or not np.isfinite(others).all():
            continue
        kind = _kind(values, others)
        # A greedy engine may say 0 of every token, a trainer never: its column was not filled.
        if side == "the trainer" and not np.ptp(values) and np.ptp(others):
            number = values[0] + 0.0  # -0.0 is 0
            kind = f"one number, {number:g}, at every token", "write what the trainer computed"
        if kind:
            found.append(f"{side} holds {kind[0]}")
            fixes += [kind[1]] * (kind[1] not in fixes)
    if not found:
        based = _based(sides[0][1], sides[1][1])
        if based:
            side, base = sides[based[0]][0], based[1]
            found.append(f"{side} holds logarithms to base {base}: each value is the other side's "
                         f"divided by ln {base}")  # fmt: skip
            fixes.append(f"multiply them by ln {base} = {BASES[base]:.6f}")
    if found:
        return Check(name, "failed", "; ".join(found), "; ".join(fixes))
    return Check(name, "passed", "both sides hold natural logarithms of probabilities")


def _kind(values: Floats, others: Floats) -> tuple[str, str] | None:
    """Return what values without a minus are, and the fix; None for logarithms."""
    telling = np.abs(values) > CERTAIN
    if not telling.any() or (values[telling] > 0).mean() < NEARLY_ALL:
        return None
    negated = "negated log-probabilities: nearly every value is above 0", "write them times -1"
    if values.max() > 1:
        return negated
    # All are at most 1, which certain tokens are as well: the other side tells, where it is right.
    if (others <= 0).mean() >= NEARLY_ALL:
        near_negated = np.abs(values + others).mean()
        if near_negated < np.abs(values - np.exp(others)).mean():
            return negated
    return "probabilities: every value is from 0 to 1", "write their natural logarithms"


def _based(left: Floats, right: Floats) -> tuple[int, str] | None:
    """Return which side (0 or 1) has logarithms to another base, and the base."""
    telling = (left < -TELLING) & (right < -TELLING)
    if telling.sum() < LEAST:
        return None
    quotient = right[telling] / left[telling]
    low, middle, high = np.quantile(quotient, (0.25, 0.5, 0.75))
    for base, factor in BASES.items():
        for side, expected in ((0, factor), (1, 1 / factor)):
            if abs(middle / expected - 1) < CLOSE and (high - low) / expected < SPREAD:
                return side, base
    return None
