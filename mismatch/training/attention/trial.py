"""A short trial of an attention kernel, on the machine and at the model's geometry.

A kernel may be fast and wrong: one that takes no ``s_aux`` is called without it by transformers and
drops the sinks; one may have them in its forward pass and not in its backward pass. So a kernel is
run on a few random tokens and compared with the definition in float64 before it is used.

One kernel then serves all passes of its dtype, with gradients and without, at any length
(docs/decisions, number 4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from mismatch.errors import named_line
from mismatch.models.config import ModelConfig

TOKENS = 200  # more than a kernel's tile, and no multiple of it
WINDOW = 48
# Relative error, 2-norm. A right kernel stays below a third of these; dropping the sinks doubles
# the output here, another scale or window changes it by tens of per cent.
LIMITS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
NAMES = ("q", "k", "v", "sinks")


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shapes and features of attention in a model.

    Attributes:
        size: of a head's queries and keys; ``value_size`` of its values.
        window: whether some layers use a sliding window.
        scaling: of the scores; None: ``size ** -0.5``.
    """

    heads: int
    kv_heads: int
    size: int
    value_size: int
    window: bool
    sinks: bool
    scaling: float | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome of a trial; errors are relative, in the 2-norm, the maximum over all cases.

    Attributes:
        fault: one sentence; "" if the output passed.
        backward_fault: likewise for gradients.
        gradients: error by input ("q", "k", "v", "sinks"); 1: it gets no gradient. Empty where they
            were not tried.
    """

    fault: str
    backward_fault: str = ""
    forward: float | None = None
    gradients: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether output and, where tried, gradients are right."""
        return not (self.fault or self.backward_fault)


def geometry_of(model: Any, sinks: bool) -> Geometry:
    """Read the configuration and the modules of a model, which may be on the meta device."""
    sizes = ModelConfig.of(model.config)
    return Geometry(
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        size=sizes.head_dim,
        value_size=sizes.value_dim,
        window="sliding_attention" in sizes.layer_types,
        sinks=sinks,
        scaling=scaling_of(model),
    )


def scaling_of(model: Any) -> float | None:
    """Return the scaling of the first attention layer; families set it in many ways."""
    scales = (getattr(module, "scaling", None) for module in model.modules())
    return next((scale for scale in scales if isinstance(scale, float)), None)


@cache
def try_kernel(
    implementation: str, geometry: Geometry, device: torch.device, dtype: torch.dtype
) -> Trial:
    """Run a registered kernel forward and backward, and compare with float64; once per process.

    Args:
        implementation: its name in transformers' registry.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function, limit = ALL_ATTENTION_FUNCTIONS[implementation], LIMITS[dtype]
    worst, backward_fault = 0.0, ""
    gradients: dict[str, float] = {}
    with torch.enable_grad():
        for case in _cases(geometry, device):
            inputs = _inputs(geometry, device, dtype)
            exact = [x.detach().double().requires_grad_() for x in inputs]
            reference = definition(exact, case.allowed, geometry.scaling)
            try:
                layer = _layer(geometry, implementation, inputs, dtype)
                out = _call(function, layer, inputs, case, geometry, dtype)
            except Exception as error:  # a kernel may raise anything: no build, dtype, size …
                return Trial(f"it does not run: {named_line(error)}")
            off = relative_error(out, reference)
            worst = max(worst, off)
            if not off <= limit:
                fault = f"output off by {_percent(off)} ({case.name})"
                return Trial(fault, backward_fault, worst, gradients)
            weights = torch.randn(reference.shape, generator=_draw(device, 1), device=device)
            expected = torch.autograd.grad(reference, exact, weights.to(reference.dtype))
            try:
                given = torch.autograd.grad(out, inputs, weights.to(out.dtype), allow_unused=True)
            except Exception as error:
                fault = f"its backward pass does not run: {named_line(error)}"
                backward_fault = backward_fault or fault
                continue
            errors = dict(zip(NAMES, map(relative_error, given, expected), strict=False))
            gradients = {name: max(gradients.get(name, 0.0), e) for name, e in errors.items()}
            wrong = [f"{n} by {_percent(e)}" for n, e in errors.items() if not e <= 2 * limit]
            if wrong and not backward_fault:
                backward_fault = f"gradient off: {', '.join(wrong)} ({case.name})"
    return Trial("", backward_fault, worst, gradients)


@dataclass(frozen=True, slots=True)
class _Case:
    """One attention pattern.

    Attributes:
        mask_function: as in transformers.
        allowed: [T, T] bool, the same written out.
        arguments: those that a decoder layer passes in addition to the mask.
    """

    name: str
    mask_function: Any
    allowed: torch.Tensor
    arguments: dict[str, Any]


def _cases(geometry: Geometry, device: torch.device) -> Iterator[_Case]:
    from transformers.masking_utils import (
        and_masks,
        causal_mask_function,
        packed_sequence_mask_function,
        sliding_window_causal_mask_function,
    )

    rows = torch.arange(TOKENS, device=device)
    causal = rows[:, None] >= rows
    plain = {"position_ids": rows[None], "sliding_window": None}
    yield _Case("full attention", causal_mask_function, causal, plain)
    if geometry.window:
        near = causal & (rows[:, None] - rows < WINDOW)
        windowed = {**plain, "sliding_window": WINDOW}
        mask_function = sliding_window_causal_mask_function(WINDOW)
        yield _Case("a sliding window", mask_function, near, windowed)
    border = TOKENS * 2 // 5
    document = (rows >= border).long()
    own = causal & (document[:, None] == document)
    packed = {**plain, "position_ids": (rows - border * document)[None]}
    mask_function = and_masks(causal_mask_function, packed_sequence_mask_function(document[None]))
    yield _Case("two documents in a row", mask_function, own, packed)


def _inputs(geometry: Geometry, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    draw = _draw(device, 0)
    shapes: list[tuple[int, ...]] = [
        (1, geometry.heads, TOKENS, geometry.size),
        (1, geometry.kv_heads, TOKENS, geometry.size),
        (1, geometry.kv_heads, TOKENS, geometry.value_size),
    ]
    tensors = [torch.randn(shape, generator=draw, device=device) for shape in shapes]
    if geometry.sinks:  # near the log-sum-exp of the scores: a large share of the softmax
        tensors.append(torch.randn(geometry.heads, generator=draw, device=device) + 4)
    return [x.to(dtype).requires_grad_() for x in tensors]


def _draw(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def definition(
    inputs: Sequence[torch.Tensor],
    allowed: torch.Tensor,
    scaling: float | None = None,
    *,
    softmax: torch.dtype | None = None,
    neighbours: bool = True,
) -> torch.Tensor:
    """[B, T, H, Dv] attention by its definition: softmax over scores and sink, times the values.

    With s = scaling · q·k over the keys that the query may attend to and z the head's sink, the
    output is Σ exp(s_j) v_j / (exp(z) + Σ exp(s_j)) (transformers' gpt-oss, eager).

    Args:
        inputs: query [B, H, T, D], key [B, Hkv, S, D], value [B, Hkv, S, Dv], and sinks [H] or not.
        allowed: [T, S] or [B, 1, T, S], True where a query may attend.
        softmax: its dtype; None: that of the inputs.
        neighbours: query heads that share a key head are neighbours; False (a fault): in turn.
    """
    query, key, value, *sinks = inputs
    heads = query.shape[1]
    share = heads // key.shape[1]
    key, value = (
        x.repeat_interleave(share, 1) if neighbours else x.repeat(1, share, 1, 1)
        for x in (key, value)
    )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~allowed, -torch.inf)
    if sinks:
        column = sinks[0].to(scores.dtype).view(1, heads, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1, dtype=softmax)[..., : value.shape[2]]
    return (weights.to(value.dtype) @ value).transpose(1, 2)


def relative_error(result: torch.Tensor | None, reference: torch.Tensor) -> float:
    """Return ``|result - reference| / |reference|`` in the 2-norm; inf if ``result`` is not finite.

    1.0 for None: a gradient that does not arrive.
    """
    if result is None:
        return 1.0
    reference = reference.detach().double()
    gap, size = (result.detach().double() - reference).norm(), reference.norm()
    if not torch.isfinite(gap):
        return float("inf")
    return float(gap / size) if size > 0 else float(gap)


def _layer(
    geometry: Geometry, implementation: str, inputs: list[torch.Tensor], dtype: torch.dtype
) -> torch.nn.Module:
    """Return a stand-in for the attention layer, with the attributes that kernels read."""
    layer: Any = torch.nn.Module()
    layer.config = SimpleNamespace(_attn_implementation=implementation, dtype=dtype)
    layer.layer_idx, layer.is_causal = 0, True
    layer.num_key_value_groups = geometry.heads // geometry.kv_heads
    layer.head_dim, layer.scaling = geometry.size, geometry.scaling
    layer.sinks = inputs[3] if geometry.sinks else None
    return layer  # type: ignore[no-any-return]


def _call(
    function: Callable[..., Any],
    layer: Any,
    inputs: list[torch.Tensor],
    case: _Case,
    geometry: Geometry,
    dtype: torch.dtype,
) -> torch.Tensor:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    mask = None
    if layer.config._attn_implementation in ALL_MASK_ATTENTION_FUNCTIONS:
        mask = ALL_MASK_ATTENTION_FUNCTIONS[layer.config._attn_implementation](
            batch_size=1,
            q_length=TOKENS,
            kv_length=TOKENS,
            mask_function=case.mask_function,
            allow_is_causal_skip=False,
            local_size=case.arguments["sliding_window"],
            dtype=dtype,
            device=inputs[0].device,
            config=layer.config,
        )
    scale = geometry.size**-0.5 if geometry.scaling is None else geometry.scaling
    extra = {"s_aux": layer.sinks} if geometry.sinks else {}
    out: torch.Tensor = function(
        layer, *inputs[:3], mask, dropout=0.0, scaling=scale, **case.arguments, **extra
    )[0]
    expected = (1, TOKENS, geometry.heads, geometry.value_size)
    if out.shape != expected:
        raise ValueError(f"it returns {tuple(out.shape)}, not [B, T, H, Dv] = {expected}")
    return out


def _percent(error: float) -> str:
    return f"{100 * error:.3g} %"
