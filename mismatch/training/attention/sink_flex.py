"""Attention with sinks in PyTorch's flex attention: one compiled kernel for GPUs.

flex attention returns the log-sum-exp of every row, and differentiates it. So the sink can be
applied after the kernel: with Z = sum of exp(scores), attention with a sink is the kernel's output
times Z / (Z + exp(sink)) = sigmoid(lse - sink). transformers' own wrapper does the same with the
lse rounded to the values' dtype, which in bfloat16 moves the factor by up to 2 %; here it stays in
float32. Memory is O(T) beside the indices of blocks (128 × 128) that a query sees.

The kernel is compiled for the shape of its mask's code: one mask for all layers and layouts, whose
window and documents are tensors, with dynamic lengths in multiples of a block. What would have to
be compiled too often is an error, because flex attention would run unfused from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

BLOCK = 128
ANYWHERE = 1 << 30  # the window of a layer without one
NO_TOKEN, FILLER = -1, -2  # "documents" of padding, and of what fills up the last block
PROBES = 512  # random pairs by which a mask is compared with its canonical form
GRAPHS = 64  # that may be compiled in one process: dtypes, gradients, batches of one row
Visible = Callable[[Any, Any, Any, Any], Any]


def flex_mask(
    q_length: int,
    kv_length: int,
    batch_size: int = 1,
    mask_function: Visible | None = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Any:
    """transformers' mask interface; every token may attend to itself, padding too.

    A row without any key has no lse, and a NaN gradient.

    Raises:
        ValueError: a mask that is not "earlier tokens of the same document within a window", or
            cached keys.
    """
    from transformers.masking_utils import causal_mask_function

    if q_length != kv_length:
        raise ValueError("flex attention with sinks has no cache")
    shape, visible = (batch_size, q_length), mask_function or causal_mask_function
    real = None if attention_mask is None else attention_mask.to(device).bool()
    window = local_size or ANYWHERE
    documents = _documents(visible, shape, real, device)
    padded = torch.nn.functional.pad(documents, (0, -q_length % BLOCK), value=FILLER)
    width = torch.tensor([window], device=device)
    _require_canonical(visible, canonical(documents, width), documents, device)
    return _blocks(padded, width)


def canonical(documents: torch.Tensor, window: torch.Tensor) -> Visible:
    """The one mask: over tensors alone, so that what changes between calls is no code.

    Args:
        documents: [B, T]; tokens see those of their own document.
        window: [1].
    """

    def visible(batch: Any, head: Any, query: Any, key: Any) -> Any:
        near = (key <= query) & (query - key < window[0])
        return (near & (documents[batch, query] == documents[batch, key])) | (query == key)

    return visible


def _documents(
    visible: Visible, shape: tuple[int, int], real: torch.Tensor | None, device: Any
) -> torch.Tensor:
    """[B, T] int32: where a token does not see the one before it, another document begins."""
    batch, tokens = shape
    rows = torch.arange(batch, device=device)[:, None]
    later = torch.arange(1, tokens, device=device)[None]
    joined = torch.as_tensor(visible(rows, 0, later, later - 1), device=device)
    begins = ~joined.broadcast_to(batch, tokens - 1)
    documents = torch.nn.functional.pad(begins.int().cumsum(1, dtype=torch.int32), (1, 0))
    return documents if real is None else torch.where(real, documents, NO_TOKEN).int()


def _require_canonical(
    visible: Visible, ours: Visible, documents: torch.Tensor, device: Any
) -> None:
    draw = torch.Generator().manual_seed(0)
    batch, tokens = documents.shape
    rows, queries, back = (
        torch.randint(high, (PROBES,), generator=draw).to(device)
        for high in (batch, tokens, tokens)
    )
    # Half of the pairs are near each other, where windows and documents end.
    keys = torch.where(torch.arange(PROBES, device=device) % 2 == 0, back, queries - back % 160)
    keys = keys.clamp(min=0)
    theirs = torch.as_tensor(visible(rows, 0, queries, keys), device=device)
    asked = (documents[rows, queries] >= 0) & (documents[rows, keys] >= 0) & (queries != keys)
    if bool(((theirs != ours(rows, 0, queries, keys)) & asked).any()):
        raise ValueError("this mask is not causal within documents and a window")


def _blocks(documents: torch.Tensor, window: torch.Tensor) -> Any:
    """The block mask of whole blocks, from the documents of their first and last tokens."""
    from torch.nn.attention.flex_attention import BlockMask

    batch, tokens = documents.shape
    parts = documents.view(batch, tokens // BLOCK, BLOCK)
    low, high = parts.amin(2), parts.amax(2)
    starts = torch.arange(tokens // BLOCK, device=documents.device) * BLOCK
    query, key = starts[:, None], starts[None]
    near = (key <= query) & (query - (key + BLOCK - 1) < window)
    shared = (low[:, :, None] <= high[:, None]) & (high[:, :, None] >= low[:, None])
    some = near & (shared | (query == key))
    inside = (key < query) & (query + BLOCK - 1 - key < window)
    same = (low == high)[:, :, None] & (low == high)[:, None] & (low[:, :, None] == low[:, None])
    full = inside & same
    partial = (some & ~full)[:, None]
    arguments = (*_indices(partial), *_indices(full[:, None]))
    return BlockMask.from_kv_blocks(
        *arguments,
        BLOCK_SIZE=BLOCK,
        mask_mod=canonical(documents, window),
        seq_lengths=(tokens, tokens),
    )


def _indices(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(count, indices with the chosen ones first) of the last dimension."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1).int(), order.int().contiguous()


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
    tokens = query.shape[2]
    fill = (0, 0, 0, -tokens % BLOCK)
    query, key, value = (torch.nn.functional.pad(x, fill) for x in (query, key, value))
    with compiled_for_all():
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
    return out[:, :, :tokens].transpose(1, 2).contiguous(), None


@contextmanager
def compiled_for_all() -> Iterator[None]:
    """One kernel whoever calls: torch function modes wait outside, falling back is an error."""
    from torch import overrides
    from torch._dynamo import config

    stack: Any = overrides  # its functions have no types
    modes = [stack._pop_mode() for _ in stack._get_current_function_mode_stack()]
    try:
        with config.patch(recompile_limit=GRAPHS, fail_on_recompile_limit_hit=True):
            yield
    finally:
        for mode in reversed(modes):
            stack._push_mode(mode)


def _plain() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled() -> Any:
    return torch.compile(_plain(), dynamic=True)
