"""Tokens drawn from another distribution than is reported, with log-probabilities that agree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mismatch.analysis.diagnosis import semantics
from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.detectors.law import (
    COUNTED,
    EQUAL_ALLOWED,
    SEEN_ALLOWED,
    end_tokens,
)
from mismatch.types import Check, Rollout, Sampling, Scoring, SideFacts

PROMPTS, SAMPLES, PROMPT, RESPONSE, VOCABULARY = 64, 4, 3, 60, 24


def pair(
    seed: int,
    sharper: float = 1.0,
    top: int = VOCABULARY,
    top_p: float = 1.0,
    noise: float = 4e-3,
    rare: float | None = None,
    sizes: tuple[int, int, int] = (PROMPTS, SAMPLES, RESPONSE),
    ends: float | None = None,
    penalty: float = 0.0,
    forced: int = 0,
    seeds: int = SAMPLES,
) -> tuple[Rollout, Scoring, Scoring]:
    """Return a rollout of a random law and its two scorings, of which both report that law.

    Args:
        sharper: factor of the logits that tokens are drawn with.
        top: how many of the likeliest tokens can be drawn.
        top_p: cuts each law to the likeliest tokens of this mass.
        rare: probability of all tokens but the likeliest together; None: the logits are random.
        sizes: prompts, samples of each, tokens of a response.
        ends: id 0 is an end token, whose logit the sampler lowers by this many nats; None: no end.
        penalty: nats that the sampler lowers tokens by that stood before.
        forced: tokens that begin every response, the likeliest of the first prompt.
        seeds: samples of a prompt that are drawn apart; the others repeat them.
    """
    rng = np.random.default_rng(seed)
    prompts, samples, response = sizes
    rows = prompts * samples
    logits = rng.normal(0, 2, (prompts, 1, response, VOCABULARY))  # a function of what came before
    logits = logits.repeat(samples, 1).reshape(rows * response, VOCABULARY)
    if rare is not None:
        logits[:, 0] = np.log(np.exp(logits[:, 1:]).sum(1) * (1 - rare) / rare)
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    drawn = sharper * logits
    drawn[drawn < np.sort(drawn, axis=1)[:, [-top]]] = -np.inf
    drawn[:, 0] -= ends or 0.0
    if top_p < 1.0:
        order = np.argsort(-logprobs, axis=1)
        before = np.cumsum(np.take_along_axis(np.exp(logprobs), order, 1), axis=1)
        before -= np.take_along_axis(np.exp(logprobs), order, 1)
        cut = np.where(before >= top_p, -np.inf, 0.0)
        np.put_along_axis(drawn, order, np.take_along_axis(drawn, order, 1) + cut, 1)
    drawn = (drawn + rng.gumbel(size=drawn.shape)).reshape(rows, response, VOCABULARY)
    if seeds < samples:
        drawn = drawn.reshape(prompts, samples, response, VOCABULARY)
        drawn = drawn[:, np.arange(samples) % seeds].reshape(rows, response, VOCABULARY)
    ids, seen = np.zeros((rows, response), int), np.zeros((rows, VOCABULARY), bool)
    number = np.arange(rows) // samples
    prompt = np.stack([number // VOCABULARY, number % VOCABULARY, np.zeros(rows, int)], axis=1)
    seen[np.arange(rows)[:, None], prompt] = True
    probabilities = np.exp(logprobs).reshape(rows, response, VOCABULARY)
    mass_of_seen = np.zeros((rows, response))  # before each draw
    for at in range(response):
        mass_of_seen[:, at] = (probabilities[:, at] * seen).sum(axis=1)
        ids[:, at] = (drawn[:, at] - penalty * seen).argmax(axis=1)
        if at < forced:
            ids[:, at] = logits.reshape(rows, response, VOCABULARY)[0, at].argmax()
        seen[np.arange(rows), ids[:, at]] = True
    ids = ids.reshape(-1)
    length = PROMPT + response
    mask = np.tile(np.arange(length) >= PROMPT, rows)
    tokens = np.zeros(rows * length, int)
    tokens[mask], tokens[~mask] = ids, prompt.reshape(-1)
    rollout = Rollout(
        token_ids=tokens,
        offsets=np.arange(rows + 1) * length,
        action_mask=mask,
        turn=mask.astype(int),
        prompt_index=np.arange(rows) // samples,
        finish_reason=("length",) * rows,
        sampling=Sampling(samples_per_prompt=samples),
        fingerprint={},
    )
    reported = logprobs[np.arange(len(ids)), ids]
    entropy = -(np.exp(logprobs) * logprobs).sum(axis=1)
    off = np.minimum(reported + rng.normal(0, noise, len(ids)), 0.0)
    facts: SideFacts = {"engine": "vllm", "stop_token_ids": None if ends is None else [0]}
    engine = Scoring("vllm:decode", ids, reported, facts)
    held = {"earlier_mass": mass_of_seen.reshape(-1)}
    held |= {} if ends is None else {"end_mass": np.exp(logprobs[:, 0])}
    return rollout, engine, Scoring("fsdp", ids, off, {}, entropy=entropy, extra=held)


def check(*sides: object) -> Check:
    return semantics.sampling_law(*sides)  # type: ignore[arg-type]


def test_tokens_of_the_reported_law_pass() -> None:
    assert {check(*pair(seed)).status for seed in range(12)} == {"passed"}


@pytest.mark.parametrize("rare", [1e-4, 3e-4, 1e-3, 3e-3, 0.008, 0.02, 0.05])
@pytest.mark.parametrize("sizes", [(8, 4, 32), (16, 4, 32), (64, 4, 32)])
def test_a_policy_that_is_nearly_certain_is_no_fault_of_the_sampler(
    sizes: tuple[int, int, int], rare: float
) -> None:
    """Its few surprising tokens may not have been drawn: what was drawn has no variance then."""
    found = [check(*pair(seed, rare=rare, sizes=sizes)).status for seed in range(12)]
    assert "failed" not in found
    assert found.count("inconclusive") <= 1


@pytest.mark.parametrize(
    ("fault", "drawn"),
    [
        ({"sharper": 1 / 0.9}, "sharper"),
        ({"sharper": 1 / 1.1}, "flatter"),
        ({"top": 8}, "sharper"),
        ({"sharper": 1 / 0.95}, "sharper"),
        ({"top_p": 0.97}, "sharper"),
    ],
)
def test_a_sampler_of_another_law_fails_though_log_probabilities_agree(
    fault: dict[str, float], drawn: str
) -> None:
    found = check(*pair(0, **fault))  # type: ignore[arg-type]
    assert found.status == "failed"
    assert drawn in found.detail
    assert "temperature" in found.fix


@pytest.mark.parametrize("sizes", [(8, 4, 32), (64, 4, 60)])
@pytest.mark.parametrize("rare", [None, 1e-3, 0.02])
def test_end_tokens_of_the_reported_law_pass(
    rare: float | None, sizes: tuple[int, int, int]
) -> None:
    found = [check(*pair(seed, rare=rare, sizes=sizes, ends=0.0)) for seed in range(12)]
    assert "failed" not in {each.status for each in found}
    assert [each.status for each in found].count("inconclusive") <= 1


@pytest.mark.parametrize(("lowered", "word"), [(0.3, "few"), (30.0, "few"), (-0.6, "many")])
def test_end_tokens_that_are_drawn_too_seldom_or_too_often_fail(lowered: float, word: str) -> None:
    """A least length, a masked end token or a bias on it leaves every log-probability right."""
    found = check(*pair(0, ends=lowered))
    assert found.status == "failed"
    assert {"end", "tokens", word} <= set(found.detail.split())
    assert "min_tokens" in found.fix


def test_end_tokens_are_judged_by_the_nearer_of_trainer_and_reference() -> None:
    rollout, left, right = pair(0, ends=0.0)
    exact = replace(right, name="reference:fp32", extra=dict(right.extra))
    right.extra["end_mass"] = right.extra["end_mass"] * 0.5
    assert check(rollout, left, right).status == "failed"
    found = semantics.sampling_law(rollout, left, right, {"reference:fp32": exact})
    assert found.status == "passed"


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ({"penalty": 0.7}, "stood before"),  # a repetition penalty of about 1.1
        ({"penalty": -0.7}, "stood before"),
        ({"forced": 1}, "two samples"),
        ({"forced": 3}, "two samples"),
        ({"seeds": 1}, "two samples"),
    ],
)
def test_a_penalty_and_a_forced_beginning_fail_though_log_probabilities_agree(
    fault: dict[str, float], named: str
) -> None:
    found = check(*pair(0, **fault))  # type: ignore[arg-type]
    assert found.status == "failed"
    assert named in found.detail


@pytest.mark.parametrize("rare", [None, 1e-3, 0.02, 0.2])
def test_what_is_counted_of_the_reported_law_is_within_chance(rare: float | None) -> None:
    """A martingale: a draw of the law, less its probability, whatever was drawn before."""
    times = {SEEN_ALLOWED: [0.0], EQUAL_ALLOWED: [0.0]}
    for seed in range(20):
        case = Case.of(*pair(seed, rare=rare, sizes=(16, 4, 32), noise=0.0), {})
        for what in times:
            looks = [look for find in COUNTED if (look := find(case)) is not None]
            times[what] += [look.value(what, 0.0) for look in looks]
    assert max(map(max, times.values())) < 0.9
    assert min(max(each) for each in times.values()) > 0.0  # there was something to count


@pytest.mark.parametrize("declared", [{"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 8}])
def test_end_tokens_of_a_declared_law_are_no_cause(declared: dict[str, float]) -> None:
    rollout, left, right = pair(0, ends=30.0)
    rollout = replace(rollout, sampling=replace(rollout.sampling, **declared))
    assert end_tokens(Case.of(rollout, left, right, {})) is None


def test_what_chance_hardly_makes_is_not_passed() -> None:
    """T = 0.95 undeclared, at 15,360 tokens."""
    found = [check(*pair(seed, sharper=1 / 0.95)) for seed in range(6)]
    assert "passed" not in {each.status for each in found}


def test_a_large_mismatch_of_the_sides_is_no_fault_of_the_sampler() -> None:
    assert check(*pair(0, noise=0.3)).status == "passed"


@pytest.mark.parametrize(
    "declared", [{"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 8}, {"repetition_penalty": 1.1}]
)
def test_a_declared_law_is_left_to_the_checks_of_what_is_declared(
    declared: dict[str, float],
) -> None:
    rollout, *sides = pair(0, top=8)
    sampling = replace(rollout.sampling, **declared)
    assert check(replace(rollout, sampling=sampling), *sides).status == "not_tested"


def test_entropies_of_the_trainer_that_are_off_are_no_fault_of_the_sampler() -> None:
    rollout, left, right = pair(0)
    assert right.entropy is not None
    reference = replace(right, name="reference:fp32")
    off = replace(right, entropy=right.entropy + 0.3)
    found = semantics.sampling_law(rollout, left, off, {"reference:fp32": reference})
    assert found.status == "warning"
    assert "entropies" in found.fix


def test_without_entropies_or_the_weights_that_sampled_nothing_is_said() -> None:
    rollout, left, right = pair(0, sharper=1 / 0.8)
    assert check(rollout, left, replace(right, entropy=None)).status == "not_tested"
    recorded = replace(left, fingerprint={"engine": "recorded"})
    assert check(rollout, recorded, right).status == "not_tested"
