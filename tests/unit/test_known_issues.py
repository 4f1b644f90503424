"""A sample of the known-issues benchmark: faults of pairing on drawn pairs, and no alarm without.

The whole of it (real engines, FSDP2, three strengths) is benchmarks/known_issues.py.
"""

import numpy as np
import pytest

from benchmarks.known_faults import FAULTS, packed_without_bounds
from mismatch.analysis.diagnosis.detector import detectors
from mismatch.analysis.diagnosis.detectors import splices
from mismatch.analysis.diagnosis.ranking import diagnose
from tests import drawn_pair as drawn


@pytest.fixture(scope="module")
def faults():
    return {fault.name: fault for fault in FAULTS}


@pytest.mark.parametrize(
    "name",
    [
        "shift",
        "far shift",
        "mask one token off",
        "other rows",
        "appended end at 0.0",
        "appended end, not sampled",
        "end counted on one side",
        "turn encoded again",
        "fused cross-entropy",
        "16-bit log-softmax",
    ],
)
def test_a_planted_issue_is_named_first_and_undeclared(faults, name):
    fault = faults[name]
    for seed, strength in enumerate(fault.strengths):
        case = drawn.draw(50 + seed).case()
        planted = fault.plant(case, strength, np.random.default_rng(seed))
        ranked = diagnose(planted, detectors()).ranked
        assert ranked[0].id in fault.expected, strength
        assert fault.side in ("", ranked[0].side), strength


def test_every_issue_names_its_repository_and_number(faults):
    for fault in faults.values():
        for issue in fault.issues:
            repository, _, number = issue.partition("#")
            assert repository.count("/") == 1
            assert number.isdigit()


@pytest.mark.parametrize(("at", "tokens"), [(0, 1), (5, 2), (20, -3)])
def test_place_and_number_of_added_tokens_are_those_that_were_planted(at, tokens):
    rng = np.random.default_rng(0)
    left = rng.normal(-2, 1, 60)
    right = left + 0.001 * rng.normal(size=60)
    moved = np.concatenate([right[:at], rng.normal(-2, 1, max(tokens, 0)),
                            right[at - min(tokens, 0):]])[:60]  # fmt: skip
    moved = np.concatenate([moved, np.full(60 - len(moved), -3.0)])
    position, shift = splices._split(left, moved)
    assert shift == tokens
    assert position == pytest.approx(at, abs=max(1, -tokens))  # dropped tokens fit nowhere


def test_a_row_that_is_off_throughout_is_no_splice():
    rng = np.random.default_rng(0)
    left, right = rng.normal(-2, 1, (2, 60))
    assert splices._split(left, right) is None


def test_a_far_last_token_is_an_end_and_no_added_token(faults):
    case = faults["appended end, not sampled"].plant(
        drawn.draw(3).case(), 6.0, np.random.default_rng(0)
    )
    assert [cause.id for cause in diagnose(case, detectors()).ranked] == ["appended-eos"]


def test_packing_without_bounds_hands_the_model_no_positions():
    """The fault is planted where a pass collates its micro-batches, and taken out again."""
    from mismatch.specs import TrainSpec
    from mismatch.training.packing import MicroBatch
    from mismatch.training.scorer import ForwardOptions
    from mismatch.training.sequence_parallel import SequenceParallel
    from mismatch.training.validate import to_device

    rollout = drawn.draw(1).case().rollout

    def positions():
        group, spec = MicroBatch((0, 1), 0), TrainSpec("tiny-gpt-oss", layout="packing")
        alone = SequenceParallel(1, 0, 0, 1)
        options = ForwardOptions(sampling=rollout.sampling)
        return to_device(rollout, group, spec, options, "cpu", None, alone).batch.position_ids

    with packed_without_bounds():
        assert positions() is None
    assert positions() is not None
