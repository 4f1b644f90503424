"""This rank's part of a sharded model's parameters, and linear sketches of their gradients.

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
from mismatch.experiments.gradients.parameter_groups import group_of
from mismatch.experiments.gradients.types import GROUPS

SKETCH = 2048  # buckets of one group
CHUNK = 1 << 20  # elements that are worked on at a time: temporaries stay small
CACHED_BYTES = 256 << 20  # of bucket numbers that are kept; beyond, they are worked out again
_ODD = (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85)  # multipliers that mix well


@dataclass(frozen=True, slots=True)
class Piece:
    """What this rank holds of one parameter.

    Attributes:
        group: index into the groups of :class:`Shards`.
        start: place of its first element in the flattened whole parameter.
        numel: of its elements.
    """

    name: str
    group: int
    parameter: Any
    start: int
    numel: int

    def gradient(self) -> torch.Tensor | None:
        """Its flat gradient; None where the backward pass gave none."""
        grad = self.parameter.grad
        if grad is None:
            return None
        local: torch.Tensor = (grad.to_local() if isinstance(grad, DTensor) else grad).reshape(-1)
        return local


class Shards:
    """The trainable parameters of one loaded model, as this rank holds them.

    Attributes:
        groups: those of ``experiments.gradients.types.GROUPS`` that the model has, in that order.
        pieces: of parameters of which this rank holds anything.
        total: number of trainable parameters on all ranks.
    """

    def __init__(self, model: torch.nn.Module, size: int = SKETCH) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise MismatchError("gradients: the model has no trainable parameter")
        present = {group_of(name) for name, _ in named}
        self.size = size
        self.groups = tuple(group for group in GROUPS if group in present)
        self.total = sum(parameter.numel() for _, parameter in named)
        pieces = [_piece(name, parameter, self.groups) for name, parameter in named]
        self.pieces = [piece for piece in pieces if piece.numel]
        held = sum(piece.numel for piece in self.pieces)
        self._cache: dict[tuple[str, int, int], torch.Tensor] | None = (
            {} if 4 * held <= CACHED_BYTES else None
        )

    @property
    def local(self) -> int:
        """Elements that this rank holds."""
        return sum(piece.numel for piece in self.pieces)

    def accumulator(self, device: torch.device) -> torch.Tensor:
        """Zeros for :meth:`add`, [G, 2k]: elements of sign + and -, apart."""
        return torch.zeros(len(self.groups), 2 * self.size, dtype=torch.float64, device=device)

    def add(self, sketch: torch.Tensor, piece: Piece, first: int, values: torch.Tensor) -> None:
        """Fold ``values``, the piece's elements from ``first`` on, float64, into an accumulator."""
        sketch[piece.group].scatter_add_(0, self._slots(piece, first, values), values)

    def signed(self, sketch: torch.Tensor) -> torch.Tensor:
        """Sketches [..., k] of accumulators [..., 2k]."""
        return sketch[..., : self.size] - sketch[..., self.size :]

    def _slots(self, piece: Piece, first: int, values: torch.Tensor) -> torch.Tensor:
        key = (piece.name, first, len(values))
        if self._cache is not None and key in self._cache:
            return self._cache[key].long()
        start = piece.start + first
        slots = places(piece.name, start, len(values), 2 * self.size, values.device)
        if self._cache is not None:
            self._cache[key] = slots.to(torch.int32)
        return slots


def chunks(length: int) -> Iterator[slice]:
    """Slices of at most CHUNK elements."""
    for first in range(0, length, CHUNK):
        yield slice(first, min(first + CHUNK, length))


def places(name: str, start: int, count: int, size: int, device: torch.device) -> torch.Tensor:
    """Pseudo-random places below ``size`` (a power of two) of a parameter's elements, [count].

    Args:
        start: of the first element in the flattened whole parameter.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    mixed = torch.arange(start, start + count, device=device, dtype=torch.int64) + seed
    for factor, shift in ((_ODD[0], 32), (_ODD[1], 29), (_ODD[0], 32)):
        mixed.mul_(factor)  # wraps around
        mixed.bitwise_xor_(mixed >> shift)
    return mixed.bitwise_and_(size - 1)


def _piece(name: str, parameter: torch.nn.Parameter, groups: tuple[str, ...]) -> Piece:
    group = groups.index(group_of(name))
    if not isinstance(parameter, DTensor):
        return Piece(name, group, parameter, 0, parameter.numel())
    placements = parameter.placements
    if not (len(placements) == 1 and isinstance(placements[0], Shard) and placements[0].dim == 0):
        raise MismatchError(
            f"gradients: {name} is sharded as {placements}, not by its first dimension",
            "this tool shards by FSDP2 alone; please report it",
        )
    mesh = parameter.device_mesh
    _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    row = parameter.numel() // max(1, parameter.shape[0])
    return Piece(name, group, parameter, offset[0] * row, parameter.to_local().numel())
