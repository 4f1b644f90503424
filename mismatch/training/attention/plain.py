"""Attention as its definition says, by blocks of queries: the yardstick of the other kernels.

Scores of a block of queries against the keys that it may see, softmax in float32, values. A
family's own eager function computes it; where there are learned sinks it is written out here,
because gpt-oss's eager function takes its softmax in the dtype of the scores. Keys and values may
be rounded to fp8 first, as a cache of that dtype stores them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from mismatch.training.attention.sink_sdpa import BlockedMask, Span

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
Eager = Callable[..., tuple[torch.Tensor, Any]]


def plain_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: BlockedMask,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Softmax over the tokens and, where the layer has one, its sink.

    Shapes: query [B, H, T, D], key [B, Hkv, T, D], value [B, Hkv, T, Dv]; returns [B, T, H, Dv].
    """
    sinks = s_aux if s_aux is not None else getattr(module, "sinks", None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    eager = eager_of(module) if sinks is None else None
    parts = []
    for span in attention_mask.spans:
        rows, keys = query[:, :, span.start : span.stop], slice(span.low, span.high)
        seen = _additive(attention_mask, span, query.dtype)
        ours = (rows, key[:, :, keys], value[:, :, keys], seen, scale)
        parts.append(
            with_sinks(*ours, sinks) if eager is None else eager(module, *ours, **options)[0]
        )
    return torch.cat(parts, dim=1), None


def plain_fp8_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *rest: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """:func:`plain_attention` of keys and values that went through an fp8 cache, at scale 1."""
    return plain_attention(module, query, through_fp8(key), through_fp8(value), *rest, **options)


def through_fp8(tensor: torch.Tensor) -> torch.Tensor:
    """Rounded to float8 (e4m3, saturating) and back."""
    return tensor.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(tensor.dtype)


def with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax, in float32, over the tokens and (where there are any) one sink per head [H]."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = (torch.matmul(query, key.transpose(2, 3)) * scale + mask).float()
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]].to(value.dtype)
    return torch.matmul(weights, value).transpose(1, 2)


def eager_of(module: torch.nn.Module) -> Eager | None:
    """The eager function of a layer's family; None where its module has none of that name."""
    found: Eager | None = getattr(
        sys.modules[type(module).__module__], "eager_attention_forward", None
    )
    return found


def _additive(mask: BlockedMask, span: Span, dtype: torch.dtype) -> torch.Tensor:
    """[B, 1, queries, keys] 0 where a query may attend, else the lowest number of the dtype."""
    seen = mask.part(span.start, span.stop, span.low, span.high)
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
