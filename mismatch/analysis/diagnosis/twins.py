"""Two samples of one prompt: a log-probability is a function of what came before and of the token.

Responses to one prompt often begin alike. After the same tokens the same next token has one
log-probability on each side, up to rounding, and two different next tokens are of one distribution.
So a side whose values break this is at fault, whatever the other side does: its values are of other
tokens, or they depend on other rows. Where two responses part, the two tokens also tell the
temperature: its constant is the same for both.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mismatch.analysis.cause_results import Side
from mismatch.analysis.diagnosis.case import Case
from mismatch.types import Bools, Floats, Ints

APART = 0.5  # nats between two values that should be one; clean runs lie below 0.3
NEAR = 0.2  # of that distance, that the other side's two values lie apart at most
EQUAL = 0.03  # nats, that two values of one token lie apart by rounding in bf16; seen: 0.03
ENOUGH = 5  # pairs that have to break the rule; by rounding alone none does
UNTOLD = 0.05  # share of the pairs of one token, from which on they are of different contexts
STEP = "step"  # array of a scoring: the training step of each token's sequence
CLEAR = 4.0  # times as many as on the other side


class Twins(NamedTuple):
    """Pairs of action tokens after the same tokens, [P] each, by their places among all."""

    first: Ints
    second: Ints
    same: Bools
    """Whether the two tokens are the same; else the responses part here."""


class Odd(NamedTuple):
    """Pairs that break the rule on one side and keep it on the other."""

    engine: Bools
    trainer: Bools

    @property
    def side(self) -> Side:
        """Return the side whose values are no function of what came before and of the token."""
        engine, trainer = int(self.engine.sum()), int(self.trainer.sum())
        if trainer >= max(ENOUGH, CLEAR * engine):
            return "trainer"
        return "engine" if engine >= max(ENOUGH, CLEAR * trainer) else "either"


def twins_of(case: Case) -> Twins:
    """Return the pairs of tokens, each row next to the one of its prompt that begins most alike."""
    rollout, offsets = case.rollout, case.rollout.offsets
    place = np.full(len(rollout.token_ids), -1, np.int64)  # of a token among the action tokens
    place[rollout.actions] = np.where(case.kept, np.arange(len(rollout.actions)), -1)
    ids = [rollout.token_ids[a:b] for a, b in pairwise(offsets)]
    by_prompt: dict[tuple[int, float], list[int]] = {}
    # Other weights give other values: rows of another step of a recorded run are no twins.
    steps = np.zeros(rollout.n_sequences)
    if (of_token := case.engine.extra.get(STEP)) is not None:
        steps[case.sequence] = of_token
    for row, prompt in enumerate(rollout.distinct_prompts.tolist()):
        by_prompt.setdefault((prompt, steps[row]), []).append(row)
    parts: list[tuple[Ints, Ints, Bools]] = []
    for rows in by_prompt.values():
        ordered = sorted(rows, key=lambda row: ids[row].tolist()) if len(rows) > 1 else []
        for one, other in pairwise(ordered):
            length = min(len(ids[one]), len(ids[other]))
            differ = np.flatnonzero(ids[one][:length] != ids[other][:length])
            until = int(differ[0]) + 1 if len(differ) else length  # with the first that differs
            a, b = (place[offsets[row] : offsets[row] + until] for row in (one, other))
            same = np.arange(until) < (until - 1 if len(differ) else until)
            both = (a >= 0) & (b >= 0)
            parts.append((a[both], b[both], same[both]))
    if not parts:
        empty = np.zeros(0, np.int64)
        return Twins(empty, empty, empty > 0)
    return Twins(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def odd_pairs(case: Case, twins: Twins) -> Odd:
    """Return the pairs whose values differ though they are of one token, or are the same though
    they are of two tokens, on one side alone.

    None where both sides break the rule: then rows differ in more than their tokens (an image, an
    adapter, the version of the weights).
    """
    first, second = twins.first, twins.second
    left, right = (np.abs(side[first] - side[second]) for side in (case.left, case.right))
    broken = min(int((twins.same & (side > APART)).sum()) for side in (left, right))
    if broken > UNTOLD * twins.same.sum():
        nothing = np.zeros(len(first), bool)
        return Odd(nothing, nothing)
    return Odd(_odd(left, right, twins.same), _odd(right, left, twins.same))


def _odd(own: Floats, other: Floats, same: Bools) -> Bools:
    apart = same & (own > APART) & (other < NEAR * own)
    alike = ~same & (other > APART) & (own < EQUAL)
    return np.asarray(apart | alike)
