"""Attention with sinks in PyTorch's flex attention: one compiled kernel for GPUs.

flex attention returns the log-sum-exp of every row, and differentiates it. So the sink can be
applied after the kernel: with Z = sum of exp(scores), attention with a sink is the kernel's output
times Z / (Z + exp(sink)) = sigmoid(lse - sink). transformers' own wrapper does the same with the
lse rounded to the values' dtype, which in bfloat16 moves the factor by up to 2 %; here it stays in
float32. Memory is O(T): masks are block-sparse (128 × 128) and evaluated inside the kernel.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


def flex_mask(
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    **arguments: Any,
) -> Any:
    """transformers' mask interface; every token may attend to itself, padding too.

    A row without any key has no lse, and a NaN gradient.
    """
    from transformers.masking_utils import (
        and_masks,
        causal_mask_function,
        flex_attention_mask,
        or_masks,
        padding_mask_function,
        prepare_padding_mask,
    )

    allowed = causal_mask_function if mask_function is None else mask_function
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        allowed = and_masks(allowed, padding_mask_function(padding))
    return flex_attention_mask(
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=or_masks(allowed, _itself),
        **arguments,
    )


def _itself(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query == key


def sink_flex_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Softmax over the tokens and the sink; differentiable in the sinks.

    Shapes: query [B, H, T, D], key [B, Hkv, T, D], value [B, Hkv, T, Dv], s_aux [H]; returns
    [B, T, H, Dv].

    Raises:
        ValueError: dropout, which flex attention does not have.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    if dropout:
        raise ValueError(f"flex attention has no dropout; {dropout} was asked for")
    sinks = s_aux if s_aux is not None else getattr(module, "sinks", None)
    attend = _compiled() if query.device.type == "cuda" else _plain()
    out, aux = attend(
        query,
        key,
        value,
        block_mask=attention_mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if sinks is not None:
        share = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[:, None])
        out = (out.to(share.dtype) * share[..., None]).to(query.dtype)
    return out.transpose(1, 2).contiguous(), None


def _plain() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled() -> Any:
    return torch.compile(_plain())
