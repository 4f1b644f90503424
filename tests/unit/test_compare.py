"""`compare` end to end on planted pairs: every number, breakdown and refusal."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mismatch.analysis.comparison import NOISE_METRICS, compare, is_sampling_law
from mismatch.analysis.exact_kl import is_exact
from mismatch.errors import CorruptCapture, EmptyComparison, MismatchError
from mismatch.metrics import METRICS
from mismatch.types import Rollout, Routing, Sampling, Scoring

PROMPTS, SAMPLES, PROMPT_LENGTH, LENGTH = 20, 2, 3, 40
TOKENS = PROMPT_LENGTH + LENGTH
FACTS = {
    "mode": "decode",
    "engine": "vllm",
    "logprobs_temperature": 1.0,
    "logprobs_truncated": False,
}


def make_rollout(**sampling) -> Rollout:
    n = PROMPTS * SAMPLES
    mask = np.tile(np.arange(TOKENS) >= PROMPT_LENGTH, n)
    return Rollout(
        token_ids=np.random.default_rng(0).integers(0, 50, n * TOKENS),
        offsets=np.arange(n + 1) * TOKENS,
        action_mask=mask,
        turn=mask.astype(np.int64),
        prompt_index=np.repeat(np.arange(PROMPTS), SAMPLES),
        finish_reason=("length",) * n,
        sampling=Sampling(**sampling),
        fingerprint={"engine": "vllm"},
    )


ROLLOUT = make_rollout()
A = ROLLOUT.n_actions


def make_routing(seed: int, base: np.ndarray | None = None, share: float = 0.0) -> Routing:
    rng = np.random.default_rng(seed)
    shape = (len(ROLLOUT.token_ids), 3, 8)
    ids = np.argsort(rng.random(shape), axis=2)[..., :2] if base is None else base.copy()
    moved = rng.random(shape[:2]) < share
    ids[moved] = np.argsort(rng.random(shape), axis=2)[..., :2][moved]
    return Routing((0, 2, 5), 8, ids.astype(np.uint8), np.ones(shape[0], bool))


def pair(noise: float = 0.01, flips: float = 0.1) -> tuple[Scoring, Scoring]:
    rng = np.random.default_rng(1)
    logprobs = np.log(rng.beta(3, 1, A))
    ids = ROLLOUT.token_ids[ROLLOUT.actions]
    left_routes = make_routing(2)
    right_routes = make_routing(3, left_routes.ids.astype(np.int64), flips)
    top1 = rng.integers(0, 50, A)
    left = Scoring("vllm:decode", ids, logprobs, dict(FACTS), None, top1, left_routes)
    train = logprobs + noise * rng.normal(size=A)
    right = Scoring("fsdp", ids, train, {"mode": "train"}, rng.random(A), top1, right_routes)
    return left, right


def run(left: Scoring, right: Scoring, **options):
    return compare(ROLLOUT, left, right, sampled_by_left=True, **options)


def test_every_metric_that_the_data_allows_is_there():
    got = run(*pair())
    sampled = {name for name in METRICS if not is_exact(name)}  # those need whole distributions
    assert set(got.metrics) | set(got.routing) == sampled - {
        "routing_top1_disagree",  # needs weights of both sides
        "routing_margin",
        "routing_near_tie_flipped",
        "routing_weight_l1",
        *(name for name in METRICS if name.startswith("keys_")),  # of sparse attention
    }
    assert all(np.isfinite(e.value) for e in {**got.metrics, **got.routing}.values())
    counts = {(e.n_tokens, e.n_sequences, e.n_prompts) for e in got.metrics.values()}
    assert counts == {(A, PROMPTS * SAMPLES, PROMPTS)}
    assert (got.rollout, got.train, got.sampled_by_left) == ("vllm:decode", "fsdp", True)


def test_the_sign_is_train_minus_rollout():
    left, right = pair()
    shifted = run(left, replace(right, logprobs=left.logprobs - 0.01))
    assert shifted.metrics["kl"].value == pytest.approx(0.01)
    assert shifted.metrics["log_ppl_diff"].value == pytest.approx(0.01)
    assert shifted.metrics["ratio_mean"].value == pytest.approx(np.exp(-0.01))
    assert shifted.metrics["logprob_abs_diff_mean"].value == pytest.approx(0.01)


def test_identical_scorings_are_exactly_zero():
    left, _ = pair()
    got = run(left, left)
    for name in ("k3_kl", "kl", "logprob_abs_diff_mean", "ratio_outside_1.02"):
        estimate = got.metrics[name]
        assert (estimate.value, estimate.low, estimate.high) == (0.0, 0.0, 0.0), name
    assert got.metrics["probs_pearson"].value == 1.0
    assert got.metrics["probs_pearson"].low == 1.0
    disagreement = got.routing["routing_disagree_layer"]
    assert (disagreement.value, disagreement.low, disagreement.high) == (0.0, 0.0, 0.0)


def test_what_is_missing_is_absent_not_zero():
    left, right = pair()
    bare = run(replace(left, top1=None, routing=None), replace(right, entropy=None))
    assert not {"entropy_train", "argmax_agree"} & set(bare.metrics)
    assert bare.routing == {}
    assert not {"routing_by_layer", "routing_by_position"} & set(bare.breakdowns)


def test_headline_only_for_the_noise_floor():
    got = run(*pair(), headline_only=True)
    assert set(got.metrics) | set(got.routing) == set(NOISE_METRICS)
    assert got.breakdowns == {}
    assert got.metrics["k3_kl"] == run(*pair()).metrics["k3_kl"]


def test_breakdowns_account_for_every_token():
    left, right = pair()
    got = run(left, right)
    delta = np.abs(right.logprobs - left.logprobs)
    for name in ("by_position", "by_probability"):
        table = got.breakdowns[name]
        assert len({len(column) for column in table.values()}) == 1
        assert sum(table["count"]) == A
        weighted = np.dot(table["count"], table["mean_abs_delta"]) / A
        assert weighted == pytest.approx(delta.mean()), name


def test_by_position_finds_an_onset():
    left, right = pair(noise=0.0)
    position = np.tile(np.arange(LENGTH), PROMPTS * SAMPLES)
    right = replace(right, logprobs=left.logprobs + np.where(position >= 16, 0.5, 0.0))
    table = run(left, right).breakdowns["by_position"]
    for start, end, mean in zip(table["start"], table["end"], table["mean_abs_delta"], strict=True):
        assert mean == pytest.approx(0.5 if start >= 16 else 0.0), (start, end)
    assert table["start"][0] == 0
    assert table["end"][-1] >= LENGTH
    flips = (run(left, right).routing["routing_disagree_layer"]).value
    assert np.mean(table["routing_disagree"]) == pytest.approx(flips)


def test_by_probability_has_the_rollout_sides_probabilities():
    left, right = pair(noise=0.0)
    rare = np.exp(left.logprobs) < 0.3
    right = replace(right, logprobs=left.logprobs + np.where(rare, 0.2, 0.0))
    table = run(left, right).breakdowns["by_probability"]
    for high, mean in zip(table["high"], table["mean_abs_delta"], strict=True):
        assert mean == pytest.approx(0.2 if high <= 0.3 else 0.0)


def test_a_corrupt_capture_is_an_error_not_a_high_disagreement():
    left, right = pair()
    ids = right.routing.ids.copy()
    ids[7, 2, 1] = ids[7, 2, 0]
    broken = replace(right, routing=replace(right.routing, ids=ids))
    with pytest.raises(CorruptCapture, match=r"fsdp.*\b7 .*layer 5"):
        run(left, broken)


def test_refusals():
    left, right = pair()
    with pytest.raises(MismatchError, match="other tokens"):
        run(left, replace(right, token_ids=right.token_ids + 1))
    with pytest.raises(MismatchError, match=r"entropies .*finite"):
        run(left, replace(right, entropy=np.full(A, np.inf)))
    silent = replace(ROLLOUT, action_mask=np.zeros(len(ROLLOUT.token_ids), bool))
    nothing = replace(left, token_ids=left.token_ids[:0], logprobs=left.logprobs[:0])
    with pytest.raises(EmptyComparison):
        compare(silent, nothing, nothing, sampled_by_left=True)


LAWS = {
    "plain": ({}, {}, True),
    "prefill is no sampler": ({}, {"mode": "prefill"}, False),
    "nor is a trainer": ({}, {"mode": "train", "engine": None}, False),
    "another engine": ({}, {"engine": "sglang"}, False),
    "tempered": ({"temperature": 0.7}, {"logprobs_temperature": 0.7}, True),
    "raw logprobs at T != 1": ({"temperature": 0.7}, {}, False),
    "greedy": ({"temperature": 0.0}, {"logprobs_temperature": 0.0}, False),
    "truncated": ({"top_p": 0.9}, {"logprobs_truncated": True}, True),
    "not renormalised": ({"top_k": 20}, {}, False),
    "penalised": ({"repetition_penalty": 1.1}, {"logprobs_penalised": True}, True),
    "before the penalty": ({"repetition_penalty": 1.1}, {"logprobs_penalised": False}, False),
    "processed, nothing cut": ({}, {"logprobs_truncated": True}, True),
    "nothing known": ({}, {"logprobs_temperature": None}, False),
}


@pytest.mark.parametrize("name", LAWS)
def test_is_sampling_law(name):
    sampling, facts, expected = LAWS[name]
    left, _ = pair()
    scoring = replace(left, fingerprint=FACTS | facts)
    assert is_sampling_law(make_rollout(**sampling), scoring) is expected
