"""Attention with learned sinks in bounded memory: blocks of queries, masks made as they are needed.

A sequence of T tokens costs O(T) memory: no [T, T] tensor exists at any time, neither scores nor
mask. Queries go through PyTorch's fused kernel a block at a time, each block with only those keys
that its mask lets it see (in a sliding layer: about the window; among packed documents: its own).
The value of every row is that of attention over the whole row, with softmax sums in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

BLOCK = 256  # queries at once
EXTRA = 8  # columns appended to queries and keys: fused kernels want head sizes in eights


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
        self._offset = self._arguments.pop("q_offset", 0)
        self._spans: list[Span] | None = None

    def part(self, start: int, stop: int, low: int, high: int) -> torch.Tensor:
        """[B, 1, stop - start, high - low] True where a query may look at a key."""
        from transformers.masking_utils import sdpa_mask

        mask = sdpa_mask(
            q_length=stop - start,
            q_offset=self._offset + start,
            kv_length=high - low,
            **{**self._arguments, "kv_offset": self._arguments.get("kv_offset", 0) + low},
        )
        assert mask is not None
        rows = torch.arange(start, stop, device=mask.device)[:, None]
        return mask | (rows == torch.arange(low, high, device=mask.device))

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


def sink_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: BlockedMask,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Softmax over the tokens and the sink, in PyTorch's fused kernel; differentiable in the sinks.

    Shapes: query [B, H, T, D], key [B, Hkv, T, D], value [B, Hkv, T, Dv], s_aux [H]; returns
    [B, T, H, Dv]. A layer without sinks (some families have both kinds) is plain attention.
    """
    sinks = s_aux if s_aux is not None else getattr(module, "sinks", None)
    return _attend(query, key, value, attention_mask, scaling, dropout, sinks), None


def sinkless_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: BlockedMask,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The planted fault: plain attention for a model with sinks, as a wrong kernel would run it."""
    return _attend(query, key, value, attention_mask, scaling, dropout, None), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: BlockedMask,
    scaling: float | None,
    dropout: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    heads, size = query.shape[1], value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    if sinks is not None:
        query, key = _with_room(query, sinks), F.pad(key, (0, EXTRA))
    value = F.pad(value, (0, query.shape[-1] - size))  # fused kernels want one size for all
    blocks = []
    for span in mask.spans:
        work = (query, key, value, mask, span, scale, dropout, sinks is not None)
        if torch.is_grad_enabled() and len(mask.spans) > 1:
            # Kept for the backward pass, the keys of all blocks together would be O(T²).
            blocks.append(checkpoint(_block, *work, use_reentrant=False))
        else:
            blocks.append(_block(*work))
    return torch.cat(blocks, 2)[..., :size].transpose(1, 2).contiguous()


def _with_room(query: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """[B, H, T, D + EXTRA]: each query carries its head's sink, for the sink's key to pick up."""
    batch, heads, tokens, _ = query.shape
    columns = sinks.to(query.dtype).view(1, heads, 1, 1).expand(batch, heads, tokens, EXTRA)
    return torch.cat([query, columns], -1)


def _block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: BlockedMask,
    span: Span,
    scale: float,
    dropout: float,
    sink: bool,
) -> torch.Tensor:
    """[B, H, queries of the span, D].

    The sink is one more key, whose product with a query is the sink logit over ``scale``, and
    whose value is 0: the softmax sees exactly one more term and the output none. An additive mask
    would do the same, but needs [heads, queries, keys], and fused kernels refuse its gradient.
    """
    keys, values = key[:, :, span.low : span.high], value[:, :, span.low : span.high]
    looks = mask.part(span.start, span.stop, span.low, span.high)
    if sink:
        keys = torch.cat([keys, _sink_key(key, scale)], 2)
        values, looks = F.pad(values, (0, 0, 0, 1)), F.pad(looks, (0, 1), value=True)
    return F.scaled_dot_product_attention(
        query[:, :, span.start : span.stop],
        keys,
        values,
        attn_mask=looks,
        dropout_p=dropout,
        scale=scale,
    )


def _sink_key(key: torch.Tensor, scale: float) -> torch.Tensor:
    """[B, H, 1, D] zero except the extra columns, which sum to 1 / scale more exactly than one can.

    The kernel multiplies by ``scale`` again; in bfloat16 a single column would be off by 2⁻⁹.
    """
    parts, rest = [], 1.0 / scale
    for _ in range(3):
        parts.append(float(torch.tensor(rest, dtype=key.dtype)))
        rest -= parts[-1]
    column = key.new_zeros(key.shape[-1])
    column[-EXTRA : 3 - EXTRA] = column.new_tensor(parts)
    return column.expand(*key.shape[:2], 1, -1)
