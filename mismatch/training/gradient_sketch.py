"""Parameter groups, this rank's shards of the parameters, and linear sketches of their gradients.

A sketch folds a gradient into k numbers: element i of a parameter is added, with a random sign, to
one bucket. Sign and bucket depend on the parameter's name and the element's place in the *whole*
parameter, so sketches of any sharding add up to the same, and two gradients are folded alike. With
independent signs the inner product of two sketches has the gradients' own as its mean (a count
sketch: Charikar, Chen and Farach-Colton 2002).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mismatch.errors import MismatchError

GROUPS = ("attention", "sinks", "router", "experts", "mlp", "embeddings", "norms", "head", "other")
SKETCH_SIZE = 2048  # buckets of one group
CHUNK = 1 << 20  # elements per step: bounds the temporaries
CACHED_BYTES = 256 << 20  # of bucket numbers that are cached; larger models recompute them
_MULTIPLIERS = (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85)  # odd, so that they are invertible

# A name is cut at its dots; the first rule that holds one of the parts wins.
_FIRST: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("sinks", ("sinks", "sink", "attention_sink_bias")),
    ("head", ("lm_head", "embed_out")),
    (
        "embeddings",
        (
            *("embed_tokens", "embed_positions", "wte", "wpe", "embed_in", "word_embeddings"),
            *("embed_tokens_per_layer", "embeddings"),
        ),
    ),
    ("attention", ("q_proj", "k_proj", "v_proj", "o_proj")),  # Nemotron-H calls the layer "mixer"
)
_LATER: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("router", ("router", "gate", "shared_expert_gate", "e_score_correction_bias")),
    ("experts", ("experts", "shared_expert", "shared_experts", "shared_mlp")),
    ("mlp", ("mlp", "feed_forward", "ffn", "block_sparse_moe")),
)
_ATTENTION = ("attn", "attention")


def group_of(name: str) -> str:
    """The group of a parameter by its name in transformers, one of :data:`GROUPS`.

    A head that is tied to the embeddings is one parameter with them, and counts there.

    >>> group_of("model.layers.0.self_attn.sinks"), group_of("model.layers.0.mlp.router.weight")
    ('sinks', 'router')
    >>> group_of("model.layers.0.mlp.gate_proj.weight"), group_of("model.norm.weight")
    ('mlp', 'norms')
    """
    parts = name.split(".")
    if any("norm" in part or part.startswith("ln_") for part in parts):
        return "norms"
    for group, words in _FIRST:
        if not set(parts).isdisjoint(words):
            return group
    if any(word in part for part in parts for word in _ATTENTION):
        return "attention"  # before the routers: some attention has a gate
    for group, words in _LATER:
        if not set(parts).isdisjoint(words):
            return group
    return "other"


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """This rank's shard of one parameter.

    Attributes:
        group: index into the groups of :class:`ParameterShards`.
        start: index of its first element in the flattened whole parameter.
        numel: number of its elements.
    """

    name: str
    group: int
    parameter: Any
    start: int
    numel: int

    def gradient(self) -> torch.Tensor | None:
        """Its gradient, [numel]; None where the backward pass produced none."""
        grad = self.parameter.grad
        if grad is None:
            return None
        local: torch.Tensor = (grad.to_local() if isinstance(grad, DTensor) else grad).reshape(-1)
        return local


class ParameterShards:
    """The trainable parameters of one loaded model, as this rank holds them.

    Attributes:
        groups: the G of :data:`GROUPS` that the model has, in that order.
        shards: of the parameters of which this rank holds any element.
        total: number of trainable elements on all ranks.
    """

    def __init__(self, model: torch.nn.Module, size: int = SKETCH_SIZE) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise MismatchError("gradients: the model has no trainable parameter")
        present = {group_of(name) for name, _ in named}
        self.size = size
        self.groups = tuple(group for group in GROUPS if group in present)
        self.total = sum(parameter.numel() for _, parameter in named)
        shards = [_shard(name, parameter, self.groups) for name, parameter in named]
        self.shards = [shard for shard in shards if shard.numel]
        local = sum(shard.numel for shard in self.shards)
        self._cache: dict[tuple[str, int, int], torch.Tensor] | None = (
            {} if 4 * local <= CACHED_BYTES else None
        )

    @property
    def local(self) -> int:
        """Number of elements on this rank."""
        return sum(shard.numel for shard in self.shards)

    def accumulator(self, device: torch.device) -> torch.Tensor:
        """Zeros for :meth:`add`, [G, 2k] float64: k buckets for sign +, then k for sign -."""
        return torch.zeros(len(self.groups), 2 * self.size, dtype=torch.float64, device=device)

    def add(
        self, sketch: torch.Tensor, shard: ParameterShard, first: int, values: torch.Tensor
    ) -> None:
        """Fold ``values``, the shard's elements from ``first`` on, float64, into an accumulator."""
        sketch[shard.group].scatter_add_(0, self._slots(shard, first, values), values)

    def signed(self, sketch: torch.Tensor) -> torch.Tensor:
        """Sketches [..., k] of accumulators [..., 2k]."""
        return sketch[..., : self.size] - sketch[..., self.size :]

    def _slots(self, shard: ParameterShard, first: int, values: torch.Tensor) -> torch.Tensor:
        key = (shard.name, first, len(values))
        if self._cache is not None and key in self._cache:
            return self._cache[key].long()
        start = shard.start + first
        slots = bucket_numbers(shard.name, start, len(values), 2 * self.size, values.device)
        if self._cache is not None:
            self._cache[key] = slots.to(torch.int32)
        return slots


def chunks(length: int) -> Iterator[slice]:
    """Slices of at most CHUNK elements."""
    for first in range(0, length, CHUNK):
        yield slice(first, min(first + CHUNK, length))


def bucket_numbers(
    name: str, start: int, count: int, size: int, device: torch.device
) -> torch.Tensor:
    """Pseudo-random numbers below ``size`` (a power of two), one per element: [count] int64.

    Args:
        start: index of the first element in the flattened whole parameter.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    mixed = torch.arange(start, start + count, device=device, dtype=torch.int64) + seed
    for factor, shift in ((_MULTIPLIERS[0], 32), (_MULTIPLIERS[1], 29), (_MULTIPLIERS[0], 32)):
        mixed.mul_(factor)  # wraps around
        mixed.bitwise_xor_(mixed >> shift)
    return mixed.bitwise_and_(size - 1)


def _shard(name: str, parameter: torch.nn.Parameter, groups: tuple[str, ...]) -> ParameterShard:
    group = groups.index(group_of(name))
    if not isinstance(parameter, DTensor):
        return ParameterShard(name, group, parameter, 0, parameter.numel())
    placements = parameter.placements
    if not (len(placements) == 1 and isinstance(placements[0], Shard) and placements[0].dim == 0):
        raise MismatchError(
            f"gradients: {name} is sharded as {placements}, not by its first dimension",
            "this tool shards by FSDP2 alone; please report it",
        )
    mesh = parameter.device_mesh
    _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    row = parameter.numel() // max(1, parameter.shape[0])
    return ParameterShard(name, group, parameter, offset[0] * row, parameter.to_local().numel())
