"""The truth that kernels are held against: by hand, by differences, and by another's code."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mismatch.models
from mismatch.features.kernels.attention import Runner
from mismatch.features.kernels.cases import (
    Case,
    Inputs,
    allowed,
    attention,
    full,
    inputs_of,
    positions_of,
)
from mismatch.features.kernels.geometry import ModelGeometry, geometry_of
from mismatch.training.attention.trial import relative_error

TINY = Path(mismatch.models.__file__).parent / "tiny-gpt-oss"


@pytest.fixture(scope="module")
def geometry() -> ModelGeometry:
    from transformers import AutoConfig

    return geometry_of(AutoConfig.from_pretrained(TINY), "tiny-gpt-oss")


def small(case: Case, heads: int = 4, groups: int = 2) -> Inputs:
    draw = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()

    return Inputs(
        normal(1, heads, case.queries, 3),
        normal(1, groups, case.keys, 3),
        normal(1, groups, case.keys, 2),
        normal(heads),
    )


def test_one_key_and_one_sink_by_hand() -> None:
    score, sink, value = 0.3, -0.4, 2.0
    unit = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    inputs = Inputs(
        unit, unit * score / 0.5, unit * value, torch.tensor([sink], dtype=torch.float64)
    )
    looks = torch.ones(1, 1, dtype=torch.bool)
    share = math.exp(score) / (math.exp(score) + math.exp(sink))
    assert float(attention(inputs, looks, 0.5)) == pytest.approx(share * value, rel=1e-15)
    assert float(attention(inputs, looks, 0.5, sinks=False)) == pytest.approx(value)


CASES = {
    "window": Case(7, 7, 0.6, window=3),
    "documents": Case(7, 7, 0.6, documents=(3, 4)),
    "cache": Case(3, 7, 0.6, window=4),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_the_truth_are_finite_differences(name: str) -> None:
    """So autograd of the truth may be called the truth: q, k, v and sinks, in float64."""
    case = CASES[name]
    looks = allowed(case, "cpu")

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return attention(Inputs(*tensors), looks, case.scaling)

    assert torch.autograd.gradcheck(attend, tuple(small(case)), atol=1e-8, rtol=1e-6)


def test_what_a_query_may_look_at_written_out() -> None:
    def lines(looks: torch.Tensor) -> list[str]:
        return ["".join("x" if x else "." for x in row) for row in looks.tolist()]

    packed = Case(5, 5, 1.0, window=2, documents=(2, 3))
    assert lines(allowed(packed, "cpu")) == ["x....", "xx...", "..x..", "..xx.", "...xx"]
    cached = Case(2, 5, 1.0, window=3)
    assert lines(allowed(cached, "cpu")) == [".xxx.", "..xxx"]
    assert lines(allowed(cached, "cpu", from_start=True)) == ["x....", "xx..."]
    assert lines(allowed(cached, "cpu", window=None)) == ["xxxx.", "xxxxx"]
    assert positions_of(packed, "cpu").tolist() == [[0, 1, 0, 1, 2]]
    assert positions_of(cached, "cpu").tolist() == [[3, 4]]


def test_the_family_s_own_eager_gives_the_truth(geometry: ModelGeometry) -> None:
    """Other people's code, with transformers' own masks; both in float64."""
    eager = Runner(geometry, "eager")
    cached = replace(full(geometry)[0], queries=5)
    for case in (*full(geometry), cached):
        inputs = inputs_of(geometry, case, "cpu", torch.float64, 0)
        wanted = attention(inputs, allowed(case, "cpu"), case.scaling)
        assert relative_error(eager(case, inputs), wanted) < 1e-14, case.label


def test_a_neutral_sink_takes_no_share(geometry: ModelGeometry) -> None:
    case = replace(full(geometry)[0], sinks="off")
    inputs = inputs_of(geometry, case, "cpu", torch.float64, 0)
    looks = allowed(case, "cpu")
    with_sinks, without = (attention(inputs, looks, 0.2, sinks=use) for use in (True, False))
    assert torch.equal(with_sinks, without)


def test_relative_error_of_nothing_and_of_no_numbers() -> None:
    wanted = torch.tensor([3.0, 4.0])
    assert relative_error(None, wanted) == 1.0
    assert relative_error(torch.zeros(2), wanted) == 1.0
    assert relative_error(torch.tensor([3.0, 4.5]), wanted) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, float("nan")]), wanted) == float("inf")
