"""Reference attention by its definition in float64, its rounding floor, and limits."""

from __future__ import annotations

from typing import Literal

import torch

from mismatch.processes.kernels.cases import Inputs

Groups = Literal["neighbours", "round_robin"]

# A right kernel rounds in other places than plain attention with a float32 softmax does, and may
# keep its softmax in the inputs' dtype (gpt-oss' own eager does: it stays below 3 times that
# floor). A feature that is ignored moves the output by 10 % and more, 4 times this in bfloat16.
TIMES_FLOOR = 8.0
# A missing gradient has an error of 1: no floor may pass it.
HIGHEST = 0.5
# Central differences: truncation goes with the square of the step, rounding with its inverse. Also
# in float64 the rounding may be float32's: most families' eager attention has its softmax there.
STEPS = {torch.float64: 2e-3, torch.float32: 2e-2}
DIFFERENCES = {torch.float64: 1e-3, torch.float32: 2e-2}


def attention(
    inputs: Inputs,
    mask: torch.Tensor,
    scaling: float,
    *,
    sinks: bool = True,
    groups: Groups = "neighbours",
) -> torch.Tensor:
    """[B, T, H, Dv] of inputs in float64: softmax over scores and sink, times the values.

    With s = scaling · q·k over the keys that the query may attend to and z the head's sink, the
    output is Σ exp(s_j) v_j / (exp(z) + Σ exp(s_j)) (transformers' gpt-oss, eager).

    Args:
        mask: [T, S] or [B, 1, T, S], True where a query may attend.
        sinks: False: as in a kernel that drops them.
        groups: the key head of a query head: neighbours share one, or (a fault) round robin.
    """
    scores, value = _scores(inputs, mask, scaling, groups)
    scores = _with_sinks(scores, inputs.sinks if sinks else None)
    share = scores.softmax(-1)[..., : value.shape[2]]
    return (share @ value).transpose(1, 2)


def rounded(inputs: Inputs, mask: torch.Tensor, scaling: float) -> torch.Tensor:
    """The same in the inputs' dtype with a float32 softmax, as a trainer's plain attention.

    Its error is the floor: what rounding alone costs in this dtype. In float64 too the softmax is
    in float32, as in the families' own eager attention.
    """
    scores, value = _scores(inputs, mask, scaling, "neighbours")
    scores = _with_sinks(scores, inputs.sinks)
    share = scores.softmax(-1, dtype=torch.float32)[..., : value.shape[2]]
    return (share.to(value.dtype) @ value).transpose(1, 2)


def leaves_of(inputs: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    """Copies of the kernel's inputs that require gradients, in another dtype if one is given."""
    return Inputs(
        *(
            None if x is None else x.detach().to(dtype or x.dtype, copy=True).requires_grad_()
            for x in inputs
        )  # type: ignore[arg-type]
    )


def relative_error(result: torch.Tensor | None, reference: torch.Tensor) -> float:
    """``|result - reference| / |reference|`` in the 2-norm; inf where ``result`` is not finite.

    1.0 for None: a gradient that does not arrive.
    """
    if result is None:
        return 1.0
    reference = reference.detach().double()
    gap, size = (result.detach().double() - reference).norm(), reference.norm()
    if not torch.isfinite(gap):
        return float("inf")
    return float(gap / size) if size > 0 else float(gap)


def _scores(
    inputs: Inputs, mask: torch.Tensor, scaling: float, groups: Groups
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, H, T, S] with -inf where a query may not attend, and values by query head."""
    query, key, value, _ = inputs
    share = query.shape[1] // key.shape[1]
    if groups == "neighbours":
        key, value = (x.repeat_interleave(share, 1) for x in (key, value))
    else:
        key, value = (x.repeat(1, share, 1, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    return scores.masked_fill(~mask, -torch.inf), value


def _with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is None:
        return scores
    batch, heads, queries, _ = scores.shape
    column = sinks.to(scores.dtype).view(1, heads, 1, 1).expand(batch, heads, queries, 1)
    return torch.cat([scores, column], -1)


def limit_of(floor: float) -> float:
    """Limit of a relative error, from the floor: rounding alone on the same inputs."""
    return min(TIMES_FLOOR * floor, HIGHEST)
