"""Experts implementations with one fault each, which the kernel audit must find.

They compute every expert on every token, which only small models can afford.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mismatch.features.kernels.expert_layer import every_expert, weighed

Experts = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
REFUSAL = "no kernel for this shape"


def right(
    module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """No fault: the others are this one with a change."""
    return weighed(every_expert(module, hidden), ids, weights).to(hidden.dtype)


def no_router_gradient(
    module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The router's weights are constants: it never learns."""
    return right(module, hidden, ids, weights.detach())


def wrong_router_gradient(
    module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The router's gradient comes once for each chosen expert."""
    return right(module, hidden, ids, _scaled(weights, float(ids.shape[1])))


def no_expert_gradient(
    module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Only what comes before the layer is trained."""
    with _Frozen(module):
        return right(module, hidden, ids, weights)


def wrong_hidden_gradient(
    module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The gradient of the layer's input is 10 % too large."""
    return right(module, _scaled(hidden, 1.1), ids, weights)


def no_backward(
    module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """An inference kernel: its output has no history."""
    with torch.no_grad():
        return right(module, hidden, ids, weights)


def dropped_bias(
    module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The bias of the last matrix is forgotten; no fault for families without biases."""
    out = right(module, hidden, ids, weights)
    if module.has_bias:
        bias = module.down_proj_bias.expand(len(hidden), -1, -1)
        out = out - weighed(bias, ids, weights).to(out.dtype)
    return out


def equal_weights(
    module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """All chosen experts count the same."""
    return right(module, hidden, ids, weights.mean(-1, keepdim=True).expand_as(weights))


def last_slot_lost(
    module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """One of the chosen experts is left out."""
    kept = torch.ones_like(weights)
    kept[:, -1] = 0
    return right(module, hidden, ids, weights * kept)


def other_bits(
    module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Right within rounding, and never the same twice, as with sums in any order."""
    out = right(module, hidden, ids, weights)
    return out * (1 + torch.finfo(out.dtype).eps * torch.randint_like(out, -1, 2))


def noisy(
    module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Never the same twice, far beyond rounding, as with a race for memory."""
    out = right(module, hidden, ids, weights)
    return out * (1 + 0.3 * torch.rand_like(out))


def looks_at_the_batch(
    module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """An expert's capacity is shared: tokens beyond it lose their output."""
    out = right(module, hidden, ids, weights)
    late = torch.arange(len(hidden), device=out.device) >= max(1, len(hidden) // 4)
    return torch.where(late[:, None], out * 0.5, out)


def refuses(
    module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """It has no kernel for anything."""
    raise NotImplementedError(REFUSAL)


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """The same numbers, with a gradient that is ``factor`` times too large."""
    out: torch.Tensor = _Gradient.apply(tensor, factor)  # type: ignore[no-untyped-call]
    return out


class _Frozen:
    """Within the block the module's parameters take no gradient."""

    def __init__(self, module: Any) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]

    def __enter__(self) -> None:
        for parameter in self.parameters:
            parameter.requires_grad_(False)

    def __exit__(self, *exc: object) -> None:
        for parameter in self.parameters:
            parameter.requires_grad_(True)
