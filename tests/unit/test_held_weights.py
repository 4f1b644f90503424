"""Slices of tensor-parallel ranks are gathered to what one rank holds alone, under its names."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mismatch.engines.held_weights import SPREAD, Ranks, as_stored, held_tensors

RANKS, HEADS, SIZE, HIDDEN, VOCABULARY, EXPERTS, INNER = 2, 4, 2, 6, 5, 3, 8
DRAW = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=DRAW)


Q, K, V = drawn(HEADS * SIZE, HIDDEN), drawn(SIZE, HIDDEN), drawn(SIZE, HIDDEN)
OUT, BIAS, SINKS, NORM = drawn(HIDDEN, HEADS * SIZE), drawn(HIDDEN), drawn(HEADS), drawn(HIDDEN)
EMBEDDING = torch.cat([drawn(VOCABULARY, HIDDEN), torch.zeros(1, HIDDEN)])  # padded
GATE_UP, DOWN = drawn(EXPERTS, 2 * INNER, HIDDEN), drawn(EXPERTS, HIDDEN, INNER)


class Part(nn.Module):
    """A module of an engine with some parameters."""

    def __init__(self, tp_size: int, **parameters: torch.Tensor) -> None:
        super().__init__()
        self.tp_size = tp_size
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value.clone()))


class Linear(Part):
    """SGLang's: it names its group, and not how many ranks that has."""

    def __init__(self, tp_size: int, **parameters: torch.Tensor) -> None:
        super().__init__(tp_size, **parameters)
        if self.grouped:
            del self.tp_size
            self.tp_group = SimpleNamespace(world_size=tp_size)

    grouped = False


class ColumnParallelLinear(Linear): ...


class QKVParallelLinear(ColumnParallelLinear): ...


class RowParallelLinear(Linear): ...


class VocabParallelEmbedding(Part): ...


class Toy(nn.Module):
    """One layer as one of ``ranks`` holds it; one head of keys and values, which all copy."""

    by_turns = False

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()

        def slice_of(whole: torch.Tensor, axis: int) -> torch.Tensor:
            return whole.chunk(ranks, axis)[rank]

        q = slice_of(Q, 0)
        qkv: Any = QKVParallelLinear(ranks, weight=torch.cat([q, K, V]))
        qkv.output_partition_sizes = [len(q), SIZE, SIZE]
        qkv.num_kv_head_replicas = ranks
        self.qkv_proj = qkv
        self.o_proj = RowParallelLinear(ranks, weight=slice_of(OUT, 1), bias=BIAS)
        embed: Any = VocabParallelEmbedding(ranks, weight=slice_of(EMBEDDING, 0))
        embed.org_vocab_size = VOCABULARY
        self.embed = embed
        self.norm = Part(1, weight=NORM)
        self.attn = nn.Module()  # says nothing of ranks
        self.attn.register_parameter("sinks", nn.Parameter(slice_of(SINKS, 0).clone()))
        parts = (GATE_UP,) if self.by_turns else GATE_UP.chunk(2, 1)
        self.experts: Any = nn.Module()
        w13 = torch.cat([slice_of(part, 1) for part in parts], 1)
        self.experts.register_parameter("w13_weight", nn.Parameter(w13))
        self.experts.register_parameter("w2_weight", nn.Parameter(slice_of(DOWN, 2).clone()))


class GptOssForCausalLM(Toy):
    by_turns = True


class Threads(Ranks):
    """Ranks that are threads of this process."""

    count = RANKS
    meeting = threading.Barrier(RANKS, timeout=30)
    given: dict[int, torch.Tensor] = {}  # noqa: RUF012 (shared on purpose)

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def gather(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        self.given[self.rank] = tensor
        self.meeting.wait()
        whole = torch.cat([self.given[rank] for rank in range(self.count)], axis)
        self.meeting.wait()
        return whole


def held(kind: type[Toy], *, spread: bool = False) -> list[dict[str, Any]]:
    """What every rank reads."""

    def of_rank(rank: int) -> dict[str, Any]:
        model = kind(rank, RANKS)
        model.experts.use_ep = spread
        return dict(held_tensors(model, as_stored, frozenset(), Threads(rank)))

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(of_rank, range(RANKS)))


@pytest.mark.parametrize("grouped", [False, True], ids=["vLLM", "SGLang"])
@pytest.mark.parametrize("kind", [Toy, GptOssForCausalLM])
def test_ranks_hold_together_what_one_holds_alone(
    kind: type[Toy], grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Linear, "grouped", grouped)
    alone: dict[str, Any] = dict(held_tensors(kind(0, 1), as_stored, frozenset()))
    assert len(alone) == 10
    for own in held(kind):
        assert own.keys() == alone.keys()
        for name, value in alone.items():
            assert torch.equal(own[name], value), name


def test_experts_that_are_spread_over_the_ranks_are_not_read() -> None:
    own = held(Toy, spread=True)[0]
    assert [name for name, value in own.items() if isinstance(value, str)] == [
        "experts.gate_up_proj",
        "experts.down_proj",
    ]
    assert own["experts.down_proj"] == SPREAD
