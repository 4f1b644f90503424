"""Where decoding and reading at once give equal bits, few tokens that differ are a fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from mismatch.analysis.diagnosis.pass_checks import engine_agreement
from mismatch.types import Check

from .test_sampling_law import PROMPTS, RESPONSE, SAMPLES, pair

ROLLOUT, DECODE, TRAIN = pair(0)
_rounded = np.random.default_rng(9).normal(0.0, 4e-3, len(TRAIN.logprobs))
REGROUPED = replace(TRAIN, name="fsdp:regrouped", logprobs=TRAIN.logprobs + _rounded)
TOKENS = len(DECODE.logprobs)
OF_PROMPT = SAMPLES * RESPONSE
Move = Callable[[np.ndarray, np.random.Generator], None]


def judged(move: Move, seed: int = 1) -> Check:
    """Return the check of an engine whose decoded values are moved; prefill is right."""
    values = DECODE.logprobs.copy()
    move(values, np.random.default_rng(seed))
    moved = replace(DECODE, logprobs=np.minimum(values, 0.0))
    prefill = replace(DECODE, name="vllm:prefill")
    return engine_agreement(ROLLOUT, moved, prefill, TRAIN, REGROUPED)


def tokens(prompts: int, each: int, nats: float) -> Move:
    """Lower some tokens of some prompts."""

    def move(values: np.ndarray, rng: np.random.Generator) -> None:
        for prompt in rng.choice(PROMPTS, prompts, replace=False):
            values[prompt * OF_PROMPT + rng.choice(OF_PROMPT, each, replace=False)] -= nats

    return move


@pytest.mark.parametrize(
    ("prompts", "each", "nats"),
    [(1, 3, 1.0), (2, 1, 1.0), (3, 1, 1.0), (9, 4, 0.5), (9, 10, 0.3), (5, OF_PROMPT, 0.03)],
)
def test_few_tokens_that_decoding_gets_wrong_fail_and_are_named(
    prompts: int, each: int, nats: float
) -> None:
    check = judged(tokens(prompts, each, nats))
    assert check.status == "failed"
    assert f"in {prompts * each}: sequence" in check.detail
    assert "cache" in check.fix


def test_one_token_is_a_warning_with_its_place() -> None:
    def move(values: np.ndarray, rng: np.random.Generator) -> None:
        values[2 * RESPONSE + 7] -= 1.0

    check = judged(move)
    assert check.status == "warning"
    assert check.detail.endswith("2, position 10")  # behind 3 tokens of the prompt


def rounding(share: float, nats: float = 4e-3) -> Move:
    def move(values: np.ndarray, rng: np.random.Generator) -> None:
        other = rng.random(len(values)) < share
        values[other] += rng.normal(0.0, nats, int(other.sum()))

    return move


def with_flips(values: np.ndarray, rng: np.random.Generator) -> None:
    """Other batches, and experts of three tokens that change places by it."""
    rounding(0.05)(values, rng)
    values[[100, 5000, 9000]] -= 0.5


def heavy(tokens: int) -> Move:
    """Round in few tokens, of which some are far more sensitive than others."""

    def move(values: np.ndarray, rng: np.random.Generator) -> None:
        at = rng.choice(len(values), tokens, replace=False)
        values[at] += 4e-3 * np.exp(rng.standard_normal(tokens)) * rng.standard_normal(tokens)

    return move


@pytest.mark.parametrize("count", [10, 20, 50, 200])
def test_few_tokens_that_round_by_other_sizes_do_not_fail(count: int) -> None:
    found = [judged(heavy(count), seed).status for seed in range(20)]
    assert "failed" not in found
    assert found.count("warning") <= 1


@pytest.mark.parametrize("share", [0.02, 0.05, 0.09, 0.5])
def test_where_most_tokens_are_certain_the_others_are_judged(share: float) -> None:
    """Certain tokens are equal on all sides, and no evidence of equal bits."""
    rng = np.random.default_rng(2)
    certain = rng.random(TOKENS) > share
    passes = [
        replace(side, logprobs=np.where(certain, 0.0, np.minimum(side.logprobs + noise, -1e-3)))
        for side, noise in zip(
            (DECODE, replace(DECODE, name="vllm:prefill"), TRAIN),
            rng.normal(0.0, 4e-3, (3, TOKENS)),
            strict=True,
        )
    ]
    assert engine_agreement(ROLLOUT, *passes).status == "passed"


@pytest.mark.parametrize("move", [lambda values, rng: None, *map(rounding, (0.01, 0.1, 1.0))])
def test_equal_passes_and_those_that_round_in_other_batches_pass(move: Move) -> None:
    assert judged(move).status == "passed"


def test_experts_that_change_places_by_rounding_are_no_fault() -> None:
    assert judged(with_flips).status == "passed"


# ---------------------------------------------------------------- where all tokens differ


def both(*moves: Move) -> Move:
    def move(values: np.ndarray, rng: np.random.Generator) -> None:
        for each in moves:
            each(values, rng)

    return move


@pytest.mark.parametrize(
    ("prompts", "each", "nats"), [(1, 3, 1.0), (3, 1, 1.0), (9, 4, 0.5), (9, 10, 0.3)]
)
def test_tokens_beyond_all_that_rounding_moves_warn_where_all_differ(
    prompts: int, each: int, nats: float
) -> None:
    check = judged(both(rounding(1.0), tokens(prompts, each, nats)))
    assert check.status == "warning"
    assert f"{prompts * each} far beyond" in check.detail


def test_more_tokens_than_rounding_moves_warn_though_none_is_far() -> None:
    assert judged(both(rounding(1.0), tokens(5, OF_PROMPT, 0.015))).status == "warning"


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_tails_of_rounding_are_no_fault_where_all_differ(share: float) -> None:
    """Heavy ones too: the trainer's own passes have them."""

    def tails(rng: np.random.Generator, size: int) -> np.ndarray:
        return np.asarray(3e-3 * rng.standard_t(2.5, size))

    found = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        moved = np.where(rng.random(TOKENS) < share, tails(rng, TOKENS), 0.0)
        sides = [
            replace(side, logprobs=np.minimum(side.logprobs + tails(rng, TOKENS), -2e-4))
            for side in (TRAIN, REGROUPED)
        ]
        decode = replace(DECODE, logprobs=np.minimum(DECODE.logprobs + moved, -2e-4))
        prefill = replace(DECODE, name="vllm:prefill")
        found.append(engine_agreement(ROLLOUT, decode, prefill, *sides).status)
    assert set(found) == {"passed"}
