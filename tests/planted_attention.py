"""Attention kernels with one fault each, which the kernel audit must find.

All have the signature of transformers' attention interface and take its ``sdpa`` mask: boolean
[B, 1, T, S], True where a query may attend, or None for plain causal attention. Shapes: query
[B, H, T, D], key and value [B, Hkv, S, D]; they return [B, T, H, D].
"""

from __future__ import annotations

from typing import Any

import torch

Result = tuple[torch.Tensor, None]
NOISE = 1e-2  # of non_deterministic, relative: more than any dtype's rounding


def right(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Result:
    """No fault: what the others deviate from."""
    return _attend(query, key, value, _mask(query, key, attention_mask), **kwargs)


def no_sinks(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Result:
    """The sinks take no part, as in a flash kernel that has no argument for them."""
    mask = _mask(query, key, attention_mask)
    return _attend(query, key, value, mask, **kwargs | {"s_aux": None})


def no_sink_gradient(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Result:
    """Right forward; the backward pass has nothing for the sinks."""
    sinks = kwargs.get("s_aux")
    kept = kwargs | {"s_aux": None if sinks is None else sinks.detach()}
    return _attend(query, key, value, _mask(query, key, attention_mask), **kept)


def wrong_gradient_scale(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Result:
    """Right forward; the queries' gradient is half of what it should be."""
    mask = _mask(query, key, attention_mask)
    halved: Any = _HalfGradient.apply(query)  # type: ignore[no-untyped-call]
    return _attend(halved, key, value, mask, **kwargs)


def window_off_by_one(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Result:
    """Sees one key more than the window holds."""
    mask, window = _mask(query, key, attention_mask), kwargs.get("sliding_window")
    if window is not None:
        # A key further, wherever the first one in the window is seen: never over a document's edge.
        further = torch.zeros_like(mask)
        further[..., :-1] = mask[..., 1:]
        mask = mask | (further & (_distance(query, key) == window))
    return _attend(query, key, value, mask, **kwargs)


def leaking_packing(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Result:
    """Documents that share a row see each other."""
    distance, window = _distance(query, key), kwargs.get("sliding_window")
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)
    return _attend(query, key, value, mask[None, None], **kwargs)


def wrong_offset(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Result:
    """Puts the first query at the first key, whatever the cache holds."""
    mask = _mask(query, key, attention_mask)
    queries, keys = mask.shape[-2:]
    if queries < keys:
        square = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()
        mask = square[None, None]
    return _attend(query, key, value, mask, **kwargs)


def wrong_groups(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Result:
    """Hands key heads out in turn; neighbouring query heads should share one."""
    share = query.shape[1] // key.shape[1]
    mask = _mask(query, key, attention_mask)
    return _attend(query, key.repeat(1, share, 1, 1), value.repeat(1, share, 1, 1), mask, **kwargs)


def wrong_scaling(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Result:
    """Takes head_dim ** -0.5, whatever scale it is given."""
    mask = _mask(query, key, attention_mask)
    return _attend(query, key, value, mask, **kwargs | {"scaling": None})


def non_deterministic(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Result:
    """Other numbers at every call, as from a race between threads."""
    out, _ = _attend(query, key, value, _mask(query, key, attention_mask), **kwargs)
    return out * (1 + NOISE * torch.randn_like(out)), None


class _HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor) -> torch.Tensor:
        return query.view_as(query)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 0.5 * grads[0]


def _distance(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[T, S] how far a key is behind a query; the last query stands at the last key."""
    queries, keys = query.shape[2], key.shape[2]
    rows = torch.arange(keys - queries, keys, device=query.device)[:, None]
    return rows - torch.arange(keys, device=query.device)


def _mask(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return (_distance(query, key) >= 0)[None, None] if mask is None else mask


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> Result:
    """Plain attention with sinks, the softmax in float32 or better."""
    share = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(share, 1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~mask, -torch.inf)
    if s_aux is not None:
        column = s_aux.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    precise = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=precise)[..., : key.shape[2]].to(value.dtype)
    return (weights @ value).transpose(1, 2), None
