"""What must hold for any data: order, masking and padding do not matter; estimators estimate.

k1 and k3 estimate the same KL where the left side sampled, k2 and k3 agree token by token where
the two sides nearly do, k1 only on average.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch.analysis.comparison import compare
from mismatch.metrics import METRICS, k2_kl, k3_kl, kl, ratio_mean
from mismatch.metrics.token import exp_minus_linear
from mismatch.types import Rollout, Sampling, Scoring

ARRAYS = ("rollout", "train", "delta", "sequence", "train_entropy", "rollout_top1", "train_top1")
HERE = [name for name, metric in METRICS.items() if set(metric.needs) <= set(ARRAYS)]


def arrays_of(seed: int, sequences: int = 6, scale: float = 0.2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 9, sequences)
    tokens = int(lengths.sum())
    rollout = -rng.exponential(1.0, tokens)
    train = np.minimum(rollout + scale * rng.standard_t(3, tokens), -1e-9)
    return {
        "rollout": rollout,
        "train": train,
        "delta": train - rollout,
        "sequence": np.repeat(np.arange(sequences), lengths),
        "train_entropy": rng.gamma(2.0, 0.5, tokens),
        "rollout_top1": rng.integers(0, 3, tokens),
        "train_top1": rng.integers(0, 3, tokens),
    }


def value(name: str, arrays: dict[str, np.ndarray]) -> float:
    return METRICS[name](*(arrays[need] for need in METRICS[name].needs))


def close(number: float):
    return pytest.approx(number, rel=1e-9, abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_the_order_of_the_tokens_does_not_matter(seed):
    arrays = arrays_of(seed)
    order = np.random.default_rng(seed + 1).permutation(len(arrays["delta"]))
    shuffled = {name: array[order] for name, array in arrays.items()}
    for name in HERE:
        assert value(name, shuffled) == close(value(name, arrays)), name


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_the_order_of_the_sequences_does_not_matter(seed):
    arrays = arrays_of(seed)
    sequence = arrays["sequence"]
    turned = np.random.default_rng(seed).permutation(sequence.max() + 1)
    order = np.concatenate([np.flatnonzero(sequence == index) for index in turned])
    moved = {name: array[order] for name, array in arrays.items()}
    for renamed in (moved["sequence"], np.argsort(turned)[moved["sequence"]] * 7 + 3):
        for name in HERE:
            assert value(name, moved | {"sequence": renamed}) == close(value(name, arrays)), name


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_twice_the_same_sample_says_the_same(seed):
    """True of every mean, ratio and extreme: none may depend on how many units there are."""
    arrays = arrays_of(seed)
    twice = {name: np.concatenate([array, array]) for name, array in arrays.items()}
    count = arrays["sequence"].max() + 1
    twice["sequence"] = np.concatenate([arrays["sequence"], arrays["sequence"] + count])
    for name in HERE:
        assert value(name, twice) == close(value(name, arrays)), name


def padded(arrays: dict[str, np.ndarray], prompt: int, tool: int, tail: int) -> tuple:
    """The same actions in sequences with a prompt, a tool's output and padding in between."""
    parts, masks, lengths = [], [], []
    for index in range(arrays["sequence"].max() + 1):
        actions = int((arrays["sequence"] == index).sum())
        split = actions // 2
        pieces = [(prompt, 0), (split, 1), (tool, 0), (actions - split, 1), (tail, 0)]
        mask = np.concatenate([np.full(length, flag, dtype=bool) for length, flag in pieces])
        masks.append(mask)
        parts.append(np.arange(len(mask)))
        lengths.append(len(mask))
    mask = np.concatenate(masks)
    n = len(lengths)
    rollout = Rollout(
        token_ids=np.concatenate(parts),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        action_mask=mask,
        turn=mask.astype(np.int64),
        prompt_index=np.arange(n) // 2,
        finish_reason=("stop",) * n,
        sampling=Sampling(),
        fingerprint={},
    )
    ids = rollout.token_ids[mask]
    left = Scoring("left", ids, arrays["rollout"], {}, None, arrays["rollout_top1"])
    right = Scoring(
        "right", ids, arrays["train"], {}, arrays["train_entropy"], arrays["train_top1"]
    )
    return rollout, left, right


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 5), st.integers(0, 5))
def test_prompt_tool_output_and_padding_do_not_count(seed, tool, tail):
    arrays = arrays_of(seed)
    plain = compare(*padded(arrays, 1, 0, 0), sampled_by_left=True)
    wrapped = compare(*padded(arrays, 9, tool, tail), sampled_by_left=True)
    assert wrapped.metrics == plain.metrics
    for name in HERE:
        assert plain.metrics[name].value == pytest.approx(value(name, arrays), rel=1e-7), name


def test_a_masked_token_does_not_count_whatever_it_holds():
    arrays = arrays_of(3)
    rollout, left, right = padded(arrays, 4, 3, 2)
    sequence = rollout.sequence_of_token[rollout.action_mask]
    keep = np.ones(len(sequence), dtype=bool)
    keep[[0, 5, 11]] = False
    mask = rollout.action_mask.copy()
    mask[np.flatnonzero(mask)[~keep]] = False
    smaller = Rollout(
        rollout.token_ids, rollout.offsets, mask, rollout.turn, rollout.prompt_index,
        rollout.finish_reason, rollout.sampling, rollout.fingerprint,
    )  # fmt: skip

    def kept(scoring: Scoring) -> Scoring:
        entropy = None if scoring.entropy is None else scoring.entropy[keep]
        top1 = scoring.top1[keep]
        logprobs = scoring.logprobs[keep]
        return Scoring(scoring.name, scoring.token_ids[keep], logprobs, {}, entropy, top1)

    got = compare(smaller, kept(left), kept(right), sampled_by_left=True)
    want = {name: array[keep] for name, array in arrays.items()}
    for name in HERE:
        assert got.metrics[name].value == pytest.approx(value(name, want), rel=1e-7), name


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_float32_inputs_are_worked_on_in_float64(seed):
    """The number of float32 inputs is exactly that of their float64 copies."""
    arrays = arrays_of(seed)
    single = {
        name: array.astype(np.float32) if array.dtype.kind == "f" else array
        for name, array in arrays.items()
    }
    double = {
        name: array.astype(np.float64) if array.dtype.kind == "f" else array
        for name, array in single.items()
    }
    for name in HERE:
        assert value(name, single) == value(name, double), name
        assert value(name, single) == pytest.approx(value(name, arrays), rel=2e-4, abs=2e-6), name


@settings(max_examples=100, deadline=None)
@given(st.floats(-0.1, 0.1))
def test_k2_and_k3_agree_token_by_token_where_the_sides_nearly_do(delta):
    """|k3 - k2| is the rest of the exponential's series: at most |delta|³ e^|delta| / 6."""
    term = float(exp_minus_linear(np.array([delta]))[0])
    rest = abs(delta) ** 3 * math.exp(abs(delta)) / 6
    assert abs(term - delta**2 / 2) <= rest * (1 + 1e-9) + 1e-18
    assert k3_kl(np.array([delta])) == pytest.approx(term, rel=1e-12, abs=1e-300)
    assert k2_kl(np.array([delta])) == pytest.approx(delta * delta / 2, rel=1e-12, abs=1e-300)


def test_k1_agrees_with_them_only_on_average():
    rng = np.random.default_rng(0)
    s = 0.05
    delta = rng.normal(-(s**2) / 2, s, 400_000)  # E[rho] = 1, as for a true sampler
    pointwise = np.abs(-delta - delta**2 / 2)
    assert np.median(pointwise) > 20 * s**2 / 2
    error = s / math.sqrt(len(delta))
    assert kl(delta) == pytest.approx(k3_kl(delta), abs=4 * error)
    assert kl(delta) == pytest.approx(s**2 / 2, abs=4 * error)


@pytest.mark.parametrize(("mean", "s"), [(0.0, 0.1), (-0.02, 0.2), (0.3, 0.5), (-0.4, 0.05)])
def test_gaussian_log_ratios_in_closed_form(mean, s):
    """E[k1] = -m, E[k2] = (m² + s²) / 2, E[k3] = e^(m + s²/2) - 1 - m, and what follows."""
    normal = NormalDist(mean, s)
    grid = 20_001
    delta = np.array([normal.inv_cdf((i + 0.5) / grid) for i in range(grid)])
    assert kl(delta) == pytest.approx(-mean, abs=1e-9)
    assert k2_kl(delta) == pytest.approx((mean**2 + s**2) / 2, rel=2e-3)
    moment = math.exp(mean + s**2 / 2)
    assert k3_kl(delta) == pytest.approx(moment - 1 - mean, rel=3e-3)
    assert ratio_mean(delta) == pytest.approx(moment, rel=1e-4)


P = np.array([0.5, 0.2, 0.15, 0.1, 0.04, 0.01])
Q = np.array([0.45, 0.25, 0.12, 0.12, 0.03, 0.03])
TRUE_KL = float((P * np.log(P / Q)).sum())


def draws(law: np.ndarray, size: int = 300_000, seed: int = 5) -> np.ndarray:
    token = np.random.default_rng(seed).choice(len(law), size, p=law)
    return np.log(Q)[token] - np.log(P)[token]


@pytest.mark.parametrize("name", ["kl", "k3_kl"])
def test_both_estimators_are_unbiased_under_true_sampling(name):
    delta = draws(P)
    terms = -delta if name == "kl" else exp_minus_linear(delta)
    error = terms.std() / math.sqrt(len(delta))
    assert METRICS[name](delta) == pytest.approx(TRUE_KL, abs=4 * error)
    assert error < TRUE_KL / 20  # the test could fail


def test_k2_is_biased_and_k3_is_calmer_than_k1():
    delta = draws(P)
    exact = float((P * np.log(P / Q) ** 2).sum() / 2)
    assert k2_kl(delta) == pytest.approx(exact, rel=0.03)
    assert abs(exact - TRUE_KL) > 0.01 * TRUE_KL
    assert exp_minus_linear(delta).std() < 0.6 * delta.std()


def test_on_tokens_that_the_other_side_sampled_they_estimate_no_kl():
    """Sampled by q: k1 is then -KL(q ‖ p), and k3 no KL either. Why the report says "score"."""
    delta = draws(Q)
    backwards = float((Q * np.log(Q / P)).sum())
    assert kl(delta) == pytest.approx(-backwards, abs=0.002)
    assert k3_kl(delta) != pytest.approx(TRUE_KL, rel=0.1)


def test_truncated_sampling_takes_the_lost_mass_off_k3():
    """Renormalised top-p on the left side only: E[k3] = KL - (1 - kept mass of q)."""
    kept = np.array([True, True, True, True, False, False])
    law = np.where(kept, P, 0.0) / P[kept].sum()
    truth = float((law[kept] * np.log(law[kept] / Q[kept])).sum())
    token = np.random.default_rng(1).choice(len(law), 300_000, p=law)
    delta = np.log(Q[token]) - np.log(law[token])
    assert kl(delta) == pytest.approx(truth, abs=0.003)
    assert k3_kl(delta) == pytest.approx(truth - (1 - Q[kept].sum()), abs=0.003)
    assert ratio_mean(delta) == pytest.approx(Q[kept].sum(), abs=0.003)
