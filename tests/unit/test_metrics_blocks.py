"""Blocks and streams give what all tokens at once would give; bad input never a silent number."""

from __future__ import annotations

import dataclasses
import time
import tracemalloc

import numpy as np
import pytest

from mismatch.analysis.comparison import compare
from mismatch.errors import EmptyComparison, MismatchError
from mismatch.metrics import METRICS, blocks, measure, passes, threads
from mismatch.metrics.estimate import Estimator, hill_index
from mismatch.metrics.registry import Metric
from mismatch.metrics.stream import stream
from mismatch.run import store
from mismatch.streaming import stream_run
from mismatch.types import Pair, Rollout, Sampling, Scoring

from .plain_estimates import plain

PER_TOKEN = {"rollout", "train", "delta", "sequence", "train_entropy", "rollout_top1", "train_top1"}
ALL = [metric for metric in METRICS.values() if PER_TOKEN.issuperset(metric.needs)]


def tokens(seed: int, prompts: int, samples: int, length: int, *, scale=0.02, zeros=0.0, skip=0):
    """(arrays, sequence, prompt); ``skip``: every so manieth sequence has no action token."""
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
    for name, mine in got.items():
        truth = want[name]
        assert set(mine.flags) == set(truth.flags), name
        assert (mine.n_tokens, mine.n_sequences, mine.n_prompts) == (
            truth.n_tokens,
            truth.n_sequences,
            truth.n_prompts,
        )
        for field in ("value", "low", "high"):
            a, b = getattr(mine, field), getattr(truth, field)
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


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 512 tokens, so that a few thousand make many blocks, pieces and thresholds."""
    for module in (blocks, measure):
        monkeypatch.setattr(module, "BLOCK", 512)


@pytest.mark.parametrize("case", CASES)
def test_blocks_give_what_all_tokens_at_once_give(case, small_blocks):
    arrays, sequence, prompt = CASES[case]
    want = {metric.name: plain(metric, arrays, sequence, prompt) for metric in ALL}
    assert_same(Estimator(sequence, prompt).all(ALL, arrays), want)


def test_tokens_in_any_order_and_delta_left_out(small_blocks):
    arrays, sequence, prompt = CASES["bootstrap-t"]
    want = Estimator(sequence, prompt).all(ALL, arrays)
    order = np.random.default_rng(0).permutation(len(sequence))
    mixed = {name: array[order] for name, array in arrays.items() if name != "delta"}
    got = Estimator(sequence[order], prompt).all(ALL, mixed)
    assert_same(got, want, rel=1e-9)


@pytest.mark.parametrize("name", [metric.name for metric in ALL if metric.kind != "quantile"])
def test_terms_of_a_unit_do_not_depend_on_the_others(name):
    """Else blocks would give other numbers than Metric.__call__: every new metric comes by here."""
    metric, (arrays, sequence, _) = METRICS[name], CASES["one block"]
    if metric.kind == "extreme" and metric.fold is None:
        pytest.skip("needs all tokens at once")
    origin = metric.origin and metric.origin(*(arrays[need] for need in metric.needs))
    cut = int(np.flatnonzero(sequence == 80)[0])
    halves = [
        metric.parts({key: array[half] for key, array in arrays.items()}, origin)
        for half in (slice(0, cut), slice(cut, None))
    ]
    whole = metric.parts(arrays, origin)
    for part, first, second in zip(whole, *halves, strict=True):
        np.testing.assert_allclose(np.concatenate([first, second]), part, rtol=1e-12)


def test_a_misleading_sample_costs_a_pass_not_the_truth(small_blocks):
    """The sample sees large deltas only; the floors then cut the true largest hundredth off."""
    arrays, sequence, prompt = CASES["percentile"]
    mean = METRICS["logprob_abs_diff_mean"]
    layout = blocks.Layout.of(sequence, prompt)
    misleading = {"sequence": sequence[:100], "delta": np.full(100, 50.0)}
    work = measure._Work(
        [mean], lambda: blocks.in_memory(arrays, layout, sequence), layout, misleading
    )
    work.first_pass()
    assert work.ends.deltas is None
    truth = plain(mean, arrays, sequence, prompt)
    assert work.heavy == {mean.name: "heavy-tail" in truth.flags}
    inner = dataclasses.replace(mean, outermost=False)
    work = measure._Work(
        [inner], lambda: blocks.in_memory(arrays, layout, sequence), layout, misleading
    )
    work.first_pass()
    assert work.columns.heavy(inner, len(sequence)) is None
    assert work.heavy == {mean.name: "heavy-tail" in truth.flags}


def test_tail_keeps_the_largest_through_all_its_prunings(monkeypatch):
    sizes = np.random.default_rng(0).pareto(1.5, 400_000)
    tail = passes.Tail(1000)
    for part in np.split(sizes, 40):
        tail.keep(tail.look(part))
    assert tail.complete
    assert len(tail.held) < 50_000
    largest = np.sort(sizes)[-1001:]
    assert np.sort(tail.held)[-1001:].tolist() == largest.tolist()
    assert hill_index(sizes) == pytest.approx(1.5, rel=0.1)


def test_quantiles_of_signed_terms_and_of_infinite_ones(small_blocks):
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


def test_memory_stays_a_fraction_of_the_inputs():
    arrays, sequence, prompt = tokens(8, 256, 4, 1000)
    given = {name: arrays[name] for name in ("rollout", "train")}
    metrics = [metric for metric in ALL if "train_entropy" not in metric.needs]
    Estimator(sequence, prompt).all(metrics, given)
    tracemalloc.start()
    Estimator(sequence, prompt).all(metrics, given)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(sequence) > 900_000
    assert peak < 3 * (2 * given["rollout"].nbytes + sequence.nbytes)


@pytest.mark.parametrize("case", ["percentile", "half exactly 0", "long sequences"])
def test_any_number_of_threads_gives_the_same_bits(case, small_blocks):
    arrays, sequence, prompt = CASES[case]
    one, three = (Estimator(sequence, prompt, threads=n).all(ALL, arrays) for n in (1, 3))
    assert one == three
    chunks = chunked(arrays, 700)
    one, three = (stream(lambda: chunks, prompt, ALL, threads=n) for n in (1, 3))
    assert one == three


def test_results_come_in_order_and_errors_are_raised():
    started = []

    def work(number):
        started.append(number)
        time.sleep(0.002 * (5 - number % 5))
        if number == 17:
            raise MismatchError("the seventeenth")
        return number * number

    got = threads.in_order(work, range(16), 3)
    assert list(got) == [number * number for number in range(16)]
    with pytest.raises(MismatchError, match="the seventeenth"):
        list(threads.in_order(work, range(15, 1000), 3))
    assert max(started) < 30  # a few blocks ahead, never all of them in memory


@pytest.mark.parametrize("metric", [m for m in ALL if m.outermost], ids=lambda m: m.name)
def test_largest_terms_are_those_of_outermost_deltas(metric):
    """What ``outermost`` declares: a size falls, then rises, as delta grows."""
    grid = np.concatenate([-np.logspace(2, -9, 900), [0.0], np.logspace(-9, 2, 900)])
    assert metric.needs == ("delta",)
    for part in metric.parts({"delta": grid}):
        size = np.abs(np.asarray(part, float))
        from_left, from_right = (np.minimum.accumulate(way) for way in (size, size[::-1]))
        room = 1.0 + 1e-9  # rounding where two series meet
        assert (size <= np.maximum(from_left, from_right[::-1]) * room + 1e-300).all()


@pytest.mark.parametrize("spike", [0.0, 3.0, 1e4])
def test_one_token_that_carries_a_fifth_is_found(spike, small_blocks):
    """The sum of all sizes is only bounded from below in the first pass: a second one decides."""
    rng = np.random.default_rng(0)
    sequence, prompt = np.repeat(np.arange(200), 100), np.repeat(np.arange(50), 4)
    delta = rng.uniform(-0.1, 0.1, 20_000)
    delta[777] += spike
    metrics = [METRICS[name] for name in ("kl", "k2_kl", "ratio_mean", "logprob_abs_diff_mean")]
    want = {m.name: plain(m, {"delta": delta}, sequence, prompt) for m in metrics}
    assert_same(Estimator(sequence, prompt).all(metrics, {"delta": delta}), want)
    assert any("heavy-tail" in one.flags for one in want.values()) == (spike > 3.0)


@pytest.mark.parametrize(("most", "rest"), [(0.0, 0.01), (0.5, 30.0)])
def test_sides_that_differ_by_the_same_on_nearly_every_token(most, rest, small_blocks):
    """Both floors are then that delta, and so is every one of the tokens that were left out."""
    sequence, prompt = np.repeat(np.arange(200), 100), np.repeat(np.arange(50), 4)
    delta = np.full(20_000, most)
    delta[::125] = rest  # 0.8 %: fewer than the Hill index looks at
    metrics = [metric for metric in ALL if metric.outermost]
    arrays, layout = {"delta": delta}, blocks.Layout.of(sequence, prompt)
    sample = {"sequence": sequence[:100], "delta": np.full(100, most)}
    work = measure._Work(
        metrics, lambda: blocks.in_memory(arrays, layout, sequence), layout, sample
    )
    work.first_pass()
    assert work.ends.deltas is not None
    truth = {metric.name: plain(metric, arrays, sequence, prompt) for metric in metrics}
    assert work.heavy == {name: "heavy-tail" in one.flags for name, one in truth.items()}
    assert any(work.heavy.values()) == (most > 0.0)


# ---------------------------------------------------------------- streams


def chunked(arrays, size):
    total = len(arrays["sequence"])
    names = [name for name in arrays if name != "delta"]
    return [
        {name: arrays[name][low : low + size] for name in names} for low in range(0, total, size)
    ]


@pytest.mark.parametrize("size", [37, 512, 5000, 10**9])
def test_a_stream_gives_the_same_whatever_its_chunks(size, small_blocks):
    arrays, sequence, prompt = CASES["bootstrap-t"]
    chunks = chunked(arrays, size)
    want = Estimator(sequence, prompt).all(ALL, arrays)
    assert_same(stream(lambda: chunks, prompt, ALL), want, rel=1e-9)


def test_streams_that_cannot_be():
    arrays, _, prompt = CASES["one block"]
    chunks = chunked(arrays, 100)
    with pytest.raises(MismatchError, match="must be a function"):
        stream(chunks, prompt)
    once = iter(chunks)
    with pytest.raises(MismatchError, match="later pass over the chunks holds no tokens"):
        stream(lambda: once, prompt)
    with pytest.raises(MismatchError, match=r"sequence \d+ comes after sequence \d+"):
        stream(lambda: chunks[::-1], prompt)
    with pytest.raises(EmptyComparison):
        stream(list, prompt)
    with pytest.raises(EmptyComparison):
        stream(lambda: [{"sequence": np.empty(0, int), "delta": np.empty(0)}], prompt)
    with pytest.raises(MismatchError, match="lacks 'sequence'"):
        stream(lambda: [{"delta": np.ones(2)}], prompt)
    lengths = np.unique(arrays["sequence"], return_counts=True)
    with pytest.raises(MismatchError, match="later pass ended after"):
        stream(lambda: chunks[:-1], prompt, lengths=lengths)
    with pytest.raises(MismatchError, match="holds more tokens than the first"):
        stream(lambda: [*chunks, chunks[-1]], prompt, lengths=lengths)
    uneven = [*chunks[:-1], {"sequence": chunks[-1]["sequence"], "delta": chunks[-1]["train"]}]
    with pytest.raises(MismatchError, match="chunks hold different arrays"):
        stream(lambda: uneven, prompt)


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


def saved(tmp_path, rollout, left, right):
    store.save_rollout(tmp_path, rollout)
    for scoring in (left, right):
        store.save_scoring(tmp_path, scoring, rollout)


def test_a_run_is_streamed_from_its_files(tmp_path, monkeypatch):
    """Many row groups, and batches that end elsewhere."""
    monkeypatch.setattr("mismatch.run.tables.GROUP_VALUES", 1500)
    monkeypatch.setattr("mismatch.streaming.TOKENS", 700)
    rollout, left, right = run_of(*CASES["bootstrap-t"])
    saved(tmp_path, rollout, left, right)
    want = compare(rollout, left, right, sampled_by_left=False).metrics
    got = stream_run(tmp_path, "engine", "trainer", ALL)
    assert_same(got, {name: want[name] for name in got}, rel=1e-9)
    assert len(got) > 45


def test_streaming_refuses_other_tokens_and_other_rows(tmp_path):
    rollout, left, right = run_of(*CASES["one block"])
    changed = left.token_ids.copy()
    changed[5] += 1
    saved(tmp_path, rollout, dataclasses.replace(left, token_ids=changed), right)
    with pytest.raises(MismatchError, match="engine scored other tokens"):
        stream_run(tmp_path, "engine", "trainer")
    arrays, sequence, prompt = CASES["one block"]
    keep = sequence < 100
    short = run_of({k: v[keep] for k, v in arrays.items()}, sequence[keep], prompt[:100])
    saved(tmp_path, rollout, left, right)
    store.save_scoring(tmp_path, short[2], short[0])
    with pytest.raises(MismatchError, match=r"other tokens|different numbers of sequences"):
        stream_run(tmp_path, "engine", "trainer")


def test_streaming_a_run_without_sequences_is_an_empty_comparison(tmp_path):
    rollout, left, right = run_of(*CASES["one block"])
    saved(tmp_path, rollout, left, right)
    from pyarrow import parquet as pq

    path = tmp_path / store.ROLLOUT
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(EmptyComparison, match="holds no sequence"):
        stream_run(tmp_path, "engine", "trainer")


# ---------------------------------------------------------------- bad input

SEQUENCE, PROMPT = np.array([0, 0, 1, 1]), np.array([0, 1])


def bad(value: float) -> np.ndarray:
    return np.array([-1.0, -2.0, value, -0.5])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["rollout", "train"])
def test_a_value_that_is_not_finite_is_named(side, value):
    other = {"rollout": "train", "train": "rollout"}[side]
    arrays = {side: bad(value), other: bad(-1.0)}
    with pytest.raises(MismatchError, match=f"{side} is {value} at action token 2"):
        Estimator(SEQUENCE, PROMPT).all(ALL, arrays)
    with pytest.raises(MismatchError, match=f"{side} is {value} at action token 2"):
        stream(lambda: [{"sequence": SEQUENCE, **arrays}], PROMPT)
    with pytest.raises(MismatchError, match="1 inputs are not finite"):
        METRICS["probs_diff_mean"](arrays["rollout"], arrays["train"])


def test_shapes_that_disagree_are_named():
    estimator = Estimator(SEQUENCE, PROMPT)
    with pytest.raises(MismatchError, match="train has 3 tokens, sequence has 4"):
        estimator.all(ALL, {"rollout": np.zeros(4), "train": np.zeros(3)})
    with pytest.raises(MismatchError, match="delta has 5 tokens, sequence has 4"):
        estimator.one(METRICS["k3_kl"], {"delta": np.zeros(5)})
    with pytest.raises(MismatchError, match=r"terms of shape \(2, 2\) for 2 tokens"):
        estimator.one(
            Metric("two", "mean", "token", _pair, ("delta",), np.sum, "1"), {"delta": _TWO}
        )
    with pytest.raises(MismatchError, match="sequence 2 has no prompt"):
        Estimator(np.array([0, 2]), PROMPT)
    with pytest.raises(MismatchError, match="whole numbers"):
        Estimator(np.array([0.0, 1.0]), PROMPT)
    with pytest.raises(MismatchError, match="needs train_entropy"):
        estimator.one(METRICS["entropy_train"], {"delta": np.zeros(4)})
    rollout, left, right = run_of(*CASES["one block"])
    with pytest.raises(MismatchError, match=r"trainer: \d+ logprobs for \d+ tokens"):
        Pair.of(rollout, left, dataclasses.replace(right, logprobs=right.logprobs[:-1]))


_TWO = np.zeros((4, 2, 1))


def _pair(delta):
    return (delta[:, :, 0],)


def test_nothing_is_an_error_and_little_is_said_to_be_little():
    with pytest.raises(EmptyComparison):
        Estimator(np.empty(0, int), PROMPT)
    one = Estimator(np.array([0]), np.array([0])).all(
        ALL, {"delta": np.array([0.5]), "sequence": 0}
    )
    assert one["kl"].value == -0.5
    assert one["kl"].flags == ("one-prompt",)
    assert (one["kl"].low, one["kl"].n_tokens) == (None, 1)
    lone = Estimator(np.zeros(3, int), np.array([0])).one(METRICS["k3_kl"], {"delta": np.ones(3)})
    assert (lone.low, lone.flags, lone.n_sequences) == (None, ("one-prompt",), 1)


def test_sequences_whose_tokens_are_all_masked_count_nowhere():
    arrays, sequence, prompt = CASES["bootstrap-t"]
    got = Estimator(sequence, prompt).one(METRICS["log_ppl_diff"], arrays)
    held = np.unique(sequence)
    assert got.n_sequences == len(held) < len(prompt)
    means = [-arrays["delta"][sequence == n].mean() for n in held]
    assert got.value == pytest.approx(np.mean(means))
