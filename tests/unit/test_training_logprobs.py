"""Chunked logprobs and entropies are those of the naive way, in the same dtype."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mismatch.engines.distribution_capture import keep_mask
from mismatch.specs import Sampling
from mismatch.training import logprobs
from mismatch.training.logprobs import Earlier, TokenStats, kept_mass, token_stats
from tests.tensors import Largest

ROWS, HIDDEN, VOCABULARY = 37, 48, 997


def _case(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.nn.Linear]:
    torch.manual_seed(0)
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=dtype)
    with torch.no_grad():
        head.weight.mul_(4)  # logits of about ±7, as a language model has
    return torch.randn(ROWS, HIDDEN, dtype=dtype), torch.randint(VOCABULARY, (ROWS,)), head


@pytest.fixture(autouse=True)
def _small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two rows at a time, so that strips end within chunks and chunks within strips.
    monkeypatch.setattr(logprobs, "STRIP_BYTES", 2 * 4 * VOCABULARY)


def _stats(law: Sampling, dtype: torch.dtype = torch.float32, rows: int = 5) -> TokenStats:
    hidden, targets, head = _case(dtype)
    budget = rows * VOCABULARY * hidden.element_size()  # at most that many rows per chunk
    with torch.no_grad():
        return token_stats(hidden, targets, head, VOCABULARY, law, budget)


def _naive(temperature: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, targets, head = _case(dtype)
    with torch.no_grad():
        logps = (head(hidden).float() / temperature).log_softmax(-1)
    return logps, logps.gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunks_equal_the_naive_path_of_the_same_dtype(
    dtype: torch.dtype, temperature: float
) -> None:
    logps, picked = _naive(temperature, dtype)
    stats = _stats(Sampling(temperature), dtype)
    assert (stats.logprobs - picked).abs().max() <= 1e-6
    assert (stats.entropy + (logps.exp() * logps).sum(-1)).abs().max() <= 1e-5
    assert torch.equal(stats.top1, logps.argmax(-1))


def test_the_likeliest_of_every_row_are_those_of_the_whole_law() -> None:
    hidden, targets, head = _case(torch.float32)
    logps, _ = _naive(0.6, torch.float32)
    with torch.no_grad():
        budget = 5 * VOCABULARY * 4
        stats = token_stats(hidden, targets, head, VOCABULARY, Sampling(0.6), budget, likeliest=5)
    expected = logps.topk(5)
    assert stats.likeliest_ids is not None
    assert torch.equal(stats.likeliest_ids, expected.indices.int())
    assert torch.allclose(stats.likeliest, expected.values, atol=1e-6)
    assert _stats(Sampling()).likeliest is None


def test_uniform_logits_have_the_uniform_entropy() -> None:
    def flat(hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), 64)

    stats = token_stats(torch.zeros(3, 1), torch.tensor([0, 5, 63]), flat, 64)
    assert stats.logprobs.tolist() == pytest.approx([-math.log(64)] * 3)
    assert stats.entropy.tolist() == pytest.approx([math.log(64)] * 3)


def test_greedy_is_scored_at_temperature_one() -> None:
    assert torch.equal(_stats(Sampling(0.0)).logprobs, _stats(Sampling(1.0)).logprobs)
    assert _stats(Sampling(0.0)).untempered is None


def test_untempered_logprobs_stand_beside_tempered_ones() -> None:
    stats, plain = _stats(Sampling(0.6)), _stats(Sampling(1.0))
    assert stats.untempered is not None
    assert torch.equal(stats.untempered, plain.logprobs)
    assert (stats.logprobs - plain.logprobs).abs().max() > 0.1


def test_no_chunk_holds_more_rows_than_the_budget() -> None:
    hidden, targets, head = _case(torch.float32)
    seen = []

    def watched(rows: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return head(rows)

    with torch.no_grad():
        token_stats(hidden, targets, watched, VOCABULARY, chunk_bytes=5 * VOCABULARY * 4)
    assert max(seen) == 5
    assert sum(seen) == ROWS


def test_gradients_do_not_change_a_bit() -> None:
    hidden, targets, head = _case(torch.bfloat16)
    work = (hidden, targets, head, VOCABULARY, Sampling(0.6, top_k=5), 10_000)
    with torch.no_grad():
        alone = token_stats(*work)
    watched = token_stats(*work)
    assert watched.logprobs.requires_grad
    for name in ("logprobs", "entropy", "top1", "untempered", "kept_mass"):
        assert torch.equal(getattr(watched, name), getattr(alone, name)), name


def test_nothing_larger_than_a_chunk_is_ever_made() -> None:
    def flat(rows: torch.Tensor) -> torch.Tensor:  # no weight, which would be the largest tensor
        return rows[:, :1].expand(-1, VOCABULARY).contiguous()

    hidden, targets, _ = _case(torch.float32)
    with torch.no_grad(), Largest() as largest:
        token_stats(hidden, targets, flat, VOCABULARY, chunk_bytes=5 * VOCABULARY * 4)
    assert largest.numel == 5 * VOCABULARY  # the naive way holds 37 rows


def test_gradients_are_those_of_the_naive_path() -> None:
    hidden, targets, head = _case(torch.float32)
    hidden.requires_grad_()
    token_stats(hidden, targets, head, VOCABULARY, chunk_bytes=60_000).logprobs.sum().backward()
    chunked = (hidden.grad, head.weight.grad)
    hidden.grad = head.weight.grad = None
    head(hidden).log_softmax(-1).gather(1, targets[:, None]).sum().backward()
    for got, want in zip(chunked, (hidden.grad, head.weight.grad), strict=True):
        assert got is not None
        assert torch.allclose(got, want, atol=1e-4)


PROBABILITIES = torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]]).log()


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        ({}, 1.0),
        ({"top_k": 2}, 0.7),
        ({"top_p": 0.65}, 0.7),  # the 0.3 is needed to pass 0.65, the rest falls
        ({"top_p": 0.05}, 0.4),  # never less than the most likely token
        ({"top_k": 3, "top_p": 0.5}, 0.7),  # over the renormalised 0.9: 0.4 / 0.9 < 0.5
        ({"top_k": 99}, 1.0),
        ({"min_p": 0.45}, 0.9),  # at least 0.18
        ({"min_p": 0.11}, 0.96),
        ({"min_p": 1.0}, 0.4),
        ({"min_p": 0.7, "top_p": 0.55}, 0.4),  # over the renormalised 0.7: 0.4 / 0.7 > 0.55
    ],
)
def test_kept_mass(cut: dict[str, float], kept: float) -> None:
    sampling = Sampling(**cut)
    assert kept_mass(PROBABILITIES, sampling).item() == pytest.approx(kept)
    engine = PROBABILITIES.exp()[keep_mask(PROBABILITIES, sampling)]  # written apart from it
    assert engine.sum().item() == pytest.approx(kept)


def test_ties_at_the_top_k_threshold_are_kept() -> None:
    tied = torch.tensor([[0.4, 0.2, 0.2, 0.2]]).log()
    assert kept_mass(tied, Sampling(top_k=2)).item() == pytest.approx(1.0)


def test_kept_mass_is_reported_only_where_something_is_cut() -> None:
    assert _stats(Sampling(1.0)).kept_mass is None
    cut = _stats(Sampling(1.0, top_k=3)).kept_mass
    assert cut is not None
    assert 0 < cut.min() < cut.max() < 1


@pytest.mark.parametrize("gradients", [False, True])
def test_the_probability_of_what_stood_before_is_summed_over_distinct_ids(gradients: bool) -> None:
    """Whatever the order of the tokens in a micro-batch, and in how many parts it is worked off."""
    rng = np.random.default_rng(0)
    ids, offsets = rng.integers(0, 12, 90), np.array([0, 20, 21, 60, 90])
    of_token = np.repeat(np.arange(4), np.diff(offsets))
    rollout: Any = SimpleNamespace(token_ids=ids, offsets=offsets, sequence_of_token=of_token)
    targets = rng.permutation(np.flatnonzero(of_token != 1)[1:])[:40]
    logits = torch.randn(len(targets), VOCABULARY, requires_grad=gradients)
    earlier = Earlier.of(rollout, targets, torch.device("cpu"))
    with torch.set_grad_enabled(gradients):
        stats = token_stats(
            logits, torch.from_numpy(ids[targets]), lambda x: x, VOCABULARY,
            chunk_bytes=7 * VOCABULARY * 4, earlier=earlier,
        )  # fmt: skip
    law = logits.detach().softmax(-1).numpy()
    expected = [
        law[row, np.unique(ids[offsets[of_token[at]] : at])].sum() for row, at in enumerate(targets)
    ]
    assert stats.earlier_mass is not None
    np.testing.assert_allclose(stats.earlier_mass.numpy(), expected, rtol=1e-5)
