"""Intervals hold what they promise, because whole prompts move together."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch.metrics import METRICS
from mismatch.metrics.estimator import Estimator
from mismatch.metrics.inference import prompts_needed, student, with_unseen
from mismatch.metrics.registry import columns
from mismatch.metrics.tails import heavy_tail, hill_index
from mismatch.types import Estimate
from tests.unit.plain_estimates import summed

MEAN = METRICS["logprob_abs_diff_mean"]


def design(prompts: int, samples: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(sequence of each token, prompt of each sequence)."""
    sequence = np.repeat(np.arange(prompts * samples), tokens)
    return sequence, np.repeat(np.arange(prompts), samples)


def correlated(rng, prompts: int, samples: int, tokens: int) -> np.ndarray:
    """Gaussian deltas whose scale is shared within a prompt and within a sample."""
    scale = rng.normal(0, 0.4, (prompts, 1, 1)) + rng.normal(0, 0.3, (prompts, samples, 1))
    return (0.01 * np.exp(scale) * rng.normal(size=(prompts, samples, tokens))).ravel()


def test_copies_of_samples_bring_no_precision():
    """Four identical samples of a prompt know no more than one."""
    rng = np.random.default_rng(3)
    once = 0.01 * rng.normal(size=(40, 1, 25)) * rng.exponential(1, (40, 1, 1))
    single = Estimator(*design(40, 1, 25)).one(MEAN, {"delta": once.ravel()})
    four = Estimator(*design(40, 4, 25)).one(MEAN, {"delta": once.repeat(4, axis=1).ravel()})
    assert (four.value, four.low, four.high) == pytest.approx(
        (single.value, single.low, single.high)
    )
    assert (four.n_tokens, four.n_sequences, four.n_prompts) == (4000, 160, 40)


def test_counts_are_of_what_was_compared():
    """Sequence 1 has no action token, so its prompt is not there either."""
    got = Estimator(np.array([0, 0, 2, 3]), np.array([5, 6, 7, 7])).one(MEAN, {"delta": np.ones(4)})
    assert (got.n_tokens, got.n_sequences, got.n_prompts) == (4, 3, 2)


def test_standard_error_of_a_mean_is_the_textbook_one():
    sums = np.random.default_rng(0).normal(size=(30, 8))
    got = summed(columns(sums.ravel()), np.repeat(np.arange(30), 8), 30, MEAN.combine)
    assert got.error == pytest.approx(sums.mean(axis=1).std(ddof=1) / math.sqrt(30))


@pytest.mark.parametrize("name", ["ess_token", "probs_pearson"])
def test_a_resample_equals_the_metric_on_the_redrawn_tokens(name):
    """Sums per prompt, reweighted, are the real thing; the error is that of a jackknife."""
    rng = np.random.default_rng(1)
    prompts, metric = 40, METRICS[name]
    cluster = rng.integers(0, prompts, 3000)
    rollout = np.log(rng.uniform(0.05, 1.0, 3000))
    delta = rng.normal(0, 0.1, 3000)
    arrays = {"rollout": rollout, "train": rollout + delta, "delta": delta}
    terms = columns(metric.terms(**{need: arrays[need] for need in metric.needs}))
    sums = summed(terms, cluster, prompts, metric.combine)

    weights = rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=3).astype(float)
    values, _ = sums.resampled(weights)
    for weight, got in zip(weights, values, strict=True):
        rows = np.concatenate(
            [np.flatnonzero(cluster == p) for p in np.repeat(range(prompts), weight.astype(int))]
        )
        assert got == pytest.approx(metric(*(arrays[need][rows] for need in metric.needs)))

    left_out = [metric.value(terms[cluster != p]) for p in range(prompts)]
    jackknife = math.sqrt((prompts - 1) * np.var(left_out))
    assert sums.error == pytest.approx(jackknife, rel=0.1)


def test_identical_sides_have_a_point_interval():
    sequence, prompt = design(20, 2, 10)
    zeros = np.zeros(len(sequence))
    arrays = {"delta": zeros, "sequence": sequence}
    for name in ("k3_kl", "kl", "seq_logratio_std", "logprob_abs_diff_p99", "clip_fraction"):
        got = Estimator(sequence, prompt).one(METRICS[name], arrays)
        assert (got.value, got.low, got.high, got.flags) == (0.0, 0.0, 0.0, ()), name
    for name in ("ratio_mean", "token_mult_prob_error", "ess_token"):
        got = Estimator(sequence, prompt).one(METRICS[name], arrays)
        assert (got.value, got.low, got.high) == (1.0, 1.0, 1.0), name


def test_the_seed_decides():
    sequence, prompt = design(30, 2, 10)
    delta = correlated(np.random.default_rng(0), 30, 2, 10)
    intervals = [
        Estimator(sequence, prompt, seed=seed).one(MEAN, {"delta": delta}) for seed in (1, 1, 2)
    ]
    assert intervals[0] == intervals[1] != intervals[2]


def test_flags_and_missing_intervals():
    rng = np.random.default_rng(0)
    sequence, prompt = design(1, 4, 50)
    alone = Estimator(sequence, prompt).one(MEAN, {"delta": rng.normal(size=200)})
    assert (alone.low, alone.high, alone.flags) == (None, None, ("one-prompt",))
    sequence, prompt = design(4, 4, 50)
    few = Estimator(sequence, prompt).one(MEAN, {"delta": rng.normal(size=800)})
    assert few.flags == ("few-prompts",)
    assert few.low < few.value < few.high
    largest = METRICS["logprob_abs_diff_max"]
    got = Estimator(sequence, prompt).one(largest, {"delta": rng.normal(size=800)})
    assert (got.low, got.high, got.flags) == (None, None, ())
    spike = np.r_[np.full(799, 1e-3), 1.0]
    assert "heavy-tail" in Estimator(sequence, prompt).one(METRICS["k3_kl"], {"delta": spike}).flags
    rare = Estimator(sequence, prompt).one(METRICS["ratio_outside_2"], {"delta": np.full(800, 0.1)})
    assert rare.value == 0.0
    assert "no-events" in rare.flags
    huge = np.r_[np.zeros(799), -2000.0]
    endless = Estimator(sequence, prompt).one(METRICS["token_mult_prob_error"], {"delta": huge})
    assert (endless.value, endless.low, endless.flags) == (math.inf, None, ("overflow",))


@pytest.mark.parametrize(
    ("largest", "reach"),
    [(0.5, 1.0), (0.01, 1.0), (7e-4, 1.0), (6.9e-4, 1e3), (1.5e-5, 1e4), (1e-12, 1e6)],
)
def test_an_event_far_beyond_the_largest_difference_is_bounded_by_the_tail(largest, reach):
    """With 48 tokens no share under 6 % could be excluded by their number alone."""
    sequence, prompt = design(24, 1, 2)
    delta = np.linspace(-largest, largest, 48)
    got = Estimator(sequence, prompt).one(METRICS["ratio_outside_2"], {"delta": delta})
    assert got.value == got.low == 0.0
    assert "no-events" in got.flags
    assert got.high == pytest.approx((1.0 - 0.05 ** (1.0 / 48)) / reach)


def test_an_undefined_metric_is_absent():
    sequence, prompt = design(4, 4, 5)
    arrays = {"rollout": np.full(80, -1.0), "train": np.full(80, -2.0)}
    names = ("probs_pearson", "probs_diff_mean", "k3_kl")
    estimates = Estimator(sequence, prompt).all([METRICS[name] for name in names], arrays)
    assert set(estimates) == {"probs_diff_mean", "k3_kl"}  # no correlation of constants
    without = Estimator(sequence, prompt).all([METRICS["k3_kl"]], {"train": arrays["train"]})
    assert without == {}


def test_two_prompts_and_one_that_carries_everything_get_wide_intervals():
    sequence, prompt = design(2, 1, 10)
    two = Estimator(sequence, prompt).one(
        MEAN, {"delta": np.r_[np.full(10, 1.0), np.full(10, 2.0)]}
    )
    assert two.low == 0.0
    assert two.high > 3.0
    sequence, prompt = design(64, 1, 10)
    delta = np.zeros(640)
    delta[0] = 1.0
    lone = Estimator(sequence, prompt).one(MEAN, {"delta": delta})
    assert lone.low == 0.0
    assert lone.high > 2 * lone.value
    assert "heavy-tail" in lone.flags


def test_hill_index_knows_a_pareto_from_a_gaussian():
    rng = np.random.default_rng(0)
    assert hill_index(rng.pareto(1.5, 20_000) + 1) == pytest.approx(1.5, rel=0.15)
    assert heavy_tail(rng.pareto(1.5, 20_000) + 1)
    assert not heavy_tail(rng.normal(size=20_000))
    assert not heavy_tail(np.zeros(100))


def test_a_quantile_beyond_the_sample_has_no_interval():
    sequence, prompt = design(20, 2, 5)
    delta = np.random.default_rng(0).normal(size=200)
    got = Estimator(sequence, prompt).one(METRICS["logprob_abs_diff_p999"], {"delta": delta})
    assert (got.low, got.high, got.flags) == (None, None, ("few-tokens",))
    assert got.value == np.abs(delta).max()


def test_student_points():
    table = {1: 12.706, 2: 4.303, 3: 3.182, 5: 2.571, 10: 2.228, 30: 2.042, 1000: 1.962}
    for freedom, point in table.items():
        assert student(freedom) == pytest.approx(point, abs=5e-4)


def estimate(value: float, low: float | None, high: float | None, prompts: int = 64) -> Estimate:
    return Estimate(value, low, high, 1000, 256, prompts)


def test_prompts_needed():
    # 1 ± 0.5 against 0.75: the arm of 0.5 must fall under 0.25, so 4 times the prompts and one.
    assert prompts_needed(estimate(1.0, 0.5, 1.5), 0.75) == 257
    assert prompts_needed(estimate(1.0, 0.5, 1.25), 1.125) == 257  # the arm on the bound's side
    assert prompts_needed(estimate(1.0, 0.5, 1.5), 2.0) == 64  # decided already
    assert prompts_needed(estimate(1.0, 0.5, 1.5), 1.0) is None  # no n can tell
    assert prompts_needed(estimate(1.0, None, None), 0.75) is None


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 40), st.integers(0, 10_000), st.sampled_from(sorted(METRICS)))
def test_intervals_hold_the_value_and_stay_in_range(prompts, seed, name):
    metric = METRICS[name]
    rng = np.random.default_rng(seed)
    sequence, prompt = design(prompts, 2, 6)
    rollout = -rng.exponential(1.0, len(sequence))
    delta = rng.standard_t(3, len(sequence)) * 0.05
    arrays = {"rollout": rollout, "train": rollout + delta, "delta": delta, "sequence": sequence}
    got = Estimator(sequence, prompt).all([metric], arrays).get(name)
    if got is not None and got.low is not None:
        low, high = metric.bounds
        assert low <= got.low <= got.value <= got.high <= high


def test_fast_enough_for_every_run():
    sequence, prompt = design(64, 4, 80)
    rng = np.random.default_rng(0)
    rollout = -rng.exponential(1.0, len(sequence))
    delta = rng.normal(0, 0.01, len(sequence))
    arrays = {"rollout": rollout, "train": rollout + delta, "delta": delta, "sequence": sequence}
    began = time.process_time()
    estimates = Estimator(sequence, prompt).all(METRICS.values(), arrays)
    assert len(estimates) > 20
    assert time.process_time() - began < 2.0


SHARE = METRICS["ratio_outside_2"]


def test_one_event_in_one_prompt_does_not_stretch_the_interval_to_everything():
    delta = np.zeros(16 * 160)
    delta[700] = 1.0
    got = Estimator(*design(16, 4, 40)).one(SHARE, {"delta": delta})
    assert got.value == 1 / 2560
    assert 0 < got.low < got.value / 3
    assert 3 * got.value < got.high < 10 * got.value


def test_a_rare_share_that_is_the_same_in_every_prompt_is_that_share():
    delta = np.zeros((3, 2, 5))
    delta[:, 0, 0] = 1.0  # one token of ten in each of three prompts
    got = Estimator(*design(3, 2, 5)).one(SHARE, {"delta": delta.ravel()})
    assert (got.value, got.low, got.high) == (0.1, 0.1, 0.1)


def test_events_of_one_prompt_count_as_hardly_more_than_one():
    spread, clumped = np.zeros(2560), np.zeros(2560)
    spread[np.arange(8) * 320] = 1.0
    clumped[:8] = 1.0
    widths = [
        (got := Estimator(*design(16, 4, 40)).one(SHARE, {"delta": delta})).high - got.low
        for delta in (spread, clumped)
    ]
    assert widths[1] > 2 * widths[0]


@pytest.mark.parametrize("ties", [False, True])
def test_values_by_rank_are_those_of_sorting(ties: bool):
    rng = np.random.default_rng(3)
    values = rng.integers(0, 5, 200).astype(float) if ties else rng.normal(size=200)
    before = values.copy()
    ranked = np.sort(values)
    asked = rng.permutation(200)[:60]
    assert [ranked[int(i)] for i in asked] == np.sort(values)[asked].tolist()
    assert (ranked[0], ranked[-1]) == (values.min(), values.max())
    np.testing.assert_array_equal(values, before)


@pytest.mark.parametrize(("name", "times"), [("logprob_abs_diff_mean", 8), ("k3_kl", 64)])
def test_an_interval_of_few_prompts_holds_a_kind_that_was_not_drawn(name: str, times: int) -> None:
    """One prompt in 12 is that many times as far off; 16 prompts hold none in a quarter of runs."""
    truth = (11 + times) / 12
    low, high = with_unseen(METRICS[name], 1.0, (0.9, 1.1), 16)
    assert (low, high > truth) == (0.9, True)
    assert with_unseen(METRICS[name], 1.0, (0.9, 1.1), 48) == (0.9, 1.1)
    assert with_unseen(METRICS["ess_token"], 1.0, (0.9, 1.1), 16) == (0.9, 1.1)
