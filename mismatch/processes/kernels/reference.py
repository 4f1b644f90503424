"""Attention by its definition, in float64, and what rounding alone does to it."""

from __future__ import annotations

from typing import Literal

import torch

from mismatch.processes.kernels.cases import Inputs

Groups = Literal["neighbours", "round_robin"]


def attention(
    inputs: Inputs,
    looks: torch.Tensor,
    scaling: float,
    *,
    sinks: bool = True,
    groups: Groups = "neighbours",
) -> torch.Tensor:
    """[B, T, H, Dv] of inputs in float64: softmax over scores and sink, times the values.

    With s = scaling · q·k over the keys that the query may look at and z the head's sink, the
    output is Σ exp(s_j) v_j / (exp(z) + Σ exp(s_j)) (transformers' gpt-oss, eager).

    Args:
        looks: [T, S] or [B, 1, T, S], True where a query may look.
        sinks: False: as a kernel that drops them.
        groups: which key head a query head reads: its neighbours share one, or they take turns.
    """
    scores, value = _scores(inputs, looks, scaling, groups)
    scores = _with_sinks(scores, inputs.sinks if sinks else None)
    share = scores.softmax(-1)[..., : value.shape[2]]
    return (share @ value).transpose(1, 2)


def rounded(inputs: Inputs, looks: torch.Tensor, scaling: float) -> torch.Tensor:
    """The same in the inputs' dtype, with the softmax in float32: a trainer's plain attention.

    Its distance from the truth is the floor: what the dtype takes from a kernel without faults.
    Also in float64 the softmax is in float32: families' own eager attention does that.
    """
    scores, value = _scores(inputs, looks, scaling, "neighbours")
    scores = _with_sinks(scores, inputs.sinks)
    share = scores.softmax(-1, dtype=torch.float32)[..., : value.shape[2]]
    return (share.to(value.dtype) @ value).transpose(1, 2)


def exact(inputs: Inputs) -> Inputs:
    """A float64 copy of the very numbers that the kernel gets; leaves that take gradients."""
    return Inputs(*(None if x is None else x.detach().double().requires_grad_() for x in inputs))  # type: ignore[arg-type]


def relative_error(got: torch.Tensor | None, wanted: torch.Tensor) -> float:
    """``|got - wanted| / |wanted|`` in the 2-norm; infinite where ``got`` holds no numbers.

    1.0 for what is not there at all.
    """
    if got is None:
        return 1.0
    wanted = wanted.detach().double()
    gap, size = (got.detach().double() - wanted).norm(), wanted.norm()
    if not torch.isfinite(gap):
        return float("inf")
    return float(gap / size) if size > 0 else float(gap)


def _scores(
    inputs: Inputs, looks: torch.Tensor, scaling: float, groups: Groups
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, H, T, S] with -inf where a query may not look, and values by query head."""
    query, key, value, _ = inputs
    share = query.shape[1] // key.shape[1]
    if groups == "neighbours":
        key, value = (x.repeat_interleave(share, 1) for x in (key, value))
    else:
        key, value = (x.repeat(1, share, 1, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    return scores.masked_fill(~looks, -torch.inf), value


def _with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is None:
        return scores
    batch, heads, queries, _ = scores.shape
    column = sinks.to(scores.dtype).view(1, heads, 1, 1).expand(batch, heads, queries, 1)
    return torch.cat([scores, column], -1)
