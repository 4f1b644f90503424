"""Differences: what two sides share cancels, and what is told from nothing is there."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.metrics import METRICS
from mismatch.metrics.difference import Sample, common_prompts, difference, excludes_zero, paired
from mismatch.metrics.estimator import Estimator
from mismatch.metrics.inference import mover, prompts_needed
from mismatch.types import Estimate
from tests.made_run import rollout

PROMPTS, SAMPLES, TOKENS = 40, 4, 10
SEQUENCE = np.repeat(np.arange(PROMPTS * SAMPLES), TOKENS)
PROMPT = np.repeat(np.arange(PROMPTS), SAMPLES)
K3, SIZE = METRICS["k3_kl"], METRICS["logprob_abs_diff_mean"]
P90, SHARE = METRICS["logprob_abs_diff_p90"], METRICS["ratio_outside_2"]


def noise(seed: int, prompts: int = PROMPTS, scale: float = 0.05) -> np.ndarray:
    """Deltas whose size is shared within a prompt: the larger part of what intervals feel."""
    rng = np.random.default_rng(seed)
    shared = np.exp(rng.normal(0, 0.6, (prompts, 1)))
    return (scale * shared * rng.normal(size=(prompts, SAMPLES * TOKENS))).ravel()


def arrays(delta: np.ndarray) -> dict[str, np.ndarray]:
    rollout_side = -0.2 - np.abs(np.random.default_rng(9).normal(size=len(delta)))
    return {
        "delta": delta,
        "sequence": np.repeat(np.arange(len(delta) // TOKENS), TOKENS),
        "rollout": rollout_side,
        "train": rollout_side + delta,
    }


def sample(delta: np.ndarray, first_prompt: int = 0) -> Sample:
    sequences = len(delta) // TOKENS
    prompt = first_prompt + np.arange(sequences) // SAMPLES
    return Sample(arrays(delta), np.repeat(np.arange(sequences), TOKENS), prompt)


def on_same(held: dict[str, np.ndarray]) -> Sample:
    return Sample(held, SEQUENCE, PROMPT)


def width(estimate: Estimate) -> float:
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.high - estimate.low


@pytest.mark.parametrize(
    "name",
    [
        *("k3_kl", "kl", "token_mult_prob_error", "probs_pearson", "ess_token"),
        *("ess_seq", "logprob_abs_diff_p90", "ratio_outside_2", "logprob_abs_diff_max"),
        *("seq_logratio_std", "log_ppl_diff"),
    ],
)
def test_a_paired_difference_is_the_difference_of_the_two_numbers(name: str) -> None:
    before, after = arrays(noise(0)), arrays(1.2 * noise(1))
    metric = METRICS[name]
    values = [metric(*(side[need] for need in metric.needs)) for side in (before, after)]
    got = paired(metric, on_same(before), on_same(after))
    assert got.value == pytest.approx(values[1] - values[0], rel=1e-9, abs=1e-14)
    assert (got.n_tokens, got.n_sequences, got.n_prompts) == (1600, 160, 40)
    back = paired(metric, on_same(after), on_same(before))
    assert back.value == pytest.approx(-got.value)
    if metric.kind != "extreme":
        assert got.low <= got.value <= got.high
    else:
        assert (got.low, got.high) == (None, None)


def test_a_side_against_itself_is_exactly_nothing() -> None:
    side = arrays(noise(0))
    for name in ("k3_kl", "probs_pearson", "ess_seq", "logprob_abs_diff_p90"):
        got = paired(METRICS[name], on_same(side), on_same(side))
        assert (got.value, got.low, got.high) == (0.0, 0.0, 0.0)
        assert excludes_zero(got) is False


def test_what_both_sides_share_cancels() -> None:
    """5 % more of the same noise is told at once; two separate intervals would overlap."""
    before, after = noise(0), 1.05 * noise(0)
    apart = [Estimator(SEQUENCE, PROMPT).one(SIZE, {"delta": d}) for d in (before, after)]
    assert apart[1].low < apart[0].high
    got = paired(SIZE, on_same({"delta": before}), on_same({"delta": after}))
    assert got.value == pytest.approx(0.05 * np.abs(before).mean())
    assert excludes_zero(got) is True
    assert width(got) < 0.2 * width(apart[0])
    quantile = paired(P90, on_same({"delta": before}), on_same({"delta": after}))
    separate = Estimator(SEQUENCE, PROMPT).one(P90, {"delta": before})
    assert width(quantile) < 0.2 * width(separate)


def test_no_difference_is_not_told_and_the_prompts_that_would_tell_it_are_named() -> None:
    got = paired(SIZE, on_same({"delta": noise(0)}), on_same({"delta": noise(1)}))
    assert excludes_zero(got) is False
    wanted = prompts_needed(got, 0.0)
    assert wanted is not None
    assert wanted > PROMPTS


def test_prompts_that_both_runs_hold_are_paired_by_prompt() -> None:
    """Regenerated tokens: the same prompts share their scale, other prompts do not."""
    rng = np.random.default_rng(3)
    scale = np.exp(rng.normal(0, 0.8, (PROMPTS, 1)))
    before, after = (
        (0.05 * scale * rng.normal(size=(PROMPTS, SAMPLES * TOKENS))).ravel() for _ in range(2)
    )
    same = difference(SIZE, sample(before), sample(after))
    apart = difference(SIZE, sample(before), sample(after, first_prompt=PROMPTS))
    assert same.value == apart.value == pytest.approx(np.abs(after).mean() - np.abs(before).mean())
    assert width(same) < 0.5 * width(apart)
    assert (same.n_prompts, apart.n_prompts) == (40, 80)
    assert (same.n_tokens, same.n_sequences) == (3200, 320)


@pytest.mark.parametrize("name", ["k3_kl", "ess_seq", "logprob_abs_diff_p90", "seq_logratio_std"])
def test_on_the_same_tokens_the_two_ways_agree(name: str) -> None:
    before, after, metric = sample(noise(0)), sample(1.3 * noise(0) + 0.2 * noise(1)), METRICS[name]
    by_prompt = difference(metric, before, after)
    by_token = paired(metric, before, after)
    assert by_prompt.value == pytest.approx(by_token.value)
    assert by_prompt.low == pytest.approx(by_token.low, rel=1e-2, abs=1e-2 * abs(by_token.value))
    assert by_prompt.high == pytest.approx(by_token.high, rel=1e-2, abs=1e-2 * abs(by_token.value))


def test_half_the_prompts_shared_lies_between() -> None:
    rng = np.random.default_rng(4)
    scale = np.exp(rng.normal(0, 0.8, (2 * PROMPTS, 1)))
    draw = scale * rng.normal(size=(2 * PROMPTS, SAMPLES * TOKENS))
    again = scale * rng.normal(size=(2 * PROMPTS, SAMPLES * TOKENS))
    widths = [
        width(
            difference(
                SIZE,
                sample(0.05 * draw[:PROMPTS].ravel()),
                sample(0.05 * again[start : start + PROMPTS].ravel(), first_prompt=start),
            )
        )
        for start in (0, PROMPTS // 2, PROMPTS)
    ]
    assert widths[0] < widths[1] < widths[2]


def test_independent_samples_keep_the_asymmetry_of_their_intervals() -> None:
    before = Estimate(2.0, 1.5, 4.0, 10, 10, 10)
    after = Estimate(5.0, 4.0, 5.5, 10, 10, 10)
    assert mover(before, after) == pytest.approx((3 - math.hypot(1, 2), 3 + math.hypot(0.5, 0.5)))
    assert mover(before, replace(after, low=None, high=None)) is None


def test_a_share_that_changes_in_few_prompts_does_not_stretch_to_everything() -> None:
    before, after = np.zeros(1600), np.zeros(1600)
    after[[5, 450, 900]] = 1.0
    got = paired(SHARE, on_same({"delta": before}), on_same({"delta": after}))
    assert got.value == 3 / 1600
    assert "few-events" in got.flags
    assert -3 / 1600 < got.low < got.value < got.high < 0.01
    both_ways = after.copy()
    before[[50, 600]] = 1.0
    other = paired(SHARE, on_same({"delta": before}), on_same({"delta": both_ways}))
    assert other.value == pytest.approx(1 / 1600)
    assert excludes_zero(other) is False


def test_heavy_tails_of_the_change_are_flagged() -> None:
    after = noise(0)
    after[7] = 6.0
    got = paired(K3, on_same({"delta": noise(0)}), on_same({"delta": after}))
    assert "heavy-tail" in got.flags


def test_few_prompts_are_flagged_on_either_side() -> None:
    small = sample(noise(0, prompts=6))
    assert "few-prompts" in difference(SIZE, small, sample(noise(1))).flags
    assert "few-prompts" not in difference(SIZE, sample(noise(0)), sample(noise(1))).flags
    lone = difference(SIZE, sample(noise(0, prompts=1)), sample(noise(1), first_prompt=5))
    assert (lone.low, lone.high) == (None, None)
    assert "one-prompt" in lone.flags


def test_bad_input_is_named() -> None:
    side, empty = {"delta": noise(0)}, np.array([], dtype=np.int64)
    nothing = Sample({"delta": empty}, empty, empty)
    with pytest.raises(MismatchError, match=r"delta .*\b3 .*\b1600"):
        paired(SIZE, on_same(side), on_same({"delta": np.zeros(3)}))
    with pytest.raises(MismatchError, match="needs 'rollout'"):
        paired(METRICS["probs_diff_mean"], on_same(side), on_same(side))
    with pytest.raises(EmptyComparison):
        paired(SIZE, nothing, nothing)
    constant = {"rollout": np.full(1600, -1.0), "train": np.full(1600, -2.0)}
    with pytest.raises(MismatchError, match=r"probs_pearson .*undefined"):
        paired(METRICS["probs_pearson"], on_same(constant), on_same(constant))


def test_prompts_are_known_by_their_tokens() -> None:
    source = rollout()
    ids = source.token_ids.copy()
    swapped = replace(source, prompt_index=source.prompt_index[::-1].copy())
    first, second = common_prompts(source, swapped)
    assert np.array_equal(first, second)
    ids[: source.offsets[1]] += 1000  # another prompt in the first sequence
    first, second = common_prompts(source, replace(source, token_ids=ids))
    assert (first != second).tolist() == [True] + [False] * (source.n_sequences - 1)
    ids = source.token_ids.copy()
    ids[source.actions] += 1000  # other responses to the same prompts
    first, second = common_prompts(source, replace(source, token_ids=ids))
    assert np.array_equal(first, second)
