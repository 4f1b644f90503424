"""Attention with learned sinks in bounded memory: by blocks of queries, in PyTorch's fused kernel.

A sequence of T tokens costs O(T) memory: no [T, T] tensor exists at any time, neither scores nor
mask. Queries go through PyTorch's fused kernel a block at a time, each block with only those keys
that its mask lets it see (sliding layer: about the window; packed documents: its document).
The value of every row is that of attention over the whole row, with softmax sums in float32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from mismatch.training.distributed import capture_rng_and_autocast

BLOCK = 256  # queries per block
EXTRA = 8  # columns appended to queries and keys: fused kernels want head sizes in eights


@dataclass(frozen=True, slots=True)
class Span:
    """Queries ``start:stop`` see keys within ``low:high`` only."""

    start: int
    stop: int
    low: int
    high: int


class BlockedMask:
    """An attention mask that is computed for one block of queries at a time.

    It holds the arguments from which transformers would build a [B, 1, T, T] mask: causality,
    window, padding and documents, in any combination. Every token may attend to itself, so that
    padding whose window holds only padding has no empty row, which would be NaN.
    """

    def __init__(self, q_length: int, kv_length: int, **arguments: Any) -> None:
        self._queries, self._keys = q_length, kv_length
        self._arguments = {**arguments, "allow_is_causal_skip": False}
        self._q_offset = self._arguments.pop("q_offset", 0)
        self._kv_offset = self._arguments.pop("kv_offset", 0)
        self._spans: list[Span] | None = None

    def part(self, start: int, stop: int, low: int, high: int) -> torch.Tensor:
        """[B, 1, stop - start, high - low] True where a query may attend to a key."""
        from transformers.masking_utils import sdpa_mask

        first_query, first_key = self._q_offset + start, self._kv_offset + low
        mask = sdpa_mask(
            q_length=stop - start,
            q_offset=first_query,
            kv_length=high - low,
            kv_offset=first_key,
            **self._arguments,
        )
        assert mask is not None
        rows = torch.arange(stop - start, device=mask.device)[:, None] + first_query
        itself: torch.Tensor = rows == torch.arange(high - low, device=mask.device) + first_key
        return mask | itself

    @property
    def spans(self) -> list[Span]:
        """Blocks of queries with their range of keys; computed once, used by every layer."""
        if self._spans is None:
            starts = range(0, self._queries, BLOCK)
            edges = torch.stack([self._edges(start) for start in starts]).tolist()
            stops = (min(start + BLOCK, self._queries) for start in starts)
            self._spans = [
                Span(start, stop, low, high)
                for start, stop, (low, high) in zip(starts, stops, edges, strict=True)
            ]
        return self._spans

    def _edges(self, start: int) -> torch.Tensor:
        """First and last + 1 of the keys of the block at ``start``, [2], on the device: no sync."""
        stop = min(start + BLOCK, self._queries)
        visible = self.part(start, stop, 0, self._keys).any(2).any(0)[0].to(torch.int8)
        return torch.stack([visible.argmax(), self._keys - visible.flip(0).argmax()])


def sink_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: BlockedMask,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Softmax over the tokens and the sink, in PyTorch's fused kernel; differentiable in the sinks.

    Shapes: query [B, H, T, D], key [B, Hkv, T, D], value [B, Hkv, T, Dv], s_aux [H]; returns
    [B, T, H, Dv]. A layer without sinks (some families have both kinds) is plain attention.
    """
    sinks = s_aux if s_aux is not None else getattr(module, "sinks", None)
    return _attend(query, key, value, attention_mask, scaling, dropout, sinks), None


def sinkless_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: BlockedMask,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention without the sinks, as a wrong kernel would: the planted fault."""
    return _attend(query, key, value, attention_mask, scaling, dropout, None), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: BlockedMask,
    scaling: float | None,
    dropout: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    rule = _Rule(mask, query.shape[-1] ** -0.5 if scaling is None else scaling, dropout)
    out: torch.Tensor = _Blocked.apply(query, key, value, sinks, rule)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, slots=True)
class _Rule:
    """The settings of one call."""

    mask: BlockedMask
    scale: float
    dropout: float


class _Blocked(torch.autograd.Function):
    """Saves only its inputs; the backward pass recomputes block by block.

    Gradients of keys, values and sinks are sums over all blocks, accumulated in float32 (or
    float64) in one buffer each, and rounded once. Autograd would add up full-length tensors in the
    inputs' own dtype for every block.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        rule: _Rule,
    ) -> torch.Tensor:
        ctx.rule = rule
        ctx.recomputing = capture_rng_and_autocast(query.device, rule.dropout > 0)
        ctx.save_for_backward(query, key, value, sinks)
        out: torch.Tensor | None = None
        for span in rule.mask.spans:
            block = _run(_parts(query, key, value, sinks, span, rule.scale), span, rule)
            if out is None:  # only now is its dtype known: autocast may choose another
                out = block.new_empty(*query.shape[:3:2], query.shape[1], value.shape[-1])
            out[:, span.start : span.stop] = block.transpose(1, 2)[..., : value.shape[-1]]
        assert out is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, rule = ctx.saved_tensors, ctx.rule
        pairs = zip(inputs, ctx.needs_input_grad[:-1], strict=True)
        sums = _Sums(
            *(
                torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
                if x is not None and need
                else None
                for x, need in pairs
            )
        )
        with ctx.recomputing():
            for span in rule.mask.spans:
                _backward_of(span, rule, grad, inputs, sums)
        rounded = (
            None if total is None else total.to(x.dtype)
            for x, total in zip(inputs, sums, strict=True)
        )
        return (*rounded, None)


class _Sums(NamedTuple):
    """Gradients of the inputs, summed over blocks; None: not needed."""

    query: torch.Tensor | None
    key: torch.Tensor | None
    value: torch.Tensor | None
    sinks: torch.Tensor | None


class _Parts(NamedTuple):
    """Inputs of the fused kernel for one block; all of size D', padded with zeros.

    Attributes:
        query: [B, H, queries, D'].
        key: [B, H, keys, D'], those of the span, and the sink's.
        value: likewise.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def _parts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    span: Span,
    scale: float,
) -> _Parts:
    """Return a block's inputs, with the sink as one more key.

    Its product with every query is the sink logit over the scale, and its value is 0: the softmax
    gets one more term, the output none. An additive mask would do the same, but needs memory for
    [heads, queries, keys], and fused kernels have no gradient for it.
    """
    (batch, heads, _, size), more = query.shape, 0 if sinks is None else 1
    device, dtype = query.device.type, query.dtype
    if dtype == torch.float32 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)  # inputs are rounded before, not by the kernel
    width = max(size + more * EXTRA, value.shape[-1])
    rows = query.new_zeros(batch, heads, span.stop - span.start, width, dtype=dtype)
    rows[..., :size] = query[:, :, span.start : span.stop]

    def by_head(tensor: torch.Tensor) -> torch.Tensor:
        """[B, H, keys of the span + more, width] of a [B, Hkv, T, D]: a copy for each head."""
        keys, groups = span.high - span.low, tensor.shape[1]
        shape = (batch, groups, heads // groups, keys + more, width)
        out = tensor.new_zeros(shape, dtype=dtype)
        out[..., :keys, : tensor.shape[-1]] = tensor[:, :, None, span.low : span.high]
        return out.flatten(1, 2)

    keys, values = by_head(key), by_head(value)
    if sinks is not None:
        rows[..., size : size + EXTRA] = sinks.to(rows.dtype).view(1, heads, 1, 1)
        terms = _inverse(scale, keys.dtype)
        keys[:, :, -1, size : size + len(terms)] = keys.new_tensor(terms)
    return _Parts(rows, keys, values)


def _inverse(scale: float, dtype: torch.dtype) -> list[float]:
    """Three numbers of the dtype whose sum is close to 1 / scale.

    The kernel multiplies by ``scale`` again; in bfloat16 a single number would be off by 2⁻⁹.
    """
    terms, rest = [], 1.0 / scale
    for _ in range(3):
        terms.append(float(torch.tensor(rest, dtype=dtype)))
        rest -= terms[-1]
    return terms


def _run(parts: _Parts, span: Span, rule: _Rule) -> torch.Tensor:
    """[B, H, queries, D'] of one block; the values' own columns are the first."""
    mask = rule.mask.part(span.start, span.stop, span.low, span.high)
    if parts.key.shape[2] > mask.shape[-1]:
        mask = F.pad(mask, (0, 1), value=True)  # every query attends to the sink
    return F.scaled_dot_product_attention(
        *parts, attn_mask=mask, dropout_p=rule.dropout, scale=rule.scale
    )


def _backward_of(
    span: Span, rule: _Rule, grad: torch.Tensor, inputs: tuple[Any, ...], sums: _Sums
) -> None:
    """Recompute one block, and add its gradients to the sums."""
    query, key, value, sinks = inputs
    parts = _parts(query, key, value, sinks, span, rule.scale)
    needed = (sums.query is not None or sums.sinks is not None, sums.key is not None)
    leaves = [
        part.requires_grad_()
        for part, need in zip(parts, (*needed, sums.value is not None), strict=True)
        if need
    ]
    with torch.enable_grad():
        out = _run(parts, span, rule)[..., : value.shape[-1]]
    upstream = grad[:, span.start : span.stop].transpose(1, 2).to(out.dtype)
    gradients = iter(torch.autograd.grad(out, leaves, upstream))
    if needed[0]:
        rows, size = next(gradients), query.shape[-1]
        if sums.query is not None:  # every query is in exactly one block
            sums.query[:, :, span.start : span.stop] = rows[..., :size]
        if sums.sinks is not None:
            columns = rows[..., size : size + EXTRA]
            sums.sinks.add_(columns.sum((0, 2, 3), dtype=sums.sinks.dtype))
    for total in (sums.key, sums.value):
        if total is not None:  # summed over the heads that share the keys
            part = next(gradients)
            groups = part.reshape(len(part), total.shape[1], -1, *part.shape[2:])
            own = groups[..., : span.high - span.low, : total.shape[-1]]
            total[:, :, span.low : span.high] += own.sum(2, dtype=total.dtype)


FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
Eager = Callable[..., tuple[torch.Tensor, Any]]


def plain_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: BlockedMask,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the softmax over the tokens and, where the layer has one, its sink.

    Shapes: query [B, H, T, D], key [B, Hkv, T, D], value [B, Hkv, T, Dv]; returns [B, T, H, Dv].
    """
    sinks = s_aux if s_aux is not None else getattr(module, "sinks", None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    eager = eager_of(module) if sinks is None else None
    parts = []
    for span in attention_mask.spans:
        rows, keys = query[:, :, span.start : span.stop], slice(span.low, span.high)
        seen = attention_mask.part(span.start, span.stop, span.low, span.high)
        lowest = torch.finfo(query.dtype).min
        added = torch.zeros_like(seen, dtype=query.dtype).masked_fill_(~seen, lowest)
        ours = (rows, key[:, :, keys], value[:, :, keys], added)
        # By name: some families take their dropout in front of it.
        parts.append(
            with_sinks(*ours, scale, sinks)
            if eager is None
            else eager(module, *ours, scaling=scale, **options)[0]
        )
    return torch.cat(parts, dim=1), None


def plain_fp8_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *rest: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """:func:`plain_attention` of keys and values that went through an fp8 cache, at scale 1."""
    return plain_attention(module, query, through_fp8(key), through_fp8(value), *rest, **options)


def through_fp8(tensor: torch.Tensor) -> torch.Tensor:
    """Round to float8 (e4m3, saturating) and back."""
    return tensor.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(tensor.dtype)


def with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax, in float32, over the tokens and (where there are any) one sink per head [H]."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = (torch.matmul(query, key.transpose(2, 3)) * scale + mask).float()
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]].to(value.dtype)
    return torch.matmul(weights, value).transpose(1, 2)


def eager_of(module: torch.nn.Module) -> Eager | None:
    """Return the eager function of a layer's family; None if its module has none of that name."""
    home = sys.modules[type(module).__module__]
    return getattr(home, "eager_attention_forward", None)
