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

# How much is computed at a time: what the memory of a pass is predicted from.
EXPERT_ROWS = 4096  # of one matmul in `bounded` experts; more would only add memory
CHUNK_BYTES = 192 << 20  # of the logits alive at once, in the head's dtype
STRIP_BYTES = 32 << 20  # of each of the two float32 buffers
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

    def width(group: list[int]) -> int:
        sizes = [lengths[index] for index in group]
        return len(sizes) * max(sizes) if layout == "padding" else sum(sizes)

    batches: list[list[int]] = []
    for index in order:
        if batches and width([*batches[-1], index]) <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return [MicroBatch(tuple(b), sum(lengths[i] for i in b)) for b in batches]


def collate(sequences: Sequence[Ints], layout: str, device: torch.device | str) -> Batch:
    """Return the tensors of a forward pass over some sequences' token ids."""
    import torch

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    if layout == "packing":
        input_ids = np.concatenate(sequences).astype(np.int64)[None]
        positions = np.concatenate([np.arange(len(ids)) for ids in sequences])[None]
        rows = np.arange(input_ids.shape[1])
        return Batch(on_device(input_ids), None, on_device(positions), on_device(rows))
    width = max(len(ids) for ids in sequences)
    input_ids = np.full((len(sequences), width), PAD_ID, np.int64)
    mask = np.zeros((len(sequences), width), np.int64)
    for row, ids in enumerate(sequences):
        input_ids[row, : len(ids)] = ids
        mask[row, : len(ids)] = 1
    rows = np.flatnonzero(mask)
    return Batch(on_device(input_ids), on_device(mask), None, on_device(rows))
