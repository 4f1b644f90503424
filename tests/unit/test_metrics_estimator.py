"""The estimator gives what plain formulas on all tokens give; bad input never a silent number."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.metrics import METRICS, k3_kl
from mismatch.metrics.estimator import Estimator
from mismatch.metrics.registry import Metric
from mismatch.types import Pair, Rollout, Sampling, Scoring

from .plain_estimates import plain

PER_TOKEN = {"rollout", "train", "delta", "sequence", "train_entropy", "rollout_top1", "train_top1"}
ALL = [metric for metric in METRICS.values() if PER_TOKEN.issuperset(metric.needs)]


def tokens(seed: int, prompts: int, samples: int, length: int, *, scale=0.02, zeros=0.0, skip=0):
    """(arrays, sequence, prompt); ``skip``: every skip-th sequence has no action token."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 2 * length, prompts * samples)
    if skip:
        lengths[::skip] = 0
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    spread = scale * np.exp(rng.normal(0, 0.4, len(lengths)))[sequence]
    rollout = -rng.exponential(1.0, len(sequence)) * rng.random(len(sequence)) ** 2
    delta = rng.standard_t(4, len(sequence)) * spread
    delta[rng.random(len(sequence)) < zeros] = 0.0
    top1 = rng.integers(0, 50, len(sequence))
    arrays = {
        "rollout": rollout,
        "train": rollout + delta,
        "sequence": sequence,
        "train_entropy": rng.exponential(1.0, len(sequence)),
        "rollout_top1": top1,
        "train_top1": np.where(rng.random(len(sequence)) < 0.99, top1, -1),
    }
    arrays["delta"] = arrays["train"] - arrays["rollout"]
    return arrays, sequence, np.repeat(np.arange(prompts), samples)


def assert_same(got, want, rel=1e-11):
    assert set(got) == {name for name, estimate in want.items() if estimate is not None}
    for name, actual in got.items():
        truth = want[name]
        assert set(actual.flags) == set(truth.flags), name
        assert (actual.n_tokens, actual.n_sequences, actual.n_prompts) == (
            truth.n_tokens,
            truth.n_sequences,
            truth.n_prompts,
        )
        for field in ("value", "low", "high"):
            a, b = getattr(actual, field), getattr(truth, field)
            assert (a is None) == (b is None), (name, field)
            if b is not None:
                assert a == pytest.approx(b, rel=rel, abs=1e-300), (name, field)


CASES = {
    "one block": tokens(0, 40, 4, 30),
    "bootstrap-t": tokens(1, 60, 4, 200, skip=7),
    "percentile": tokens(2, 300, 2, 80),
    "half exactly 0": tokens(3, 300, 2, 60, zeros=0.6),
    "float32 noise": tokens(4, 60, 2, 200, scale=1e-7),
    "long sequences": tokens(5, 20, 1, 4000),
    "one prompt": tokens(6, 1, 4, 500),
    "shares of 0 and 1": tokens(7, 30, 4, 100, zeros=0.999),
}


@pytest.mark.parametrize("case", CASES)
def test_the_estimator_gives_what_plain_formulas_give(case):
    """In one chunk, and in many of which a sample says what large terms are."""
    arrays, sequence, prompt = CASES[case]
    want = {metric.name: plain(metric, arrays, sequence, prompt) for metric in ALL}
    assert_same(Estimator(sequence, prompt).all(ALL, arrays), want)
    assert_same(Estimator(sequence, prompt, block=512).all(ALL, arrays), want)


def test_a_sample_that_misleads_changes_nothing():
    """Every sampled token is large, so the floor cuts the true largest hundredth off."""
    rng = np.random.default_rng(0)
    sequence, prompt = np.repeat(np.arange(200), 100), np.repeat(np.arange(50), 4)
    delta = rng.standard_t(3, 20_000) * 0.01
    delta[::40] = 0.5
    metrics = [METRICS[name] for name in ("k2_kl", "ratio_mean", "logprob_abs_diff_mean")]
    want = {m.name: plain(m, {"delta": delta}, sequence, prompt) for m in metrics}
    got = Estimator(sequence, prompt, block=500).all(metrics, {"delta": delta})
    assert_same(got, want)


def test_tokens_in_any_order_and_delta_left_out():
    arrays, sequence, prompt = CASES["bootstrap-t"]
    want = Estimator(sequence, prompt).all(ALL, arrays)
    order = np.random.default_rng(0).permutation(len(sequence))
    mixed = {name: array[order] for name, array in arrays.items() if name != "delta"}
    got = Estimator(sequence[order], prompt).all(ALL, mixed)
    assert_same(got, want, rel=1e-9)


def test_quantiles_of_signed_terms_and_of_infinite_ones():
    sequence, prompt = np.repeat(np.arange(40), 100), np.repeat(np.arange(20), 2)
    values = np.random.default_rng(0).normal(size=4000)
    signed = dataclasses.replace(
        METRICS["logprob_abs_diff_p90"], name="signed", terms=lambda delta: delta, bounds=(-9, 9)
    )
    got = Estimator(sequence, prompt).one(signed, {"delta": values})
    want = plain(signed, {"delta": values}, sequence, prompt)
    assert got == want
    endless = dataclasses.replace(
        signed, terms=lambda delta: np.exp(1e4 * delta), bounds=(0, np.inf)
    )
    got = Estimator(sequence, prompt).one(endless, {"delta": values})
    assert (got.value, got.low, got.flags) == (np.inf, None, ("overflow",))


@pytest.mark.parametrize("spike", [0.0, 3.0, 1e4])
def test_one_token_that_carries_a_fifth_is_found(spike):
    rng = np.random.default_rng(0)
    sequence, prompt = np.repeat(np.arange(200), 100), np.repeat(np.arange(50), 4)
    delta = rng.uniform(-0.1, 0.1, 20_000)
    delta[777] += spike
    metrics = [METRICS[name] for name in ("kl", "k2_kl", "ratio_mean", "logprob_abs_diff_mean")]
    want = {m.name: plain(m, {"delta": delta}, sequence, prompt) for m in metrics}
    assert_same(Estimator(sequence, prompt, block=512).all(metrics, {"delta": delta}), want)
    assert any("heavy-tail" in estimate.flags for estimate in want.values()) == (spike > 3.0)


def run_of(arrays, sequence, prompt) -> tuple[Rollout, Scoring, Scoring]:
    """A rollout with one prompt token before each response, and its two scorings."""
    lengths = np.bincount(sequence, minlength=len(prompt))
    offsets = np.concatenate([[0], np.cumsum(lengths + 1)])
    mask = np.ones(offsets[-1], bool)
    mask[offsets[:-1]] = False
    ids = np.random.default_rng(0).integers(0, 99, offsets[-1])
    rollout = Rollout(
        ids, offsets, mask, mask.astype(int), prompt, ("length",) * len(prompt), Sampling(), {}
    )
    actions = ids[mask]
    left = Scoring("engine", actions, arrays["rollout"], {}, top1=arrays["rollout_top1"])
    right = Scoring(
        "trainer", actions, arrays["train"], {}, arrays["train_entropy"], arrays["train_top1"]
    )
    return rollout, left, right


# ---------------------------------------------------------------- bad input

SEQUENCE, PROMPT = np.array([0, 0, 1, 1]), np.array([0, 1])


def bad(value: float) -> np.ndarray:
    return np.array([-1.0, -2.0, value, -0.5])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["rollout", "train"])
def test_a_value_that_is_not_finite_is_named(side, value):
    other = {"rollout": "train", "train": "rollout"}[side]
    arrays = {side: bad(value), other: bad(-1.0)}
    with pytest.raises(MismatchError, match=rf"{side} is {value}.*\b2\b"):
        Estimator(SEQUENCE, PROMPT).all(ALL, arrays)
    with pytest.raises(MismatchError, match=rf"probs_diff_mean: {side}: 1\b"):
        METRICS["probs_diff_mean"](arrays["rollout"], arrays["train"])


def test_shapes_that_disagree_are_named():
    estimator = Estimator(SEQUENCE, PROMPT)
    with pytest.raises(MismatchError, match=r"train has 3\b.*\b4"):
        estimator.all(ALL, {"rollout": np.zeros(4), "train": np.zeros(3)})
    with pytest.raises(MismatchError, match=r"delta has 5\b.*\b4"):
        estimator.one(METRICS["k3_kl"], {"delta": np.zeros(5)})
    with pytest.raises(MismatchError, match=r"\(4, 2\).*\b4 token"):
        estimator.one(Metric("two", _pair, combine=np.sum), {"delta": _TWO})
    with pytest.raises(MismatchError, match=r"sequence 2.*0 to"):
        Estimator(np.array([0, 2]), PROMPT)
    with pytest.raises(MismatchError, match="whole numbers"):
        Estimator(np.array([0.0, 1.0]), PROMPT)
    with pytest.raises(MismatchError, match="needs train_entropy"):
        estimator.one(METRICS["entropy_train"], {"delta": np.zeros(4)})
    rollout, left, right = run_of(*CASES["one block"])
    tokens = len(right.logprobs)
    with pytest.raises(MismatchError, match=rf"trainer: {tokens - 1}\b.*\b{tokens}\b"):
        Pair.of(rollout, left, dataclasses.replace(right, logprobs=right.logprobs[:-1]))


_TWO = np.zeros((4, 2, 1))


def _pair(delta):
    return (delta[:, :, 0],)


def test_nothing_is_an_error_and_little_is_said_to_be_little():
    with pytest.raises(EmptyComparison):
        Estimator(np.empty(0, int), PROMPT)
    values = Estimator(np.array([0]), np.array([0])).all(
        ALL, {"delta": np.array([0.5]), "sequence": 0}
    )
    assert values["kl"].value == -0.5
    assert values["kl"].flags == ("one-prompt",)
    assert (values["kl"].low, values["kl"].n_tokens) == (None, 1)
    lone = Estimator(np.zeros(3, int), np.array([0])).one(METRICS["k3_kl"], {"delta": np.ones(3)})
    assert (lone.low, lone.flags, lone.n_sequences) == (None, ("one-prompt",), 1)


def test_sequences_whose_tokens_are_all_masked_count_nowhere():
    arrays, sequence, prompt = CASES["bootstrap-t"]
    got = Estimator(sequence, prompt).one(METRICS["log_ppl_diff"], arrays)
    held = np.unique(sequence)
    assert got.n_sequences == len(held) < len(prompt)
    means = [-arrays["delta"][sequence == n].mean() for n in held]
    assert got.value == pytest.approx(np.mean(means))


# ---------------------------------------------------------------- tensors and integers


def test_tensors_are_read_as_numbers():
    """bfloat16, which numpy lacks, and tensors with a gradient."""
    import torch

    values = torch.tensor([0.5, -0.25, 1.0, 0.0])
    truth = k3_kl(values.numpy())
    for tensor in (values, values.bfloat16(), values.double().requires_grad_(), values.half()):
        assert k3_kl(tensor) == truth
        got = Estimator(SEQUENCE, PROMPT).one(METRICS["k3_kl"], {"delta": tensor})
        assert got is not None
        assert got.value == pytest.approx(truth, rel=1e-15)


def test_integers_are_floats_or_ids():
    whole = np.array([0, 1, 2, 3], np.uint8)
    assert METRICS["kl"](whole) == -1.5  # an unsigned number has no minus
    assert METRICS["k2_kl"](np.full(3, 100, np.int8)) == 5000.0  # nor a square
    got = Estimator(SEQUENCE, PROMPT).one(METRICS["kl"], {"delta": whole})
    assert got is not None
    assert got.value == -1.5
    assert METRICS["argmax_agree"](whole, whole) == 1.0
    with pytest.raises(MismatchError, match="holds bool"):
        METRICS["kl"](whole > 1)
    with pytest.raises(MismatchError, match="holds <U1"):
        METRICS["kl"](np.array(["a"]))


def test_metrics_need_no_torch():
    """In a process of its own, as a user imports them."""
    code = (
        "import sys, mismatch.metrics; print([m for m in ('torch', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_many_prompts_are_drawn_in_groups_with_the_same_intervals(monkeypatch):
    """Of prompts that differ and drift over the file; a group holds some from everywhere."""
    arrays, sequence, prompt = tokens(3, 6_000, 1, 6)
    drift = np.linspace(0.5, 2.0, 6_000)[prompt[sequence]]
    arrays = {"delta": arrays["delta"] * drift, "sequence": sequence}
    wanted = [METRICS[name] for name in ("k3_kl", "logprob_abs_diff_mean", "ess_seq")]
    single = Estimator(sequence, prompt).all(wanted, arrays)
    monkeypatch.setattr("mismatch.metrics.estimator.KEPT", 2_000 * 1_000)
    grouped = Estimator(sequence, prompt)
    assert grouped.weights.shape == (1_000, 2_000)
    for name, estimate in grouped.all(wanted, arrays).items():
        one = single[name]
        assert estimate.value == one.value
        assert estimate.high - estimate.low == pytest.approx(one.high - one.low, rel=0.15)
        assert abs(estimate.low - one.low) < 0.15 * (one.high - one.low)
