"""A planted fault of attention, for experiments; run by name as a user's own kernel."""

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
