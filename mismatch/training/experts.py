"""Experts in bounded memory: the results of the eager loop, without its copies.

transformers offers three ways to run the experts of a layer. ``eager`` loops over the experts, but
its backward builds a zero-filled gradient of *all* experts for each one it meets, and its one-hot
mask takes 8·K·E bytes per token. ``grouped_mm`` holds the rows of all (token, expert) pairs at
once. ``batched_mm`` copies the weights of the chosen experts for every token: on gpt-oss-20b about
200 MB per token, the out-of-memory of the gpt-oss story.

``bounded`` runs expert after expert on views of the fused weights, at most ``EXPERT_ROWS`` rows at
a time, keeps nothing but its inputs for the backward pass, and there writes each expert's gradient
into its place of one buffer. Memory beyond the layer's weights and their gradient does not depend
on the number of experts, and grows with the tokens only by the layer's own input and output. It is
registered with transformers' experts interface, so it serves every family that uses that.

Its numbers are those of ``eager`` bit for bit as long as no expert gets more than ``EXPERT_ROWS``
tokens of a micro-batch: a longer matmul is cut, which may round another way. In the backward pass
the gradient of the layer's input arrives as one sum over all experts, where eager's autograd adds
one expert after the other to what is there; with shared experts that is another order of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from mismatch.training.distributed import capture_rng_and_autocast
from mismatch.training.packing import EXPERT_ROWS

NAME = "bounded"


class Weights(NamedTuple):
    """The fused weights of a layer's experts, or their gradients; None: there is none.

    Attributes:
        up: [E, in, out] or, as most families store it, [E, out, in]; gate and up where it is gated.
        down: likewise.
    """

    up: Any
    up_bias: torch.Tensor | None
    down: Any
    down_bias: torch.Tensor | None


class Span(NamedTuple):
    """At most ``EXPERT_ROWS`` tokens of one expert; ``last``: the backward pass starts with it."""

    expert: int
    tokens: torch.Tensor
    slots: torch.Tensor
    last: bool


def register() -> None:
    """Make ``bounded`` an experts implementation of transformers; does nothing the second time."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if NAME not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(NAME, bounded_experts)


def implementations_for(model: Any) -> list[str]:
    """Return the experts implementations that can run a model here; [] for a dense one.

    transformers checks only for ``grouped_mm`` whether a model's experts use its interface: any
    other name is accepted, and the family's own loop runs. Those families get ``eager`` alone.

    Args:
        model: a causal language model, weights or not, or its configuration.
    """
    from mismatch.training.routing.capture import moe_layers
    from mismatch.training.source import skeleton

    if not isinstance(model, torch.nn.Module):
        model = skeleton(model)
    if not moe_layers(model.get_decoder()):
        return []
    # An attribute that the interface's decorator sets on a module of experts.
    served = any(hasattr(module, "is_concatenated") for module in model.modules())
    return ["eager", "grouped_mm", "batched_mm", NAME] if served else ["eager"]


def bounded_experts(
    module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Drop-in for a family's ``experts(hidden, ids, weights)``.

    Args:
        module: with transformers' fused weights and its ``_apply_gate`` or ``act_fn``.
        hidden: [T, H].
        ids: [T, K]; an id of E or more is padding, and skipped.
        weights: [T, K] of the router.

    Returns:
        [T, H], in the dtype of ``hidden``.
    """
    gated = module.has_gate
    fused = Weights(
        module.gate_up_proj if gated else module.up_proj,
        (module.gate_up_proj_bias if gated else module.up_proj_bias) if module.has_bias else None,
        module.down_proj,
        module.down_proj_bias if module.has_bias else None,
    )
    out: torch.Tensor = _Bounded.apply(module, hidden, ids, weights, *fused)  # type: ignore[no-untyped-call]
    return out


def spans(ids: torch.Tensor, experts: int) -> Iterator[Span]:
    """Yield (token, slot) pairs of every expert that is hit, in the order of transformers' loop."""
    order = torch.argsort(ids.t().reshape(-1), stable=True)  # slot by slot, token by token
    counts = torch.bincount(ids.reshape(-1), minlength=experts)[:experts].tolist()
    first = 0
    for expert, count in enumerate(counts):
        end = first + count
        for start in range(first, end, EXPERT_ROWS):
            pairs = order[start : min(start + EXPERT_ROWS, end)]
            last = start + EXPERT_ROWS >= end
            yield Span(expert, pairs % ids.shape[0], pairs // ids.shape[0], last)
        first = end


class _Bounded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        module: Any,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *fused: Any,
    ) -> torch.Tensor:
        ctx.module = module
        ctx.recomputing = capture_rng_and_autocast(hidden.device)
        ctx.save_for_backward(hidden, ids, weights, *fused)
        expert = _Expert(module, Weights(*fused))
        # Nemotron-H, the one family whose experts have no gate, sums in the router's dtype.
        out = torch.zeros_like(hidden, dtype=None if module.has_gate else weights.dtype)
        for span in spans(ids, fused[0].shape[0]):
            state = expert.up(span.expert, hidden[span.tokens])
            state = expert.down(span.expert, expert.gate(state))
            state = state * weights[span.tokens, span.slots, None]
            out.index_add_(0, span.tokens, state.to(out.dtype))
        return out.to(hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        hidden, ids, weights, *fused = ctx.saved_tensors
        needed = ctx.needs_input_grad
        grad_hidden, grad_weights, *buffers = (
            torch.zeros_like(tensor) if tensor is not None and need else None
            for tensor, need in zip(
                (hidden, weights, *fused), (needed[1], *needed[3:]), strict=True
            )
        )
        grads = Weights(*buffers)
        expert = _Expert(ctx.module, Weights(*fused))
        with ctx.recomputing():
            # Last expert first, as autograd goes through eager's loop: sums round by their order.
            for span in reversed(list(spans(ids, fused[0].shape[0]))):
                _backward_of(span, expert, grad, hidden, weights, grads, grad_hidden, grad_weights)
        return None, grad_hidden, None, grad_weights, *grads


def _backward_of(
    span: Span,
    expert: _Expert,
    grad: torch.Tensor,
    hidden: torch.Tensor,
    weights: torch.Tensor,
    grads: Weights,
    grad_hidden: torch.Tensor | None,
    grad_weights: torch.Tensor | None,
) -> None:
    """Recompute one span, and add its gradients to the buffers."""
    rows = hidden[span.tokens]
    state = expert.up(span.expert, rows).detach().requires_grad_()
    with torch.enable_grad():
        gated = expert.gate(state)
    inner = gated.detach()
    factor = weights[span.tokens, span.slots, None]
    # The dtypes of a plain backward: a float32 router's weights make the product float32.
    product = torch.promote_types(inner.dtype, factor.dtype)
    upstream = grad[span.tokens].to(product)
    if grad_weights is not None:
        share = (upstream * expert.down(span.expert, inner)).sum(-1)
        grad_weights[span.tokens, span.slots] = share.to(grad_weights.dtype)
    upstream = (upstream * factor).to(inner.dtype)
    expert.add(grads.down, grads.down_bias, span, inner, upstream)
    (upstream,) = torch.autograd.grad(
        gated, state, expert.back(expert.w.down, span.expert, upstream)
    )
    expert.add(grads.up, grads.up_bias, span, rows, upstream)
    if grad_hidden is not None:
        back = expert.back(expert.w.up, span.expert, upstream)
        grad_hidden.index_add_(0, span.tokens, back.to(grad_hidden.dtype))


class _Expert:
    """One expert's arithmetic on views of the fused weights."""

    def __init__(self, module: Any, weights: Weights) -> None:
        self.module, self.w = module, weights
        self.transposed = bool(module.is_transposed)

    def _linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, expert: int, rows: torch.Tensor
    ) -> torch.Tensor:
        # The two spellings of the families' own loops: they round differently.
        if self.transposed:
            out = rows @ weight[expert]
            return out if bias is None else out + bias[expert]
        return torch.nn.functional.linear(
            rows, weight[expert], None if bias is None else bias[expert]
        )

    def up(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        return self._linear(self.w.up, self.w.up_bias, expert, rows)

    def down(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        return self._linear(self.w.down, self.w.down_bias, expert, rows)

    def gate(self, state: torch.Tensor) -> torch.Tensor:
        module = self.module
        out: torch.Tensor = module._apply_gate(state) if module.has_gate else module.act_fn(state)
        return out

    def back(self, weight: torch.Tensor, expert: int, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient of a linear layer's input."""
        return grad @ (weight[expert].t() if self.transposed else weight[expert])

    def add(
        self,
        grad_weight: torch.Tensor | None,
        grad_bias: torch.Tensor | None,
        span: Span,
        rows: torch.Tensor,
        grad: torch.Tensor,
    ) -> None:
        """Add the gradients of one expert's linear layer to its slice of the buffers."""
        if grad_weight is not None:
            left, right = (rows.t(), grad) if self.transposed else (grad.t(), rows)
            buffer = grad_weight[span.expert]
            autocast = torch.is_autocast_enabled(rows.device.type)
            if span.last and left.dtype == right.dtype == buffer.dtype and not autocast:
                torch.mm(left, right, out=buffer)
            else:
                buffer.add_(left @ right)
        if grad_bias is not None:
            grad_bias[span.expert].add_(grad.sum(0))
