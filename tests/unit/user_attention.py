"""Attention functions as users write them, right and wrong; tests name them by module:function."""

from __future__ import annotations

from typing import Any

import torch

from mismatch.training.attention.sink_sdpa import sink_attention, sinkless_attention

blocked, blocked_without_sinks = sink_attention, sinkless_attention
CALLS: list[Any] = []


def _scores(query: torch.Tensor, key: torch.Tensor, scaling: float) -> torch.Tensor:
    share = query.shape[1] // key.shape[1]
    return query @ key.repeat_interleave(share, 1).transpose(2, 3) * scaling


def _finish(
    scores: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, heads: int
) -> tuple[torch.Tensor, None]:
    keys = value.shape[2]
    if sinks is not None:
        column = sinks.view(1, heads, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., :keys].to(value.dtype)
    value = value.repeat_interleave(heads // value.shape[1], 1)
    return (weights @ value).transpose(1, 2).contiguous(), None


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Right; takes a boolean mask."""
    CALLS.append(attention_mask)
    assert attention_mask.dtype == torch.bool
    scores = _scores(query, key, scaling).masked_fill(~attention_mask, -torch.inf)
    return _finish(scores, value, s_aux, query.shape[1])


def attend_added(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Right; takes a mask that is added."""
    assert attention_mask.is_floating_point()
    return _finish(_scores(query, key, scaling) + attention_mask, value, s_aux, query.shape[1])


def attend_without_mask(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    sliding_window: int | None = None,
    position_ids: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Right; finds out by itself where to look, as flash kernels do."""
    assert attention_mask is None
    assert position_ids is not None
    position = torch.arange(query.shape[2])
    document = (position_ids[0] == 0).cumsum(0)
    gap = position[:, None] - position
    looks = (gap >= 0) & (document[:, None] == document)
    if sliding_window is not None:
        looks &= gap < sliding_window
    scores = _scores(query, key, scaling).masked_fill(~looks, -torch.inf)
    return _finish(scores, value, s_aux, query.shape[1])


def drops_sinks(*args: Any, s_aux: torch.Tensor | None = None, **kwargs: Any) -> Any:
    """As a kernel without ``s_aux``."""
    return attend(*args, **kwargs)


def sinks_without_gradient(*args: Any, s_aux: torch.Tensor, **kwargs: Any) -> Any:
    """Right forward, as the first FlashAttention-3 with sinks."""
    return attend(*args, s_aux=s_aux.detach(), **kwargs)


def sharpens(*args: Any, scaling: float, **kwargs: Any) -> Any:
    """Scales its scores by 1 % too much: bfloat16 hides that on random tokens."""
    return attend(*args, scaling=1.01 * scaling, **kwargs)


def overflows(*args: Any, **kwargs: Any) -> Any:
    """Gives no numbers."""
    out, weights = attend(*args, **kwargs)
    return out * float("nan"), weights


def ignores_the_window(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Any:
    """Sees all that came before."""
    causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    return attend(module, query, key, value, causal, **kwargs)


def leaks(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Takes documents in one row for one."""
    position = torch.arange(query.shape[2])
    gap = position[:, None] - position
    looks = (gap >= 0) & (gap < (kwargs.get("sliding_window") or 10**9))
    return attend(module, query, key, value, looks, **kwargs)


def raises(*args: Any, **kwargs: Any) -> Any:
    """Has no kernel for it."""
    raise RuntimeError("head size 16 is not compiled in")


def wrong_shape(*args: Any, **kwargs: Any) -> Any:
    """Forgets to swap heads and tokens back."""
    out, _ = attend(*args, **kwargs)
    return out.transpose(1, 2), None


class Kernels:
    """A function inside of something."""

    attend = staticmethod(attend)


NOT_A_FUNCTION = 3
