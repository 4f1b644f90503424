"""What an engine holds, unfused; what a reload leaves out, written as its kernel wants it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mismatch.engines import held_weights
from mismatch.engines.vllm import weight_sync

EXPERTS, HIDDEN, INNER = 4, 8, 6
PREFIX = "model.layers.0.mlp.experts"
Tensors = dict[str, torch.Tensor]


class FusedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.zeros(EXPERTS, 2 * INNER, HIDDEN))
        self.w2_weight = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, INNER))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(HIDDEN, 12, bias=False)
        vars(self.qkv_proj)["output_partition_sizes"] = [8, 2, 2]


class Sliced(nn.Linear):
    tp_size = 2


def model_of(**children: nn.Module) -> Any:
    layer = nn.Module()
    for name, child in children.items():
        layer.add_module(name, child)
    tree = nn.Module()
    tree.model = nn.Module()
    tree.model.layers = nn.ModuleList([layer])
    return tree


def with_experts() -> Any:
    mlp = nn.Module()
    mlp.experts = FusedExperts()
    return model_of(mlp=mlp)


def experts() -> Tensors:
    shapes = {
        "gate_proj": (INNER, HIDDEN),
        "up_proj": (INNER, HIDDEN),
        "down_proj": (HIDDEN, INNER),
    }
    return {
        f"{PREFIX}.{expert}.{part}.weight": torch.randn(shape)
        for expert in range(EXPERTS)
        for part, shape in shapes.items()
    }


def source_of(weights: Tensors) -> Any:
    def tensors(push: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights.items()

    return SimpleNamespace(names=lambda: list(weights), tensors=tensors)


def held(model: Any, names: Any) -> dict[str, Any]:
    return dict(held_weights.held_tensors(model, held_weights.as_stored, frozenset(names)))


def shuffled(weight: torch.Tensor) -> torch.Tensor:
    return weight.flatten(1).flip(1).view_as(weight)


def renamed(names: list[str]) -> dict[str, str]:
    """As vLLM does for gpt-oss: experts have its own names, which nothing here asks for."""
    return {name.replace(".experts", ".fused"): name for name in names}


def test_experts_with_a_name_each_are_written_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sync, "_packer", lambda module: shuffled)
    model, weights = with_experts(), experts()
    weight_sync.write_unloaded(model, source_of(weights), 1, renamed)
    own = model.model.layers[0].mlp.experts
    for parameter in own.parameters():
        parameter.data = weight_sync.unshuffled(parameter.data, shuffled)
    there = held(model, weights)
    assert there.keys() == weights.keys()
    assert all(torch.equal(there[name], tensor) for name, tensor in weights.items())


def test_a_layer_that_lacks_an_expert_is_left_as_it_was() -> None:
    model, weights = with_experts(), experts()
    del weights[f"{PREFIX}.2.up_proj.weight"]
    weight_sync.write_unloaded(model, source_of(weights), 1, renamed)
    own = model.model.layers[0].mlp.experts
    assert not own.w13_weight.any()
    assert own.w2_weight.all()


@pytest.mark.parametrize("turned", [True, False])
def test_fused_experts_are_written_in_their_familys_layout_only(turned: bool) -> None:
    model = with_experts()
    if turned:
        model.__class__ = type(weight_sync.TURNED[0], (nn.Module,), {})
    weight = torch.randn(EXPERTS, HIDDEN, 2 * INNER)
    weight_sync.write_unloaded(model, source_of({f"{PREFIX}.gate_up_proj": weight}), 1, renamed)
    there = held(model, [])[f"{PREFIX}.gate_up_proj"]
    assert torch.equal(there, weight.transpose(1, 2)) if turned else not there.any()


def test_fused_rows_are_cut_apart_and_slices_are_not_compared() -> None:
    model = model_of(self_attn=Attention(), down_proj=Sliced(HIDDEN, HIDDEN, bias=False))
    there = held(model, [])
    layer = model.model.layers[0]
    rows = [there[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert [len(part) for part in rows] == [8, 2, 2]
    assert torch.equal(torch.cat(rows), layer.self_attn.qkv_proj.weight)
    assert there["model.layers.0.down_proj.weight"] == held_weights.SLICED


def test_integers_are_not_read_as_weights() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False)
    assert held(model_of(packed=module), []) == {
        "model.layers.0.packed.weight": held_weights.UNREADABLE
    }
