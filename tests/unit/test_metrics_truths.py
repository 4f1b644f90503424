"""Metrics against truths known without them: closed forms, exact categorical laws, hand sums."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.metrics import METRICS, estimator
from mismatch.metrics.sequence import per_sequence_mean

SIGMA = 0.3
GRID = 20_001


@pytest.fixture(scope="module")
def gaussian() -> np.ndarray:
    """delta ~ N(-s²/2, s²) at its mid-quantiles: then E[rho] = 1, as for a true sampler."""
    normal = NormalDist(-(SIGMA**2) / 2, SIGMA)
    return np.array([normal.inv_cdf((i + 0.5) / GRID) for i in range(GRID)])


def phi(x: float) -> float:
    return NormalDist().cdf(x)


def factor_mean(mean: float, s: float) -> float:
    """E exp(|X|) of a normal."""
    up = math.exp(mean + s * s / 2) * phi(mean / s + s)
    down = math.exp(-mean + s * s / 2) * phi(s - mean / s)
    return up + down


S2 = SIGMA**2
GAUSSIAN_TRUTHS = {
    "kl": S2 / 2,
    "k2_kl": (S2 + S2 * S2 / 4) / 2,
    "k3_kl": S2 / 2,
    "ratio_mean": 1.0,
    "token_mult_prob_error": factor_mean(-S2 / 2, SIGMA),
    "ratio_outside_2": phi((-math.log(2) + S2 / 2) / SIGMA) + phi(-(math.log(2) + S2 / 2) / SIGMA),
    "clip_fraction": phi((math.log(0.8) + S2 / 2) / SIGMA) + phi(-(math.log(1.2) + S2 / 2) / SIGMA),
}


@pytest.mark.parametrize("name", GAUSSIAN_TRUTHS)
def test_gaussian_log_ratio(name, gaussian):
    assert METRICS[name](gaussian) == pytest.approx(GAUSSIAN_TRUTHS[name], rel=2e-3)


def test_quantiles_of_a_gaussian():
    normal = NormalDist(0, SIGMA)
    delta = np.array([normal.inv_cdf((i + 0.5) / GRID) for i in range(GRID)])
    for label, p in {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}.items():
        truth = normal.inv_cdf(0.5 + p / 2)
        assert METRICS[f"logprob_abs_diff_{label}"](delta) == pytest.approx(truth, rel=5e-3)


def test_categorical_policy_whose_sample_has_the_exact_proportions():
    """Sampled in proportion to p, k1 and k3 *are* KL(p ‖ q)."""
    p = np.array([500, 250, 125, 75, 50]) / 1000
    q = np.array([0.4, 0.3, 0.15, 0.05, 0.1])
    token = np.repeat(np.arange(5), (1000 * p).astype(int))
    rollout, train = np.log(p)[token], np.log(q)[token]
    delta = train - rollout
    true_kl = float((p * np.log(p / q)).sum())
    assert METRICS["kl"](delta) == pytest.approx(true_kl)
    assert METRICS["k3_kl"](delta) == pytest.approx(true_kl)
    assert METRICS["ratio_mean"](delta) == pytest.approx(1.0)
    assert METRICS["probs_diff_mean"](rollout, train) == pytest.approx(
        float((p * abs(p - q)).sum())
    )
    correlation = np.corrcoef(np.exp(rollout), np.exp(train))[0, 1]
    assert METRICS["probs_pearson"](rollout, train) == pytest.approx(correlation)


ROLLOUT = np.log([0.5, 0.25, 0.8, 0.1])
TRAIN = np.log([0.4, 0.5, 0.8, 0.02])
DELTA = TRAIN - ROLLOUT  # rho = 0.8, 2, 1, 0.2
GAPS = [0.1, 0.25, 0.0, 0.08]
SEQUENCE = np.array([3, 3, 7, 7])
WEIGHTS = [0.8, 2.0, 1.0, 0.2]
FIRST, SECOND = math.log(0.8 * 2), math.log(0.2)  # sums of delta of the two sequences


HAND = {
    "logprob_abs_diff_mean": (math.log(1.25) + math.log(2) + math.log(5)) / 4,
    "logprob_abs_diff_max": math.log(5),
    "token_mult_prob_error": (1.25 + 2 + 1 + 5) / 4,
    "probs_diff_mean": sum(GAPS) / 4,
    "probs_diff_max": 0.25,
    "ratio_mean": 1.0,
    "ratio_min": 0.2,
    "ratio_max": 2.0,
    "ratio_outside_1.02": 0.75,
    "ratio_outside_2": 0.25,
    "clip_fraction": 0.5,
    "ess_token": 1 / float(np.mean((np.array(WEIGHTS) / 1.0) ** 2)),
    "log_ppl_diff": (-FIRST / 2 - SECOND / 2) / 2,
    "ess_seq": (1.6 + 0.2) ** 2 / 4 / ((1.6**2 + 0.2**2) / 2),
    "seq_logratio_std": (FIRST - SECOND) / 2,
    "seq_logratio_mean": (FIRST + SECOND) / 2,
    "entropy_train": 0.7,
    "argmax_agree": 0.75,
}
ARRAYS = {
    "rollout": ROLLOUT,
    "train": TRAIN,
    "delta": DELTA,
    "sequence": SEQUENCE,
    "train_entropy": np.array([0.1, 0.5, 1.0, 1.2]),
    "rollout_top1": np.array([4, 5, 6, 7]),
    "train_top1": np.array([4, 5, 6, 8]),
}


def value(name: str, arrays: dict[str, np.ndarray]) -> float:
    return METRICS[name](*(arrays[need] for need in METRICS[name].needs))


@pytest.mark.parametrize("name", HAND)
def test_by_hand(name):
    assert value(name, ARRAYS) == pytest.approx(HAND[name])


def test_all_token_and_sequence_metrics_are_checked_against_a_truth():
    quantiles = {f"logprob_abs_diff_{label}" for label in ("p50", "p90", "p99", "p999")}
    names = set(HAND) | set(GAUSSIAN_TRUTHS) | quantiles | {"probs_pearson"}
    here = {name for name, metric in METRICS.items() if set(metric.needs) <= set(ARRAYS)}
    assert here == names


def test_weights_are_truncated_at_2():
    delta = np.array([25.0, -30.0, 0.0, 0.0])
    assert METRICS["ess_token"](delta) == pytest.approx((2 + 0 + 2) ** 2 / 16 / ((4 + 0 + 2) / 4))


def test_identical_sides_are_exactly_zero_or_exactly_one():
    rng = np.random.default_rng(0)
    logprobs = -rng.exponential(1.0, 500)
    arrays = {
        "rollout": logprobs,
        "train": logprobs.copy(),
        "delta": logprobs - logprobs,
        "sequence": np.arange(500) // 10,
        "rollout_top1": np.arange(500),
        "train_top1": np.arange(500),
        "train_entropy": np.abs(logprobs),
    }
    ones = ("ratio_me", "ratio_mi", "ratio_ma", "token_m", "ess_token", "ess_seq")
    for name in METRICS:
        if name == "entropy_train" or not set(METRICS[name].needs) <= set(arrays):
            continue  # experts and whole distributions have tests of their own
        got = value(name, arrays)
        is_share = name.startswith(ones) or name in ("argmax_agree", "probs_pearson")
        want = 1.0 if is_share else 0.0
        assert got == want, name
        assert math.copysign(1, got) == 1, name  # not -0.0


def test_small_deltas_keep_their_digits():
    """fp32 noise: exp(d) - 1 - d computed naively is rounding error at 1e-9."""
    delta = np.full(10, 1e-9)
    for name in ("k3_kl", "k2_kl"):
        assert METRICS[name](delta) == pytest.approx(5e-19, rel=1e-6)
    x = np.linspace(0.1, 0.9, 50)
    gap = 1e-7 * (-1.0) ** np.arange(50)
    lost = 1 - METRICS["probs_pearson"](np.log(x), np.log(x + gap))
    unexplained = np.var(gap) / np.var(x) / 2  # of a gap that x does not predict
    assert lost == pytest.approx(unexplained, rel=0.02)


def test_float32_is_upcast_before_anything_is_subtracted():
    rollout = np.array([-1e-4, -0.5], np.float32)
    train = np.array([-1.0001e-4, -0.5], np.float32)
    exact = abs(math.exp(float(train[0])) - math.exp(float(rollout[0]))) / 2
    assert METRICS["probs_diff_mean"](rollout, train) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("name", METRICS)
def test_nothing_measured_is_an_error(name):
    empty = [np.empty((0, 2)) for _ in METRICS[name].needs]
    with pytest.raises(EmptyComparison):
        METRICS[name](*empty)


def test_bad_input_is_an_error():
    with pytest.raises(MismatchError, match=r"probs_diff_mean.*: 2, 3"):
        METRICS["probs_diff_mean"](np.zeros(2), np.zeros(3))
    with pytest.raises(MismatchError, match=r"k3_kl: delta: 1\b"):
        METRICS["k3_kl"](np.array([0.0, np.nan]))
    with pytest.raises(MismatchError, match="probs_pearson is undefined"):
        METRICS["probs_pearson"](np.full(3, -1.0), np.array([-1.0, -2.0, -3.0]))


def test_every_metric_says_what_it_is():
    assert all(
        metric.definition and metric.unit and metric.label and metric.meaning
        for metric in METRICS.values()
    )
    assert all(name == metric.name for name, metric in METRICS.items())


def test_every_flag_is_in_the_documentation():
    page = (Path(__file__).parents[2] / "docs" / "explain" / "intervals.md").read_text("utf-8")
    flags = re.findall(r'"([a-z]+-[a-z]+|overflow)"', inspect.getsource(estimator))
    assert len(set(flags)) == 7
    assert [flag for flag in flags if f"`{flag}`" not in page] == []


LOGPROBS = st.lists(
    st.tuples(st.floats(-20, 0), st.floats(-20, 0), st.integers(0, 3)), min_size=2, max_size=40
)


@settings(max_examples=60, deadline=None)
@given(LOGPROBS, st.randoms(use_true_random=False))
def test_order_of_tokens_and_names_of_sequences_do_not_matter(tokens, random):
    shuffled = list(tokens)
    random.shuffle(shuffled)
    for name in ("k3_kl", "probs_diff_mean", "ess_token", "ess_seq", "log_ppl_diff", "kl"):
        got = []
        for rows, rename in ((tokens, 1), (shuffled, -5)):
            rollout, train, sequence = (np.array(column) for column in zip(*rows, strict=True))
            arrays = {"rollout": rollout, "train": train, "delta": train - rollout}
            got.append(value(name, arrays | {"sequence": rename * sequence}))
        assert got[0] == pytest.approx(got[1], rel=1e-9, abs=1e-9), name


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-20, 20), min_size=1, max_size=40))
def test_inequalities_that_always_hold(deltas):
    delta = np.array(deltas)
    assert METRICS["k3_kl"](delta) >= 0
    assert METRICS["token_mult_prob_error"](delta) >= 1 + METRICS["logprob_abs_diff_mean"](delta)
    assert 1 / len(delta) - 1e-12 <= METRICS["ess_token"](delta) <= 1
    assert METRICS["kl"](delta) <= METRICS["logprob_abs_diff_mean"](delta) + 1e-12


def test_a_sequence_counts_once_however_long_it_is():
    values, sequence = np.array([1.0, 1.0, 1.0, 5.0]), np.array([9, 9, 9, 2])
    assert per_sequence_mean(values, sequence).tolist() == [5.0, 1.0]


_TWO_BY_TWO = np.full((2, 2), -0.1)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: METRICS["k3_kl"](_TWO_BY_TWO), "shape (2, 2)"),
        (lambda: METRICS["k3_kl"](delta=_TWO_BY_TWO), "shape (2, 2)"),
        (lambda: METRICS["probs_pearson"](_TWO_BY_TWO, _TWO_BY_TWO), "shape (2, 2)"),
        (lambda: METRICS["k3_kl"](np.ma.array([0.1, 9.0], mask=[0, 1])), "masked array"),
        (lambda: METRICS["k3_kl"]([True, False]), "bool"),
        (lambda: METRICS["k3_kl"]([1j]), "complex"),
        (lambda: METRICS["k3_kl"]([None, 0.1]), "object"),
        (lambda: METRICS["k3_kl"]([0.1], [0.2]), "too many"),
        (lambda: METRICS["ess_seq"]([0.1, 0.2], [0.5, 1.5]), "not whole"),
        (lambda: METRICS["entropy_train"]([-1.0]), "never negative"),
        (lambda: METRICS["kl"](delta=[0.1, np.nan]), "not finite"),
    ],
)
def test_arrays_that_a_function_is_not_defined_on_are_refused(
    call: Callable[[], float], says: str
) -> None:
    with pytest.raises(MismatchError, match=re.escape(says)):
        call()


def test_logprobs_above_zero_are_not_made_to_look_possible() -> None:
    assert METRICS["probs_diff_mean"]([-9.0], [0.9]) > 1.0
    assert METRICS["probs_diff_mean"]([-99.0], [1e-9]) == 1.0  # rounding
