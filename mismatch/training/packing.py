"""Micro-batches: which sequences share a forward pass, and the position of each token in it.

The composition depends on lengths, budget and layout only, never on the number of ranks: worlds of
any size run the same forward passes and agree bit for bit where the arithmetic does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mismatch.errors import MismatchError
from mismatch.types import Ints

if TYPE_CHECKING:
    import torch

PAD_ID = 0  # never read: masked, and behind every token that is scored


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass.

    >>> MicroBatch(sequences=(4, 0), tokens=37).sequences
    (4, 0)

    Attributes:
        sequences: indices into the rollout, in the order of rows (padding) or of the row (packing).
        tokens: real tokens, without padding.
    """

    sequences: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors of one forward pass.

    Attributes:
        input_ids: [B, S]
        attention_mask: [B, S] 1 for real tokens; None when packed.
        position_ids: [1, S], from 0 in every document; None when padded.
        rows: [n] index of each real token in the flattened [B * S], sequence after sequence.
        whole: the batch of which this is one rank's part, see training.sequence_parallel.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    rows: torch.Tensor
    whole: Batch | None = None


def plan_batches(lengths: Sequence[int], budget: int, layout: str) -> list[MicroBatch]:
    """Group sequences so that no forward pass exceeds ``budget`` tokens, padding included.

    Padding groups similar lengths, longest first (an out-of-memory comes at once, not at the end);
    packing fills rows in the given order. A sequence longer than the budget goes alone.

    Raises:
        MismatchError: a budget below one token, or an unknown layout.
    """
    if budget < 1:
        raise MismatchError(f"--micro-batch-tokens is {budget}", "give at least 1, e.g. 4096")
    if layout not in ("padding", "packing"):
        raise MismatchError(f"unknown layout {layout!r}", "use padding or packing")
    order = list(range(len(lengths)))
    if layout == "padding":
        order.sort(key=lambda index: -lengths[index])  # stable: equal lengths keep their order
    batches: list[list[int]] = []
    for index in order:
        if batches and _width([*batches[-1], index], lengths, layout) <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return [MicroBatch(tuple(b), sum(lengths[i] for i in b)) for b in batches]


def _width(group: list[int], lengths: Sequence[int], layout: str) -> int:
    sizes = [lengths[index] for index in group]
    return len(sizes) * max(sizes) if layout == "padding" else sum(sizes)


def collate(sequences: Sequence[Ints], layout: str, device: torch.device | str) -> Batch:
    """The tensors of a forward pass over some sequences' token ids."""
    return _packed(sequences, device) if layout == "packing" else _padded(sequences, device)


def _padded(sequences: Sequence[Ints], device: torch.device | str) -> Batch:
    import torch

    width = max(len(ids) for ids in sequences)
    input_ids = np.full((len(sequences), width), PAD_ID, np.int64)
    mask = np.zeros((len(sequences), width), np.int64)
    for row, ids in enumerate(sequences):
        input_ids[row, : len(ids)] = ids
        mask[row, : len(ids)] = 1
    rows = np.flatnonzero(mask)
    tensors = [torch.from_numpy(a).to(device) for a in (input_ids, mask, rows)]
    return Batch(tensors[0], tensors[1], None, tensors[2])


def _packed(sequences: Sequence[Ints], device: torch.device | str) -> Batch:
    import torch

    input_ids = np.concatenate(sequences).astype(np.int64)[None]
    positions = np.concatenate([np.arange(len(ids)) for ids in sequences])[None]
    rows = np.arange(input_ids.shape[1])
    tensors = [torch.from_numpy(a).to(device) for a in (input_ids, positions, rows)]
    return Batch(tensors[0], None, tensors[1], tensors[2])
