"""Routed experts on their way out of a worker process: joined by position, packed as bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Packed = tuple[tuple[int, ...], str, bytes]


def pack(array: NDArray[Any]) -> Packed:
    """An array as plain data that every serialiser can carry."""
    return array.shape, array.dtype.str, array.tobytes()


def unpack(packed: Packed) -> NDArray[Any]:
    """The inverse of :func:`pack`; the tuple may have become a list on its way."""
    shape, dtype, data = packed
    return np.frombuffer(data, dtype=dtype).reshape(tuple(shape))


def join_steps(parts: list[tuple[int, NDArray[Any]]]) -> NDArray[Any]:
    """Rows by position, from the steps (first position, rows [tokens, L, K]) that forwarded them.

    A preempted request is forwarded again from its start: the first forward is the one whose
    logits were sampled from, so the first row of a position stays.

    Raises:
        ValueError: a position that no step forwarded (a cached prefix has no rows).
    """
    length = max(start + len(rows) for start, rows in parts)
    widest = np.result_type(*(rows.dtype for _, rows in parts))
    joined = np.zeros((length, *parts[0][1].shape[1:]), widest)
    known = np.zeros(length, bool)
    for start, rows in parts:
        new = ~known[start : start + len(rows)]
        joined[start : start + len(rows)][new] = rows[new]
        known[start : start + len(rows)] = True
    if not known.all():
        raise ValueError(f"no experts for position {int(np.flatnonzero(~known)[0])}")
    return joined


def stable_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Ids of the k largest logits of each row, [T, E] -> [T, k]; of equal ones the lower id wins.

    The tie rule of the package triton_kernels (``topk_details/_topk_forward.py``), whose fused
    kernels say no ids. ``torch.topk`` promises none, and router logits in bf16 do tie.
    """
    return logits.sort(dim=-1, descending=True, stable=True).indices[..., :k]
