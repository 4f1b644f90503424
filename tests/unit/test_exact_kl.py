"""Exact divergences are the sums that they claim to be, and say so where they cannot be.

Known truths: closed forms of categorical laws; identical laws give exactly 0; merging outcomes
never raises a divergence and k >= V merges nothing; sampled estimators agree with the exact value
where the left law sampled, and the check tells where it did not. Positions: the seeded choice that
an engine makes while it samples is the one that can be made afterwards.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from mismatch import captures
from mismatch.analysis.comparison import compare
from mismatch.analysis.exact_kl import CHECK, exact_checks, exact_estimates, exact_reason
from mismatch.analysis.levels import judge
from mismatch.analysis.thresholds import Level
from mismatch.captures import WHOLE_AND_PART, Distributions, priority, why_incomparable
from mismatch.engines.distribution_capture import (
    CaptureRequest,
    DistributionRecorder,
    build_distributions,
    kept_columns,
    law_logprobs,
    reported_law,
)
from mismatch.errors import CorruptCapture, EmptyComparison, MismatchError
from mismatch.metrics import METRICS
from mismatch.metrics.exact import divergences, kl_terms
from mismatch.run import captured as dists
from mismatch.run import store
from mismatch.specs import Sampling
from mismatch.training.logprobs import DistributionCapture, select_rows, token_stats
from mismatch.types import Comparison, Pair, Rollout, Scoring
from tests.checkpoints import rollout as rollout_of
from tests.texts import numbers

VOCABULARY = 40


def laws(rng: np.random.Generator, rows: int, width: int, scale: float = 2.0) -> np.ndarray:
    logits = rng.normal(size=(rows, width)) * scale
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


# ---------------------------------------------------------------- the sums


def test_two_coins() -> None:
    p, q = 0.5, 0.25
    values = divergences(np.log([[p, 1 - p]]), np.log([[q, 1 - q]]))
    assert values["kl"] == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3), rel=1e-14)
    assert values["reverse_kl"] == pytest.approx(0.25 * np.log(0.5) + 0.75 * np.log(1.5), rel=1e-13)
    assert values["tv"] == pytest.approx(0.25, rel=1e-14)
    assert values["variance"] == pytest.approx(
        (np.log(p / q) - np.log((1 - p) / (1 - q))) ** 2 * p * (1 - p), rel=1e-13
    )
    assert values["agree"] == 0.0


def test_identical_laws_give_exactly_nothing(rng: np.random.Generator) -> None:
    law = laws(rng, 300, VOCABULARY)  # more than are worked on at once
    values = divergences(law, law.copy())
    assert all((values[name] == 0.0).all() for name in ("kl", "reverse_kl", "tv", "variance"))
    assert (values["agree"] == 1.0).all()


def test_a_small_gap_keeps_its_digits(rng: np.random.Generator) -> None:
    """Half of the variance of a tilt by 1e-7: the textbook sum loses it in the rounding of p."""
    law = laws(rng, 1, VOCABULARY)
    tilt = rng.normal(size=(1, VOCABULARY))
    other = law + 1e-7 * tilt
    other -= np.log(np.exp(other).sum())
    p = np.exp(law)
    spread = (p * tilt**2).sum() - (p * tilt).sum() ** 2
    assert kl_terms(law, other)[0] == pytest.approx(0.5e-14 * spread, rel=1e-5)


def test_a_token_that_left_never_samples_counts_as_what_right_gives_it() -> None:
    """KL to the untruncated law is minus the log of the select_rows mass."""
    whole = np.log([[0.5, 0.4, 0.1]])
    with np.errstate(divide="ignore"):
        cut = np.log([[5 / 9, 4 / 9, 0.0]])
    values = divergences(cut, whole)
    assert values["kl"] == pytest.approx(-np.log(0.9), rel=1e-13)
    assert "reverse_kl" not in values  # infinite
    assert divergences(whole, cut)["kl"] == np.inf  # the worst value, not a missing one


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_broken_numbers_are_errors(bad: float, side: int, rng: np.random.Generator) -> None:
    pair = [laws(rng, 3, 5), laws(rng, 3, 5)]
    pair[side][1, 2] = bad
    with pytest.raises(MismatchError, match=("left", "right")[side]):
        divergences(*pair)


def test_no_position_is_an_error() -> None:
    with pytest.raises(EmptyComparison):
        divergences(np.zeros((0, 4)), np.zeros((0, 4)))


# ---------------------------------------------------------------- artefact and shared ids


def whole(law: np.ndarray, positions: np.ndarray | None = None) -> Distributions:
    at = np.arange(len(law)) if positions is None else positions
    return Distributions(at, law.astype(np.float32), law.shape[1])


def part(law: np.ndarray, ids: np.ndarray) -> Distributions:
    """What a side says at given ids, as training and engines keep it."""
    rows = torch.from_numpy(law)
    values = (
        select_rows(rows, torch.arange(len(law)), torch.from_numpy(ids)).numpy().astype(np.float32)
    )
    return Distributions(np.arange(len(law)), values[:, :-1], law.shape[1], ids, values[:, -1])


@pytest.mark.parametrize("k", [1, 3, 10, 39])
def test_merging_outcomes_never_raises_a_divergence(k: int, rng: np.random.Generator) -> None:
    left, right = laws(rng, 200, VOCABULARY), laws(rng, 200, VOCABULARY)
    ids = np.argsort(-left, axis=1)[:, :k]
    full = divergences(whole(left).law(), whole(right).law())
    merged = divergences(part(left, ids).law(), part(right, ids).law())
    for name in ("kl", "reverse_kl", "tv"):
        assert (merged[name] <= full[name] + 1e-6).all()
        assert merged[name].mean() < full[name].mean() or k == 39
    if k == 39:  # the remainder is one token
        np.testing.assert_allclose(merged["kl"], full["kl"], atol=1e-6)


def test_more_ids_never_lower_the_bound(rng: np.random.Generator) -> None:
    left, right = laws(rng, 100, VOCABULARY), laws(rng, 100, VOCABULARY)
    order = np.argsort(-left, axis=1)
    bounds = []
    for k in (1, 2, 5, 20, 39):
        merged = part(left, order[:, :k]), part(right, order[:, :k])
        bounds.append(divergences(*(side.law() for side in merged))["kl"])
    for fewer, more in itertools.pairwise(bounds):
        assert (fewer <= more + 1e-6).all()


def test_k_of_the_whole_vocabulary_keeps_all_of_it(rng: np.random.Generator) -> None:
    rows = torch.from_numpy(laws(rng, 4, VOCABULARY))
    assert kept_columns(rows, top_k=1).keys() == {"logprobs"}  # small: whole anyway
    large = torch.from_numpy(laws(rng, 2, captures.WHOLE_VOCABULARY + 1))
    assert kept_columns(large, top_k=64).keys() == {"logprobs", "ids", "rest"}
    assert kept_columns(large, top_k=captures.WHOLE_VOCABULARY + 1).keys() == {"logprobs"}


def test_the_rest_keeps_its_digits_where_it_is_tiny() -> None:
    """One minus the sum of float32 probabilities would say 0, or less than that."""
    logits = torch.full((1, 5000), -30.0)
    logits[0, 7] = 0.0
    taken = kept_columns(logits.log_softmax(-1), top_k=2)
    assert taken["rest"].item() == pytest.approx(np.log(4998) - 30.0, abs=1e-4)
    trained = select_rows(logits.log_softmax(-1), torch.tensor([0]), taken["ids"])
    assert trained[0, -1].item() == taken["rest"].item()


def test_other_ids_or_positions_cannot_be_compared(rng: np.random.Generator) -> None:
    law = laws(rng, 6, VOCABULARY)
    ids = np.argsort(-law, axis=1)[:, :4]
    kept = part(law, ids)
    assert why_incomparable(kept, part(law, ids)) == ""
    assert "ids" in why_incomparable(kept, part(law, ids[:, ::-1].copy()))
    assert why_incomparable(kept, whole(law)) == WHOLE_AND_PART
    moved = dataclasses.replace(kept, positions=kept.positions + 1)
    assert "positions" in why_incomparable(kept, moved)
    assert "41 entries" in why_incomparable(whole(law), whole(laws(rng, 6, 41)))


def test_damaged_artefacts_are_refused(rng: np.random.Generator, tmp_path: Path) -> None:
    law = laws(rng, 3, VOCABULARY)
    ids = np.argsort(-law, axis=1)[:, :4]
    good = part(law, ids)
    dists.save_distributions(tmp_path, "dists/x.safetensors", good)
    back = dists.load_distributions(tmp_path, "dists/x.safetensors")
    for field in dataclasses.fields(Distributions):
        assert np.array_equal(getattr(back, field.name), getattr(good, field.name))
    with pytest.raises(CorruptCapture, match="twice"):
        dataclasses.replace(good, ids=np.zeros_like(ids))
    with pytest.raises(CorruptCapture, match="ascending"):
        dataclasses.replace(good, positions=np.array([2, 1, 0]))
    with pytest.raises(CorruptCapture, match="expected"):
        dataclasses.replace(good, vocabulary=9, ids=None, rest=None)
    with pytest.raises(MismatchError, match=r"fsdp: 3 .*sum"):
        dataclasses.replace(good, rest=good.rest + 1.0).law("fsdp")
    file = tmp_path / "dists/x.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(MismatchError, match="truncated"):
        dists.load_distributions(tmp_path, "dists/x.safetensors")


# ---------------------------------------------------------------- which positions


def test_the_choice_made_while_sampling_is_the_one_made_afterwards() -> None:
    """Sequences of many lengths, decoded side by side, some forwarded twice, one step too far."""
    lengths = np.random.default_rng(0).integers(1, 60, 40)
    recorder = DistributionRecorder(CaptureRequest(100, 4, seed=3, law=Sampling()))
    logits = torch.zeros(len(lengths), 8)
    for step in range(60):
        running = np.flatnonzero(lengths > step)
        recorder.take(running, np.full(len(running), step), logits[: len(running)])
        if step == 20:  # preempted, forwarded again
            recorder.take(running, np.full(len(running), step - 1), logits[: len(running)])
    keys = [tuple(key) for key in recorder.collected()["keys"].tolist()]
    tokens = [(n, t) for n, length in enumerate(lengths) for t in range(length)]
    numbers = priority(3, *np.array(tokens).T)
    smallest = sorted(tokens[i] for i in np.argsort(numbers)[:100])
    assert keys == smallest
    assert len(set(numbers.tolist())) == len(tokens)


def test_one_crowded_step_keeps_the_smallest_of_it() -> None:
    recorder = DistributionRecorder(CaptureRequest(10, 4, seed=1, law=Sampling()))
    sequence, index = np.arange(300), np.zeros(300, np.int64)
    rows = torch.arange(300.0)[:, None] * torch.tensor([0.0, 0.01])
    recorder.take(sequence, index, rows)
    columns = recorder.collected()
    smallest = np.sort(np.argsort(priority(1, sequence, index))[:10])
    assert columns["keys"][:, 0].tolist() == smallest.tolist()
    # Each with its own row: the second outcome's odds tell which.
    odds = columns["logprobs"][:, 1] - columns["logprobs"][:, 0]
    np.testing.assert_allclose(odds, 0.01 * smallest, atol=1e-6)


def test_the_choice_depends_on_the_seed_and_is_even() -> None:
    sequence, index = (grid.ravel() for grid in np.meshgrid(np.arange(200), np.arange(100)))
    chosen = priority(0, sequence, index) < np.uint64(2**62)  # a quarter
    assert chosen.mean() == pytest.approx(0.25, abs=0.01)
    assert np.bincount(sequence, chosen).std() == pytest.approx(4.33, rel=0.2)  # binomial
    assert np.bincount(index, chosen).std() == pytest.approx(6.12, rel=0.2)
    other = priority(1, sequence, index) < np.uint64(2**62)
    assert (chosen & other).mean() == pytest.approx(1 / 16, abs=0.01)


def test_fewer_tokens_than_positions_are_all_taken() -> None:
    recorder = DistributionRecorder(CaptureRequest(512, 4, seed=0, law=Sampling()))
    recorder.take(np.array([0, 1, 2]), np.array([0, -1, 0]), torch.zeros(3, 8))
    assert recorder.collected()["keys"].tolist() == [[0, 0], [2, 0]]  # -1: still in its prompt
    assert DistributionRecorder(recorder.wanted).collected() == {}


# ---------------------------------------------------------------- an engine's side


@dataclasses.dataclass
class Drawn:
    """A rollout drawn from known laws, with both sides' distributions at every position."""

    rollout: Rollout
    left: Scoring
    right: Scoring


def drawn(seed: int, law: Sampling | None = None, apart: float = 0.3, samples: int = 8) -> Drawn:
    """60 prompts x 1 sample x ``samples`` tokens, the right side off by a random tilt."""
    law = law or Sampling()
    rng = np.random.default_rng(seed)
    count = 60 * samples
    logits = torch.from_numpy(rng.normal(size=(count, VOCABULARY)) * 2)
    left = law_logprobs(logits, law).double().numpy()
    tilt = torch.from_numpy(rng.normal(size=(count, VOCABULARY)) * apart)
    right = ((logits + tilt).float() / law.temperature).log_softmax(-1).double().numpy()
    tokens = np.array([rng.choice(VOCABULARY, p=row / row.sum()) for row in np.exp(left)])
    rollout = rollout_of([(2, samples)] * 60, sampling=law)
    ids = rollout.token_ids.copy()
    ids[rollout.actions] = tokens
    rollout = dataclasses.replace(rollout, token_ids=ids, prompt_index=np.arange(60))
    row = np.arange(count)
    sides = [
        Scoring(name, tokens, values[row, tokens], {}, distributions=whole(values))
        for name, values in (("left", left), ("right", right))
    ]
    return Drawn(rollout, *sides)


def test_distributions_must_be_those_that_the_engine_reported() -> None:
    pair = drawn(0)
    sequence, index = np.divmod(np.arange(480), 8)
    taken = {"keys": np.stack([sequence, index], 1), "logprobs": pair.left.distributions.logprobs}
    distributions = build_distributions(taken, pair.rollout, pair.left.logprobs, VOCABULARY)
    assert np.array_equal(distributions.positions, np.arange(480))
    swapped = {**taken, "logprobs": np.roll(taken["logprobs"], 1, axis=0)}
    with pytest.raises(CorruptCapture, match="log-probability"):
        build_distributions(swapped, pair.rollout, pair.left.logprobs, VOCABULARY)
    with pytest.raises(CorruptCapture, match="no distribution was"):
        build_distributions({}, pair.rollout, pair.left.logprobs, VOCABULARY)
    late = {**taken, "keys": taken["keys"] + [0, 4]}  # the last four of each are no tokens
    with pytest.raises(CorruptCapture, match="log-probability"):
        build_distributions(late, pair.rollout, pair.left.logprobs, VOCABULARY)


def test_tokens_computed_past_the_end_are_dropped() -> None:
    pair = drawn(0)
    rows = np.array([3, 3, 99])
    taken = {
        "keys": np.stack([rows, [1, 8, 0]], 1),
        "logprobs": pair.left.distributions.logprobs[[25, 0, 0]],
    }
    distributions = build_distributions(taken, pair.rollout, pair.left.logprobs, VOCABULARY)
    assert distributions.positions.tolist() == [25]


def test_the_law_is_the_one_that_the_logprobs_are_of() -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, min_p=0.1, seed=4)
    facts = {"logprobs_temperature": 0.7, "logprobs_truncated": True}
    assert reported_law(facts, sampling) == sampling
    raw = {"logprobs_temperature": 1.0, "logprobs_truncated": False}
    law = reported_law(raw, sampling)
    assert (law.temperature, law.truncates) == (1.0, False)


# ---------------------------------------------------------------- the trainer's side


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("top_k", [None, 5])
def test_the_trainer_keeps_the_rows_that_its_logprobs_come_from(
    grad: bool, top_k: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mismatch.training.logprobs.STRIP_BYTES", 4 * VOCABULARY * 3)
    generator = torch.Generator().manual_seed(0)
    rollout = rollout_of([(3, 9), (2, 0), (4, 11)])
    hidden = torch.randn(rollout.n_actions, 6, generator=generator)
    weight = torch.randn(6, VOCABULARY, generator=generator)
    targets = torch.from_numpy(rollout.token_ids[rollout.actions]) % VOCABULARY
    naive = ((hidden @ weight) / 0.7).log_softmax(-1)
    positions = np.array([0, 2, 8, 9, 19])
    law = naive.numpy()[positions]
    asked = whole(law, positions)
    if top_k:
        ids = np.argsort(-law, axis=1)[:, :top_k]
        asked = dataclasses.replace(part(law, ids), positions=positions)
    watch = DistributionCapture.of(asked, rollout)
    with torch.set_grad_enabled(grad):
        # Two micro-batches, the later tokens first, as padding by length may have it.
        parts = []
        for some in (slice(9, 20), slice(0, 9)):
            stats = token_stats(
                hidden[some],
                targets[some],
                lambda h: h @ weight,
                VOCABULARY,
                Sampling(0.7),
                chunk_bytes=4 * VOCABULARY * 4,
                captured=watch.rows(rollout.actions[some]),
            )
            assert not stats.distributions.requires_grad
            parts.append((rollout.actions[some], stats.distributions.numpy()))
    joined = watch.joined(parts)
    assert why_incomparable(asked, joined) == ""
    np.testing.assert_allclose(joined.law(), asked.law(), atol=1e-6)
    with pytest.raises(MismatchError, match=r"\b3 .*\b5 "):
        watch.joined(parts[1:])


def test_nothing_is_kept_where_nothing_is_asked_for() -> None:
    assert DistributionCapture.of(None, rollout_of([(3, 2)])) is None
    stats = token_stats(torch.ones(2, 3), torch.tensor([0, 1]), lambda h: h, 3)
    assert stats.distributions is None


# ---------------------------------------------------------------- as a comparison


def test_a_comparison_holds_the_exact_value_that_its_estimators_estimate() -> None:
    """Every number of the sampled positions beside each other."""
    pair = drawn(1)
    metrics = compare(pair.rollout, pair.left, pair.right, sampled_by_left=True).metrics
    exact = metrics["exact_kl"]
    p, d = (side.distributions.law() for side in (pair.left, pair.right))
    assert exact.value == pytest.approx((np.exp(p) * (p - d)).sum(1).mean(), rel=1e-9)
    assert (exact.n_tokens, exact.n_prompts) == (480, 60)
    assert metrics["kl_at_exact"].value == metrics["kl"].value  # here all positions are sampled
    # What is gained: no chance but that of the positions.
    assert exact.high - exact.low < (metrics["k3_kl"].high - metrics["k3_kl"].low) / 2
    assert metrics["exact_kl_max"].value >= metrics["exact_kl_p99"].value > exact.value
    assert metrics["exact_tv"].value ** 2 <= exact.value / 2  # Pinsker
    assert 0 < metrics["exact_argmax_agree"].value < 1
    (check,) = exact_checks(compare(pair.rollout, pair.left, pair.right, sampled_by_left=True))
    assert check.status == "passed"


def test_the_intervals_of_the_estimators_cover_the_exact_value() -> None:
    """k1 and k3 estimate it without bias: their 95 % intervals miss it about once in twenty."""
    covered = {"kl_at_exact": 0, "k3_kl_at_exact": 0}
    for seed in range(40):
        sides = drawn(seed)
        pair = Pair.of(sides.rollout, sides.left, sides.right)
        estimates = exact_estimates(pair, sides.left, sides.right, sampled_by_left=True)
        for name in covered:
            covered[name] += (
                estimates[name].low < estimates["exact_kl"].value < estimates[name].high
            )
    assert all(36 <= count <= 40 for count in covered.values()), covered


def spiked(rare: bool) -> Comparison:
    """100 prompts of 48 tokens, one in 200 with a KL of about 0.4, and exact KL at one in 12.

    ``rare``: all of it in a token that the left side samples once in 1,000 times.
    """
    rng = np.random.default_rng(5)
    count = 4800
    left = laws(rng, count, 12)
    right = left + 0.01 * rng.normal(size=left.shape)
    at = rng.choice(count, count // 200, replace=False)
    if rare:
        left[at, 0], right[at, 0] = np.log(1e-3), np.log(0.4)
        for law in (left, right):
            others = np.logaddexp.reduce(law[at, 1:], axis=1, keepdims=True)
            law[at, 1:] += np.log1p(-np.exp(law[at, :1])) - others
    else:
        right[at] += rng.normal(size=(len(at), 12))
    left, right = (law - np.logaddexp.reduce(law, axis=1, keepdims=True) for law in (left, right))
    tokens = np.array([rng.choice(12, p=row / row.sum()) for row in np.exp(left)])
    rollout = rollout_of([(2, 48)] * 100)
    ids = rollout.token_ids.copy()
    ids[rollout.actions] = tokens
    rollout = dataclasses.replace(rollout, token_ids=ids, prompt_index=np.arange(100))
    row = np.arange(count)
    sides = [
        Scoring(name, tokens, law[row, tokens], {}, distributions=whole(law[::12], row[::12]))
        for name, law in (("left", left), ("right", right))
    ]
    return compare(rollout, *sides, sampled_by_left=True)


@pytest.mark.parametrize(("rare", "status"), [(False, "healthy"), (True, "tolerable")])
def test_k3_stands_for_the_exact_kl_unless_it_misses_what_is_rarely_sampled(
    rare: bool, status: str
) -> None:
    compared = spiked(rare)
    exact, k3 = (compared.metrics[name] for name in ("exact_kl", "k3_kl"))
    healthy = (exact.value + exact.high) / 2  # the exact KL's interval spans it
    assert k3.high < healthy
    assert exact.low < k3.high
    cells = {"bf16 MoE": Level(healthy, 0.1, "test")}
    (judged,) = judge(compared, "bf16 MoE", {"exact_kl": cells})
    assert (judged.status, judged.inconclusive) == (status, True)


def test_the_spread_of_k3_counts_what_was_not_sampled() -> None:
    """Of a coin by hand; none is known where the left side excludes what the right allows."""
    p, q = np.array([0.9, 0.1]), np.array([0.5, 0.5])
    k3 = q / p - 1 - np.log(q / p)
    of_coin = divergences(np.log([p]), np.log([q]))["k3_variance"][0]
    assert of_coin == pytest.approx((p * k3**2).sum() - (p * k3).sum() ** 2, rel=1e-12)
    assert METRICS["k3_spread_at_exact"](np.array([4.0, 0.0])) == pytest.approx(np.sqrt(2.0))
    with np.errstate(divide="ignore"):
        cut = np.log([[1.0, 0.0]])
    assert "k3_variance" not in divergences(cut, np.log([q]))


def test_top_k_goes_by_another_name() -> None:
    pair = drawn(1)
    ids = np.argsort(-pair.left.distributions.logprobs, axis=1)[:, :5]
    merged = [
        dataclasses.replace(
            side, distributions=part(side.distributions.logprobs.astype(np.float64), ids)
        )
        for side in (pair.left, pair.right)
    ]
    low = compare(pair.rollout, *merged, sampled_by_left=True).metrics
    full = compare(pair.rollout, pair.left, pair.right, sampled_by_left=True).metrics
    assert "exact_kl" not in low
    assert not {"exact_argmax_agree", "k3_spread_at_exact"} & set(low)
    assert 0 < low["exact_kl_topk"].value < full["exact_kl"].value
    assert low["exact_law_gap"].value < 1
    assert 0 < low["exact_reverse_kl_topk"].value < full["exact_reverse_kl"].value
    cut = dataclasses.replace(merged[0], fingerprint={"logprobs_truncated": True})
    again = compare(pair.rollout, cut, merged[1], sampled_by_left=True).metrics
    assert "exact_reverse_kl_topk" not in again  # no finite number is a bound worth having


@pytest.mark.parametrize("seed", range(20))
def test_the_law_check_is_silent_where_the_law_sampled(seed: int) -> None:
    truncated = Sampling(temperature=0.8, top_p=0.9) if seed % 2 else None
    pair = drawn(seed, truncated, apart=0.1 * (1 + seed % 3))
    compared = compare(pair.rollout, pair.left, pair.right, sampled_by_left=True)
    assert compared.metrics["exact_law_gap"].value < 1
    assert ("exact_reverse_kl" in compared.metrics) == (seed % 2 == 0)


def test_the_law_check_speaks_where_another_law_sampled() -> None:
    """Both sides' distributions are the trainer's against the engine's; the tokens a third's."""
    pair = drawn(3, apart=1.0, samples=40)
    compared = compare(pair.rollout, pair.right, pair.left, sampled_by_left=True)
    (check,) = exact_checks(compared)
    assert check.status == "warning"
    assert check.id == CHECK
    assert check.fix
    assert not exact_checks(compare(pair.rollout, pair.right, pair.left, sampled_by_left=False))


def test_identical_sides_have_no_divergence_at_all() -> None:
    pair = drawn(4)
    same = dataclasses.replace(pair.left, name="again")
    metrics = compare(pair.rollout, pair.left, same, sampled_by_left=True).metrics
    for name in ("exact_kl", "exact_reverse_kl", "exact_tv", "exact_kl_max"):
        assert metrics[name].value == 0.0
    assert metrics["exact_argmax_agree"].value == 1.0


def test_what_cannot_be_compared_is_absent_with_a_reason() -> None:
    pair = drawn(5)
    bare = dataclasses.replace(pair.right, distributions=None)
    assert exact_reason(pair.left, bare).startswith(f"{bare.name} ")
    broken = pair.right.distributions.logprobs.copy()
    broken[7, 3] = np.nan
    ill = dataclasses.replace(pair.right, distributions=whole(broken))
    assert numbers(exact_reason(pair.left, ill)) == [1, 480, 1, 7]  # the first: action token 7
    for right in (bare, ill):
        metrics = compare(pair.rollout, pair.left, right, sampled_by_left=True).metrics
        assert "k3_kl" in metrics
        assert not [name for name in metrics if "exact" in name]


def test_scorings_of_other_tokens_have_no_exact_divergence() -> None:
    pair = drawn(5)
    short = dataclasses.replace(
        pair.right, token_ids=pair.right.token_ids[:9], logprobs=pair.right.logprobs[:9]
    )
    changed = dataclasses.replace(pair.right, token_ids=pair.right.token_ids + 1)
    for other in (short, changed):
        assert exact_reason(pair.left, other).startswith(f"{pair.left.name} and {other.name}:")


def test_a_scoring_carries_them_through_the_store(tmp_path: Path) -> None:
    pair = drawn(6)
    store.save_rollout(tmp_path, pair.rollout)
    store.save_scoring(tmp_path, pair.left, pair.rollout)
    back = store.load_scoring(tmp_path, "left").distributions
    assert back is not None
    assert np.array_equal(back.logprobs, pair.left.distributions.logprobs)
    from mismatch.run import manifest

    assert manifest.is_current(tmp_path, "scores/left.parquet", "")
    (tmp_path / "dists/left.safetensors").unlink()  # so that a resumed run scores again
    assert not manifest.is_current(tmp_path, "scores/left.parquet", "")


def test_all_of_them_are_declared_with_bounds() -> None:
    names = [name for name in METRICS if name.startswith("exact_")]
    assert len(names) == 12
    assert all(METRICS[name].bounds[0] == 0 for name in names)
