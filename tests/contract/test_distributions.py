"""Every engine that gives whole distributions gives those of the law that it samples from.

In float32 they are a plain forward's logits under that law, at every position, whatever batching,
chunks and preemption did; and the positions are the seeded choice, the same for every engine.
"""

from __future__ import annotations

import numpy as np
import pytest

from mismatch.captures import priority
from mismatch.types import Sampling
from tests.conftest import grid
from tests.contract.conftest import LAWS, Reference
from tests.contract.test_engines import SAME_IN_FP32, SHOWN, Runs, law_logprobs

# Greedy and truncated laws among them; "chunked" is about experts, and vLLM's alone.
EVERY_LAW = [(engine, law) for engine in ("vllm", "transformers") for law in LAWS]
every_law = pytest.mark.parametrize(
    ("engine", "law"), grid(EVERY_LAW, *(pair for pair in SHOWN if pair[0] != "sglang"))
)
POSITIONS = 512


@every_law
def test_the_positions_are_the_seeded_choice(engine: str, law: str, run_of: Runs) -> None:
    run = run_of(engine, law)
    found = run.decode.distributions
    assert found is not None
    rollout = run.rollout
    actions = rollout.actions
    sequence = rollout.sequence_of_token[actions]
    index = np.arange(len(actions)) - np.searchsorted(sequence, sequence)
    numbers = priority(run.sampling.seed, sequence, index)
    chosen = np.sort(np.argsort(numbers)[: min(POSITIONS, len(actions))])
    # What was computed past a sequence's end took a place, and was dropped.
    assert set(found.positions) <= set(chosen)
    assert len(found.positions) >= 0.9 * len(chosen)


@every_law
def test_they_are_the_law_of_a_plain_forward(
    engine: str, law: str, run_of: Runs, reference: Reference
) -> None:
    run = run_of(engine, law)
    rollout, found = run.rollout, run.decode.distributions
    assert found is not None
    assert found.whole
    actions = rollout.actions[found.positions]
    sequences = rollout.sequence_of_token[actions]
    sampling: Sampling = run.sampling
    off = []
    for n in np.unique(sequences):
        start, end = rollout.offsets[n], rollout.offsets[n + 1]
        rows = reference.logits(rollout.token_ids[start:end])[actions[sequences == n] - start - 1]
        expected = np.exp(law_logprobs(rows, sampling))
        given = np.exp(found.law()[sequences == n])
        off.append(np.abs(given - expected).max(axis=1))
    gaps = np.concatenate(off)
    assert np.median(gaps) < 1e-6
    # A tie at an expert, or at the edge of top-p, may go the other way by rounding alone.
    assert np.mean(gaps < SAME_IN_FP32) > 0.98
