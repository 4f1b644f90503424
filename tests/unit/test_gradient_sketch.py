"""Sketches of gradients: inner products on average exact, the same however a model is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mismatch.training.gradients import CHUNK, ParameterShards, bucket_numbers, chunks

CPU = torch.device("cpu")
COUNT = 4000


def folded(name: str, values: torch.Tensor, size: int = 64) -> torch.Tensor:
    slots = torch.zeros(2 * size, dtype=torch.float64)
    slots.index_add_(0, bucket_numbers(name, 0, len(values), 2 * size, CPU), values)
    return slots[:size] - slots[size:]


def test_places_depend_on_the_place_in_the_whole_alone() -> None:
    whole = bucket_numbers("a.weight", 0, COUNT, 4096, CPU)
    parts = [bucket_numbers("a.weight", first, 1000, 4096, CPU) for first in range(0, COUNT, 1000)]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, bucket_numbers("b.weight", 0, COUNT, 4096, CPU))
    assert whole.min() >= 0
    assert whole.max() < 4096


def test_places_are_even_also_along_rows_and_columns() -> None:
    grid = bucket_numbers("a.weight", 0, 512 * 512, 256, CPU).view(512, 512)
    for part in (grid.flatten(), grid[::64].flatten(), grid[:, ::64].flatten()):
        counts = torch.bincount(part, minlength=256).double()
        expected = len(part) / 256
        assert ((counts - expected) ** 2 / expected).mean() == pytest.approx(1.0, abs=0.3)


def test_inner_products_are_right_on_average_and_as_spread_as_they_should_be() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(COUNT, dtype=torch.float64, generator=draw)
    y = 0.5 * x + torch.randn(COUNT, dtype=torch.float64, generator=draw)
    y[:40] *= 10  # some elements carry much of it
    products = np.array([float(folded(f"p{i}", x) @ folded(f"p{i}", y)) for i in range(600)])
    true = float(x @ y)
    # The standard error of a count sketch: (|x|² |y|² + (x·y)²) / k at most.
    spread = np.sqrt((float(x @ x) * float(y @ y) + true**2) / 64)
    assert abs(products.mean() - true) < 4 * spread / np.sqrt(len(products))
    assert 0.7 * spread < products.std() < 1.3 * spread


def test_sketches_are_linear_and_kept_apart_by_group() -> None:
    model = torch.nn.ModuleDict({"lm_head": torch.nn.Linear(30, 7), "norm": torch.nn.Linear(5, 5)})
    shards = ParameterShards(model, size=32)
    assert shards.groups == ("norms", "head")
    assert shards.total == shards.local == 30 * 7 + 7 + 30
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape)
    once, twice = shards.accumulator(CPU), shards.accumulator(CPU)
    for piece in shards.shards:
        values = piece.gradient()
        assert values is not None
        shards.add(once, piece, 0, values.double())
        for columns in (slice(0, 3), slice(3, piece.numel)):  # in two parts, twice
            shards.add(twice, piece, columns.start, values[columns].double())
            shards.add(twice, piece, columns.start, values[columns].double())
    assert torch.allclose(2 * shards.signed(once), shards.signed(twice))
    head = [piece for piece in shards.shards if piece.group == 1]
    assert {piece.name for piece in head} == {"lm_head.weight", "lm_head.bias"}


def test_signs_keep_a_constant_gradient_from_adding_up() -> None:
    model = torch.nn.Linear(200, 100, bias=False)
    shards = ParameterShards(model, size=1024)
    (piece,) = shards.shards
    sketch = shards.accumulator(CPU)
    shards.add(sketch, piece, 0, torch.ones(piece.numel, dtype=torch.float64))
    squared = float(shards.signed(sketch).square().sum())
    assert squared == pytest.approx(piece.numel, rel=0.2)  # without signs: 20 times that


def test_frozen_parameters_have_no_gradient_to_fold() -> None:
    model = torch.nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    assert [piece.name for piece in ParameterShards(model).shards] == ["weight"]


def test_chunks_cover_everything_once() -> None:
    parts = list(chunks(2 * CHUNK + 3))
    assert [part.start for part in parts] == [0, CHUNK, 2 * CHUNK]
    assert parts[-1].stop == 2 * CHUNK + 3
    assert list(chunks(0)) == []
