"""A factor on one side's logits is read off whole distributions; nothing else is taken for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mismatch.analysis.cause_results import Side
from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.detector import value_of
from mismatch.analysis.diagnosis.detectors.factor import factor, factor_of
from mismatch.captures import Distributions
from mismatch.keys import REFERENCE, TRAINER_FLOAT32
from mismatch.types import NotTested, Scoring
from tests import drawn_pair as drawn
from tests.diagnosed import causes

EVERY = 3  # one token in so many has its whole distribution


def scaled(times: float, side: str, declared: float | None = None, rounding: float = 0.02) -> Case:
    """A pair whose ``side`` has its logits multiplied; float32 of both sides, and distributions."""
    pair = drawn.draw(0, rounding=rounding)
    if side == "engine":
        pair.engine = pair.engine * times
    else:
        pair.trainer = pair.trainer * times
    case = pair.case()
    ids, rows = case.engine.token_ids, np.arange(len(case.left))
    exact = drawn.log_law(pair.logits)
    other = drawn.log_law(pair.logits * times)[rows, ids]
    own = {"engine": exact[rows, ids], "trainer": exact[rows, ids], side: other}
    law = exact[::EVERY].astype(np.float32)
    config = {} if declared is None else {"config": {"logit_factor": {"logits_scaling": declared}}}
    reference = replace(
        case.others[REFERENCE],
        distributions=Distributions(rows[::EVERY], law, drawn.VOCABULARY),
        fingerprint=config,
    )
    more = {
        REFERENCE: reference,
        "vllm:fp32": Scoring("vllm:fp32", ids, own["engine"], {}),
        TRAINER_FLOAT32: Scoring(TRAINER_FLOAT32, ids, own["trainer"], {}),
    }
    return replace(case, others=case.others | more)


@pytest.mark.parametrize("times", [0.25, 0.9, 0.99, 1.3, 4.0])
@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_the_factor_and_its_side_are_named_and_no_second_cause(side: Side, times: float) -> None:
    (leading,) = causes(scaled(times, side)).ranked
    # The reference is the trainer's model code: without a declared factor it may be what is wrong.
    assert (leading.id, leading.status) == ("logit-scale", "confirmed")
    assert leading.side == ("either" if side == "engine" else "trainer")
    found = value_of(leading.evidence, factor_of(side))
    assert found == pytest.approx(times, rel=1e-3)
    assert leading.effect is not None
    assert leading.effect.value <= 1.0


@pytest.mark.parametrize("times", [0.25, 4.0])
def test_a_factor_that_config_json_declares_names_the_side_that_lacks_it(times: float) -> None:
    (leading,) = causes(scaled(times, "engine", declared=4.0)).ranked
    assert (leading.side, leading.alike) == ("engine", ())
    assert "logits_scaling" in leading.advice


@pytest.mark.parametrize("times", [1.0, 1.001])
def test_without_a_factor_none_is_named(times: float) -> None:
    assert "logit-scale" not in {cause.id for cause in causes(scaled(times, "engine")).ranked}


def test_other_functions_and_other_weights_are_no_factor() -> None:
    for case in (drawn.other_function(0, 2.0), drawn.other_weights(0, 10), drawn.top_k(0, 4)):
        with_law = scaled(1.0, "engine")
        wanted = {
            name: replace(with_law.others[name], logprobs=case.right) for name in (TRAINER_FLOAT32,)
        }
        mixed = replace(with_law, others=with_law.others | wanted, right=case.right)
        look = factor(mixed)
        assert not isinstance(look, NotTested)
        assert look.findings == ()


def test_without_whole_distributions_nothing_is_said() -> None:
    assert isinstance(factor(drawn.other_weights(0, 5)), NotTested)
