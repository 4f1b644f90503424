"""Planted faults of attention, for experiments; run by name as a user's own kernel."""

from __future__ import annotations

from typing import Any

import torch

from mismatch.training.attention.sink_sdpa import with_sinks


def sinks_forward_only(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with sinks whose backward pass is that of attention without them.

    As a flash kernel that adds the sinks to the forward pass alone: log-probabilities are right up
    to rounding, the sinks' gradient is 0, and that of queries, keys and values is of a softmax
    without sinks. Shapes as in :func:`~mismatch.training.attention.sink_sdpa.plain_attention`;
    the mask is boolean, True where a query may look.
    """
    least = torch.finfo(query.dtype).min
    hidden = torch.zeros_like(attention_mask, dtype=query.dtype)
    hidden.masked_fill_(~attention_mask, least)
    without = with_sinks(query, key, value, hidden, scaling, None)
    if s_aux is None:
        return without, None
    with torch.no_grad():
        right = with_sinks(query, key, value, hidden, scaling, s_aux)
    return without + (right - without).detach() + 0.0 * s_aux.sum(), None


def attention(
    query: Any, key: Any, value: Any, mask: Any, scaling: float, s_aux: Any, dropout: float = 0.0
) -> tuple[torch.Tensor, None]:
    """Attention by its definition, with a boolean mask; shapes as above, one key for each query."""
    scores = (query @ key.mT).float() * scaling
    scores = scores.masked_fill(~mask, -torch.inf)
    sinks = s_aux.view(1, -1, 1, 1).float().expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    weights = torch.nn.functional.dropout(weights, dropout).to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), None


def _whole(query: Any, key: Any, value: Any, tiled: bool = False) -> tuple[Any, Any]:
    times = query.shape[1] // key.shape[1]
    if tiled:
        return key.repeat(1, times, 1, 1), value.repeat(1, times, 1, 1)
    return key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)


def sink_turned(
    module: Any, query: Any, key: Any, value: Any, attention_mask: torch.Tensor, scaling: float,
    s_aux: torch.Tensor, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Take the sink of head 0 with the other sign."""
    sign = torch.ones_like(s_aux)
    sign[0] = -1
    return attention(query, *_whole(query, key, value), attention_mask, scaling, s_aux * sign)


def heads_tiled(
    module: Any, query: Any, key: Any, value: Any, attention_mask: torch.Tensor, scaling: float,
    s_aux: torch.Tensor, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Repeat all key heads in turn, where each serves neighbouring query heads."""
    whole = _whole(query, key, value, tiled=True)
    return attention(query, *whole, attention_mask, scaling, s_aux)


def drops(
    module: Any, query: Any, key: Any, value: Any, attention_mask: torch.Tensor, scaling: float,
    s_aux: torch.Tensor, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Leave out one weight in a hundred."""
    whole = _whole(query, key, value)
    return attention(query, *whole, attention_mask, scaling, s_aux, dropout=0.01)
