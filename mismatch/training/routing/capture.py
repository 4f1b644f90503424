"""Capture of routed experts: ids, weights and margin of every token in every MoE layer.

Two facts hold across nearly all of transformers' MoE families: the block calls ``experts(hidden,
ids, weights)`` with the router's decision, and the router selects with ``torch.topk`` over rows of
E scores (the last such call, where groups of experts are scored first). The first gives the ids and
weights that were really used, in the router's slot order and after the family's own softmax and
scaling; the second gives the scores that were compared, hence the margin. So no list of router
classes is needed, and their output formats do not matter. The exceptions are in
:mod:`mismatch.training.routing.families`. Replay replaces the result of the same ``torch.topk``
call (:mod:`mismatch.training.routing.replay`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mismatch.errors import CorruptCapture, MismatchError
from mismatch.training.routing.families import (
    CAPTURE_FIX,
    DEFAULT_FAMILY,
    LAYER,
    Family,
    ObservedRoutes,
    TopkChoice,
    count_experts,
    family_of,
    margin,
)


class OverrideMode(TorchFunctionMode):
    """While it is entered, :meth:`override` is called in place of torch's functions."""

    def override(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of one call; ``func(*args, **kwargs)`` is torch's own."""
        raise NotImplementedError

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.override(func, args, kwargs or {})


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """One MoE layer of a model.

    Attributes:
        index: of the decoder layer.
        experts: the module whose call shows the routing: the experts; in some families the router.
        num_experts: E, including the family's extra choices.
    """

    index: int
    experts: torch.nn.Module
    num_experts: int
    family: Family = DEFAULT_FAMILY


@dataclass(frozen=True, slots=True)
class LayerRoutes:
    """The routing of one layer in one forward pass over R rows (padding included).

    Attributes:
        ids: [R, K] int64.
        weights: [R, K] float32.
        margin: [R] float32, K-th minus (K+1)-th selection score; None if no top-k was seen.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    margin: torch.Tensor | None


def moe_layers(decoder: torch.nn.Module) -> list[MoeLayer]:
    """The MoE layers of a decoder, in order; empty for a dense model."""
    config = getattr(decoder, "config", None)
    family = DEFAULT_FAMILY if config is None else family_of(config)
    layers = []
    for name, module in decoder.named_modules():
        match = LAYER.search(name)
        if match and name.endswith(family.module):
            count = count_experts(module, family)
            if count is not None:
                layers.append(MoeLayer(int(match.group(1)), module, count, family))
    return sorted(layers, key=lambda layer: layer.index)


class RouteRecorder(OverrideMode):
    """Records the routes of one forward pass; use it through :func:`recording`."""

    def __init__(self, layers: list[MoeLayer]) -> None:
        super().__init__()
        self.layers = layers
        self.routes: dict[int, LayerRoutes] = {}
        self._counts = {layer.num_experts for layer in layers}
        self._choice: TopkChoice | None = None

    def override(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if func in (torch.topk, torch.Tensor.topk):
            scores = args[0] if args else kwargs["input"]
            k = out.indices.shape[-1]
            if scores.shape[-1] in self._counts and k < scores.shape[-1]:
                self._choice = TopkChoice(out.indices.detach(), margin(scores, k))
        return out

    def read(self, layer: MoeLayer, inputs: list[torch.Tensor], output: Any) -> None:
        """Called by the hook of a layer's module."""
        observed, self._choice = layer.family.read(inputs, output, self._choice), None
        if observed is not None:
            self.routes[layer.index] = _routes(observed)

    def finished(self) -> list[LayerRoutes]:
        """Routes of all layers, in order.

        Raises:
            CorruptCapture: a layer's experts never ran, or ran in a way that shows no ids.
        """
        missing = [layer.index for layer in self.layers if layer.index not in self.routes]
        if missing:
            raise CorruptCapture(
                f"the experts of layer {missing[0]} were not seen to run",
                f"this family's routing cannot be captured; {CAPTURE_FIX}",
            )
        return [self.routes[layer.index] for layer in self.layers]


@contextmanager
def recording(layers: list[MoeLayer]) -> Iterator[RouteRecorder]:
    """Record the routes of the forward pass inside the block."""
    recorder = RouteRecorder(layers)
    token = _current.set(recorder)
    handles = []
    for layer in layers:
        hook = _after if layer.family.reads_output else _before
        handles.append(hook(recorder, layer))
    try:
        with recorder:
            yield recorder
    finally:
        _current.reset(token)
        for handle in handles:
            handle.remove()


_current: ContextVar[RouteRecorder | None] = ContextVar("recorder", default=None)


def override_recorded_choice(ids: torch.Tensor) -> None:
    """Replace the ids of the last recorded top-k by ``ids`` [R, K], as replay did in the router.

    The margin stays that of the router's own scores.
    """
    recorder = _current.get()
    if recorder is not None and recorder._choice is not None:
        recorder._choice = TopkChoice(ids.detach(), recorder._choice.margin)


def _before(recorder: RouteRecorder, layer: MoeLayer) -> Any:
    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.read(layer, _tensors(args, kwargs), None)

    return layer.experts.register_forward_pre_hook(hook, with_kwargs=True)


def _after(recorder: RouteRecorder, layer: MoeLayer) -> Any:
    def hook(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        recorder.read(layer, _tensors(args, kwargs), output)

    return layer.experts.register_forward_hook(hook, with_kwargs=True)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]


def _routes(observed: ObservedRoutes) -> LayerRoutes:
    ids = observed.ids.detach().reshape(-1, observed.ids.shape[-1])
    weights = observed.weights.detach().reshape(ids.shape).float()
    return LayerRoutes(ids, weights, observed.margin)


def why_unreadable(config: Any, decoder: torch.nn.Module) -> str | None:
    """Why the routing of a model cannot be captured; None where it can, or where there is none.

    Args:
        decoder: may be on the meta device; only module names are read.
    """
    text = config.get_text_config()
    if text.model_type == "doge" and text.is_moe:
        return "doge mixes the router scores of all tokens: a token has no routing of its own"
    for name in ("moe_topk", "num_experts_per_tok", "num_experts"):
        values = getattr(text, name, None)
        if isinstance(values, (list, tuple)) and len(set(values)) > 1:
            return f"{name} differs by layer in {text.model_type}"
    names = [
        name for name, _ in decoder.named_modules() if re.search(r"(?:^|\.)experts(?:\.|$)", name)
    ]
    if names and not moe_layers(decoder):
        return f"the experts of {text.model_type} ({names[0]}) are laid out in an unknown way"
    return None


def require_readable(config: Any, decoder: torch.nn.Module) -> None:
    """Refuse a model whose routing cannot be captured, before its weights load.

    Raises:
        MismatchError: with the reason.
    """
    reason = why_unreadable(config, decoder)
    if reason is not None:
        raise MismatchError(f"routed experts cannot be captured: {reason}", CAPTURE_FIX)
