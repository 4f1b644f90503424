"""The contract of every engine over turns: ids stay as they were sampled, whether a response ended
at an end token or at a text, and a float32 forward of the whole sequence gives their logprobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mismatch.models.tokenizers import load_tokenizer
from mismatch.specs import EngineSpec, PromptSpec, RolloutSpec
from mismatch.types import CACHED
from tests.contract.conftest import MODEL, PLAIN, Reference, Run, installed, work
from tests.contract.goes_on import INSERTED, MESSAGE, TEXT
from tests.contract.test_engines import (
    SAME_IN_FP32,
    check_experts,
    expected_logprobs,
    largest,
    settled,
)
from tests.shared import once

LAW = replace(PLAIN, max_tokens=96, samples_per_prompt=2)
GAME = "tests.contract.goes_on:GoesOn"
ENGINES = ("vllm", "sglang", "transformers")
pytestmark = pytest.mark.grid


@pytest.fixture(scope="module", params=ENGINES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    engine: str = request.param
    if not installed(engine):
        pytest.skip(f"engine: {engine} is not installed")
    prompts = PromptSpec(num_prompts=6, environment=GAME, max_turns=3)
    spec = RolloutSpec(EngineSpec(engine, str(MODEL), dtype="fp32"), prompts, LAW)

    def make(directory: Path) -> None:
        done = work(directory, spec)
        assert done.returncode == 0, done.stdout[-3000:]

    return Run(once(tmp_path_factory, f"turns-{engine}", make), engine, LAW)


def spans(run: Run) -> Iterator[tuple[np.ndarray, list[tuple[int, int]]]]:
    """Every sequence with the bounds of its responses."""
    masks = np.split(run.rollout.action_mask, run.rollout.offsets[1:-1])
    for ids, mask in zip(run.rollout.sequences(), masks, strict=True):
        edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
        yield ids, list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def test_a_response_ends_at_a_text_and_goes_on_behind_what_was_inserted(run: Run) -> None:
    chat = load_tokenizer(MODEL)
    text: Callable[..., str] = chat.decode
    inserted = chat(INSERTED, add_special_tokens=False)["input_ids"]
    ended = 0
    for ids, responses in spans(run):
        for (start, end), (after, _) in zip(responses, [*responses[1:], (None, 0)], strict=True):
            whole, but_one = text(ids[start:end]), text(ids[start : end - 1])
            assert TEXT not in but_one
            if TEXT not in whole:
                assert after is None or MESSAGE in text(ids[end:after])
                continue
            ended += 1
            assert after is None or ids[end:after].tolist() == inserted
    assert ended >= 6


def test_logprobs_and_experts_are_those_of_the_whole_sequence(
    run: Run, reference: Reference
) -> None:
    assert run.rollout.turn.max() == 3
    expected = expected_logprobs(run, reference, LAW)
    sure = settled(run, reference)
    assert largest(expected, run.decode.logprobs, sure) < SAME_IN_FP32
    if run.engine != "sglang":
        assert largest(run.decode.logprobs, run.prefill.logprobs, sure) < SAME_IN_FP32
    check_experts(run, reference)


def test_whole_distributions_are_taken_in_every_turn(run: Run) -> None:
    if run.engine == "sglang":
        pytest.skip("not applicable: SGLang gives no whole distributions")
    taken = run.decode.distributions
    assert taken is not None
    turns = run.rollout.turn[run.rollout.actions][taken.positions]
    assert set(turns.tolist()) == {1, 2, 3}
    assert len(taken.positions) >= 0.9 * min(512, run.rollout.n_actions)


def test_what_was_read_from_the_prefix_cache_is_told(run: Run) -> None:
    """SGLang reads whole histories; vLLM captures routes on a CPU without its prefix cache."""
    read = run.decode.extra[CACHED]
    later = run.rollout.turn[run.rollout.actions] > 1
    assert (read[later] > 0).all() == (run.engine == "sglang")
    assert run.engine == "sglang" or not read.any()
