"""A rank of the trainer that draws noise in every pass, and one that computes otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mismatch.analysis.cause_results import Cause
from mismatch.analysis.diagnosis.detector import detectors
from mismatch.analysis.diagnosis.ranking import diagnose
from mismatch.keys import PLAIN, REFERENCE, REPEATED, TRAINER_FLOAT32, Key
from mismatch.types import RANK, Floats, Scoring
from tests import drawn_pair as drawn

WHAT = "rank of the trainer that is off"


def first_cause(wrong: tuple[int, ...], by_chance: bool) -> Cause:
    """Of a trainer on two ranks, of which some are off: by other noise in each pass, or by one."""
    case, rng = drawn.draw(3).case(), np.random.default_rng(7)
    rank = (case.sequence % 2).astype(np.float64)
    fault = 0.1 * rng.standard_normal(len(rank))

    def off(values: Floats) -> Floats:
        noise = 0.1 * rng.standard_normal(len(rank)) if by_chance else fault
        size = np.where(np.isin(rank, wrong), np.minimum(-values, 1.0), 0.0)  # certain: no room
        return values + size * noise

    train = replace(case.trainer, logprobs=off(case.trainer.logprobs), extra={RANK: rank})
    again = replace(train, name=REPEATED, logprobs=off(case.trainer.logprobs))
    reference = case.others[REFERENCE]
    exact = Scoring(TRAINER_FLOAT32, reference.token_ids, off(reference.logprobs), {})
    others = {**case.others, REPEATED: again, TRAINER_FLOAT32: exact}
    broken = type(case).of(case.rollout, case.engine, train, others)
    return diagnose(broken, detectors()).ranked[0]


@pytest.mark.parametrize("wrong", [(1,), (0,), (0, 1)])
def test_noise_of_a_rank_is_named_with_it_and_no_function(wrong: tuple[int, ...]) -> None:
    cause = first_cause(wrong, by_chance=True)
    assert (cause.id, cause.side, cause.status) == ("nondeterminism", "trainer", "confirmed")
    named = [item.value for item in cause.evidence if item.what == WHAT]
    assert named == ([str(wrong[0])] if len(wrong) == 1 else [])


def test_what_every_pass_repeats_is_a_function_of_that_rank() -> None:
    cause = first_cause((1,), by_chance=False)
    assert (cause.id, cause.side) == ("function-differs", "trainer")
    assert [item.value for item in cause.evidence if item.what == WHAT] == ["1"]


def test_noise_of_the_size_of_rounding_hides_no_function() -> None:
    """Kernels that add in any order move each pass by its rounding; the function is wrong too."""
    case, rng = drawn.draw(3).case(), np.random.default_rng(7)
    reference = case.others[REFERENCE]
    plain = Key.of(PLAIN, precision="bf16")
    size = np.minimum(-reference.logprobs, 1.0)  # certain: no room
    rounding, fault = 0.03 * size * rng.standard_normal((2, len(size)))
    noise = 0.03 * size * rng.standard_normal((2, len(size)))
    passes = [case.trainer.logprobs + fault + each for each in noise]
    train = replace(case.trainer, logprobs=passes[0])
    exact = Scoring(TRAINER_FLOAT32, reference.token_ids, reference.logprobs + fault, {})
    facts = {"dtype": "bf16"}
    made = Scoring(plain, reference.token_ids, reference.logprobs + rounding, facts)
    again = replace(train, name=REPEATED, logprobs=passes[1])
    others = {**case.others, REPEATED: again, TRAINER_FLOAT32: exact, plain: made}
    broken = type(case).of(case.rollout, case.engine, train, others)
    found = {cause.id for cause in diagnose(broken, detectors()).ranked}
    assert "nondeterminism" not in found
    assert "function-differs" in found
