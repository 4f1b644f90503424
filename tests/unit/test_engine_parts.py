"""The light parts of the engines: registry, seeds, sampling law, joined routes."""

from __future__ import annotations

import importlib.util
from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch

from mismatch.engines import registry
from mismatch.engines.base import sample_seed
from mismatch.engines.distribution_capture import (
    join_steps,
    keep_mask,
    law_logprobs,
)
from mismatch.engines.transformers.engine import SequenceState, draw
from mismatch.errors import MismatchError, did_you_mean
from mismatch.types import Sampling

# ---------------------------------------------------------------- registry


def test_an_unknown_engine_gets_near_misses() -> None:
    with pytest.raises(MismatchError) as caught:
        registry.require_engine("vLM")
    assert "'vLM'" in caught.value.message
    assert caught.value.fix.startswith(did_you_mean("vLM", ["vllm"]))


def test_a_missing_engine_gets_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MismatchError) as caught:
        registry.require_engine("vllm")
    assert "vllm" in caught.value.message
    assert "pip install 'train-infer-mismatch[vllm]'" in caught.value.fix
    assert "make env" in caught.value.fix


def test_third_parties_register_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("other", "collections:OrderedDict", registry.ENTRY_POINT_GROUP)
    broken = EntryPoint("broken", "no_such_module:Engine", registry.ENTRY_POINT_GROUP)
    by_name = {"other": (point,), "broken": (broken,)}

    def points(group: str, name: str | None = None) -> tuple[EntryPoint, ...]:
        assert group == "mismatch.engines"
        return (point, broken) if name is None else by_name[name]

    monkeypatch.setattr("importlib.metadata.entry_points", points)
    assert {"other", "transformers", "vllm"} <= set(registry.engine_names())
    assert registry.engine_class("other").__name__ == "OrderedDict"
    with pytest.raises(MismatchError, match="cannot be imported"):
        registry.engine_class("broken")


# ---------------------------------------------------------------- seeds


def test_seeds_are_fixed_distinct_and_in_range() -> None:
    seeds = {sample_seed(r, p, s) for r in range(4) for p in range(20) for s in range(8)}
    assert len(seeds) == 4 * 20 * 8
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sample_seed(0, 0, 0) == sample_seed(0, 0, 0)
    assert sample_seed(0, 1, 0) != sample_seed(0, 0, 1)


# ---------------------------------------------------------------- law

PROBS = torch.tensor([[0.5, 0.2, 0.2, 0.1]])


def kept(
    top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, probs: torch.Tensor = PROBS
) -> list[bool]:
    mask = keep_mask(probs.log(), Sampling(top_p=top_p, top_k=top_k, min_p=min_p))
    return [bool(x) for x in mask[0]]


def test_top_k_keeps_ties_and_top_p_the_smallest_set_that_reaches_it() -> None:
    assert kept(top_k=1) == [True, False, False, False]
    assert kept(top_k=2) == [True, True, True, False]
    assert kept(top_k=9) == [True] * 4
    assert kept(top_p=0.4) == [True, False, False, False]
    assert sum(kept(top_p=0.6)) == 2
    assert kept(top_p=0.85) == [True, True, True, False]
    assert kept(top_p=1e-9) == [True, False, False, False]


def test_top_p_is_over_what_top_k_left() -> None:
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    assert kept(top_p=0.55, probs=probs) == [True, True, False, False]
    # Of the two that top-k leaves, the first has 4/7 > 0.55 of the mass.
    assert kept(top_p=0.55, top_k=2, probs=probs) == [True, False, False, False]


def test_min_p_is_a_share_of_the_likeliest_and_comes_before_top_p() -> None:
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    assert kept(min_p=0.45, probs=probs) == [True, True, True, False]
    assert kept(min_p=0.55, probs=probs) == [True, True, False, False]
    assert kept(min_p=1.0, probs=probs) == [True, False, False, False]
    # Of the two that min-p leaves, the first has 4/7 > 0.55 of the mass: as with top-k.
    assert kept(top_p=0.55, min_p=0.7, probs=probs) == [True, False, False, False]


def test_the_law_is_normalised_over_what_is_kept() -> None:
    law = law_logprobs(PROBS.log(), Sampling(top_k=1, temperature=0.5))
    assert law.exp().tolist()[0] == [1.0, 0.0, 0.0, 0.0]
    tempered = law_logprobs(PROBS.log(), Sampling(temperature=0.5)).exp()
    squares = PROBS**2 / (PROBS**2).sum()
    assert torch.allclose(tempered, squares, atol=1e-6)
    greedy = law_logprobs(PROBS.log(), Sampling(temperature=0.0, top_k=1))
    assert torch.allclose(greedy.exp(), PROBS, atol=1e-6)


# ---------------------------------------------------------------- draws


def test_draws_follow_the_law_and_report_it() -> None:
    rows = [SequenceState.seeded(0, (prompt, 0)) for prompt in range(4000)]
    draw(rows, PROBS.log().expand(4000, 4), greedy=False)
    share = np.bincount([row.ids[0] for row in rows], minlength=4) / 4000
    # Four standard errors of a share are at most 0.032 here.
    assert np.abs(share - PROBS[0].numpy()).max() < 0.032
    first = rows[0].finish("stop")
    assert first.logprobs[0] == pytest.approx(np.log(PROBS[0, first.token_ids[0]].item()))
    assert first.routed is None
    excluding = [SequenceState.seeded(1, (prompt, 0)) for prompt in range(500)]
    draw(excluding, law_logprobs(PROBS.log(), Sampling(top_k=1)).expand(500, 4), greedy=False)
    assert {row.ids[0] for row in excluding} == {0}


# ---------------------------------------------------------------- routes


def rows(*values: int) -> np.ndarray:
    return np.array(values, np.uint16).reshape(-1, 1, 1)


def test_steps_join_by_position_and_the_first_forward_stays() -> None:
    chunks = [(0, rows(5, 6)), (2, rows(7)), (3, rows(8))]
    recomputed = [(0, rows(50, 60, 70, 80)), (4, rows(9))]
    assert join_steps(chunks + recomputed).ravel().tolist() == [5, 6, 7, 8, 9]


def test_a_position_without_experts_is_an_error() -> None:
    with pytest.raises(ValueError, match="position 2"):
        join_steps([(0, rows(1, 2)), (3, rows(4))])
