"""Where tokens may look, made a block of queries at a time: no [T, T] mask exists at any time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

BLOCK = 256  # queries at once


@dataclass(frozen=True, slots=True)
class Span:
    """Queries ``start:stop`` see keys within ``low:high`` only."""

    start: int
    stop: int
    low: int
    high: int


class BlockedMask:
    """Where tokens may look, computed for a block of queries when that block is due.

    It holds what transformers would build a [B, 1, T, T] mask from, instead of the mask: causality,
    window, padding and documents, whatever the family combines. Every token may look at itself, so
    that padding whose window holds only padding has no empty row, which would be NaN.
    """

    def __init__(self, q_length: int, kv_length: int, **arguments: Any) -> None:
        self._queries, self._keys = q_length, kv_length
        self._arguments = {**arguments, "allow_is_causal_skip": False}
        self._q_offset = self._arguments.pop("q_offset", 0)
        self._kv_offset = self._arguments.pop("kv_offset", 0)
        self._spans: list[Span] | None = None

    def part(self, start: int, stop: int, low: int, high: int) -> torch.Tensor:
        """[B, 1, stop - start, high - low] True where a query may look at a key."""
        from transformers.masking_utils import sdpa_mask

        first_query, first_key = self._q_offset + start, self._kv_offset + low
        mask = sdpa_mask(
            q_length=stop - start,
            q_offset=first_query,
            kv_length=high - low,
            kv_offset=first_key,
            **self._arguments,
        )
        assert mask is not None
        rows = torch.arange(stop - start, device=mask.device)[:, None] + first_query
        itself: torch.Tensor = rows == torch.arange(high - low, device=mask.device) + first_key
        return mask | itself

    @property
    def spans(self) -> list[Span]:
        """Blocks of queries with the keys they need; found once, used by every layer."""
        if self._spans is None:
            starts = range(0, self._queries, BLOCK)
            edges = torch.stack([self._edges(start) for start in starts]).tolist()
            stops = (min(start + BLOCK, self._queries) for start in starts)
            self._spans = [
                Span(start, stop, low, high)
                for start, stop, (low, high) in zip(starts, stops, edges, strict=True)
            ]
        return self._spans

    def _edges(self, start: int) -> torch.Tensor:
        """First and last + 1 of the keys that the block at ``start`` sees, as a tensor: no sync."""
        stop = min(start + BLOCK, self._queries)
        seen = self.part(start, stop, 0, self._keys).any(2).any(0)[0].to(torch.int8)
        return torch.stack([seen.argmax(), self._keys - seen.flip(0).argmax()])


def blocked_mask(q_length: int, kv_length: int, **arguments: Any) -> BlockedMask:
    """transformers' mask interface; see :class:`BlockedMask`."""
    return BlockedMask(q_length, kv_length, **arguments)
