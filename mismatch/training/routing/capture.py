"""Capture of routed experts: ids, weights and margin of every token in every MoE layer.

Two facts hold across nearly all of transformers' MoE families: the block calls ``experts(hidden,
ids, weights)`` with the router's decision, and the router selects with ``torch.topk`` over rows of
E scores (the last of these calls, where groups of experts are scored first). The first gives the
ids and weights that were really used, in the router's slot order and after the family's own softmax
and scaling; the second gives the scores that were compared, hence the margin. So no list of router
classes is needed, and their output formats do not matter. The exceptions are ``SPECIAL_FAMILIES``;
tools/moe_families.py tries every family and writes docs/evidence/moe-families.md. Replay
(:mod:`mismatch.training.routing.replay`) replaces the result of the same ``torch.topk``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mismatch.errors import CorruptCapture, MismatchError

LAYER = re.compile(r"(?:^|\.)(?:layers|blocks)\.(\d+)\.")
COUNTS = ("num_experts", "total_experts", "num_router_classes")
CAPTURE_FIX = "run without routing: --no-routing"


@dataclass(frozen=True, slots=True)
class TopkChoice:
    """The result of a router's own top-k.

    Attributes:
        ids: [R, K] as the top-k returned them.
        margin: [R] K-th minus (K+1)-th score; None where it is not finite.
    """

    ids: torch.Tensor
    margin: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerRoutes:
    """The routing of one layer in one forward pass over R rows (padding included).

    Attributes:
        ids: [R, K] int64, in the router's slot order.
        weights: [R, K] float32.
        margin: [R] float32, K-th minus (K+1)-th selection score; None if no top-k was seen.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    margin: torch.Tensor | None

    @property
    def by_row(self) -> LayerRoutes:
        """In these shapes and dtypes, from whatever shapes a module shows."""
        ids = self.ids.detach().reshape(-1, self.ids.shape[-1])
        return LayerRoutes(ids, self.weights.detach().reshape(ids.shape).float(), self.margin)


# (tensor arguments of the module, its output, the last top-k over its experts) -> routes
Reader = Callable[[list[torch.Tensor], Any, TopkChoice | None], LayerRoutes | None]


@dataclass(frozen=True, slots=True)
class Family:
    """How to read the routing of one family.

    Attributes:
        module: suffix of the names of the modules to hook, one per MoE layer.
        reads_output: hook after the module's forward, not before it.
        extra_choices: choices of the router that are no experts of the module (skipping it).
        note: for the docs, one sentence.
    """

    read: Reader
    module: str = ".experts"
    reads_output: bool = False
    extra_choices: int = 0
    note: str = ""


def margin(scores: torch.Tensor, k: int) -> torch.Tensor | None:
    """[R] gap between the K-th and (K+1)-th score; None where it is not finite or K is all."""
    if scores.shape[-1] <= k:
        return None
    with torch.no_grad():
        best = torch.topk(scores.detach().float(), k + 1, dim=-1).values
        gap = (best[..., k - 1] - best[..., k]).reshape(-1)
    return gap if bool(torch.isfinite(gap).all()) else None


def experts_call(
    inputs: list[torch.Tensor], output: Any, choice: TopkChoice | None
) -> LayerRoutes | None:
    """``experts(hidden, ids, weights)``; the margin is that of the last top-k with these ids."""
    ids = [tensor for tensor in inputs if tensor.dtype in (torch.int64, torch.int32)]
    weights = [t for t in inputs[1:] if ids and t.is_floating_point() and t.shape == ids[0].shape]
    if len(ids) != 1 or len(weights) != 1:
        return None
    gap = None
    if choice is not None:
        chosen, used = (x.reshape(-1, x.shape[-1]).sort(-1).values for x in (choice.ids, ids[0]))
        if chosen.shape == used.shape and torch.equal(chosen.to(used.dtype), used):
            gap = choice.margin
    return LayerRoutes(ids[0], weights[0], gap)


def _llama4(
    inputs: list[torch.Tensor], output: Any, choice: TopkChoice | None
) -> LayerRoutes | None:
    scores, _ = output
    if choice is None:
        return None
    return LayerRoutes(choice.ids, scores.gather(-1, choice.ids), choice.margin)


def _phimoe(inputs: list[torch.Tensor], output: Any, choice: TopkChoice | None) -> LayerRoutes:
    logits, weights, ids = output
    return LayerRoutes(ids, weights, margin(logits, ids.shape[-1]))


def _zaya(inputs: list[torch.Tensor], output: Any, choice: TopkChoice | None) -> LayerRoutes | None:
    routes = experts_call(inputs, output, None)
    if routes is None or choice is None:
        return None
    return LayerRoutes(choice.ids.reshape(routes.ids.shape), routes.weights, choice.margin)


def _jetmoe(inputs: list[torch.Tensor], output: Any, choice: TopkChoice | None) -> LayerRoutes:
    # Sorted by expert: undo it to have the slots of every token.
    order, _, gates, sizes, logits = output
    rows = logits.shape[0]
    counts = torch.tensor(sizes, device=order.device)
    experts = torch.arange(len(sizes), device=order.device).repeat_interleave(counts)
    ids, weights = torch.empty_like(order), torch.empty_like(gates)
    ids[order], weights[order] = experts, gates
    ids, weights = ids.reshape(rows, -1), weights.reshape(rows, -1)
    return LayerRoutes(ids, weights, margin(logits, ids.shape[-1]))


DEFAULT_FAMILY = Family(experts_call)
SPECIAL_FAMILIES: dict[str, Family] = {
    "llama4_text": Family(
        _llama4,
        ".router",
        reads_output=True,
        note="every expert runs on every token; read at its router",
    ),
    "phimoe": Family(
        _phimoe,
        ".router",
        reads_output=True,
        note="picks by repeated maxima, not by top-k; read at its router",
    ),
    "jetmoe": Family(
        _jetmoe,
        ".mlp.router",
        reads_output=True,
        note="the attention's own experts are not read: one set of experts per layer",
    ),
    "zaya": Family(
        _zaya,
        extra_choices=1,
        note="the router may choose to skip the experts: counted as one more expert",
    ),
    "longcat_flash": Family(
        experts_call, note="zero-computation experts count as experts, after the others"
    ),
    "deepseek_v4": Family(
        experts_call, note="the first layers route by token id: no margin, nothing to replay"
    ),
}


def family_of(config: Any) -> Family:
    """Return the family of a model, from its (text) configuration."""
    return SPECIAL_FAMILIES.get(config.get_text_config().model_type, DEFAULT_FAMILY)


# (torch's function, its arguments by place and by name) -> the result of the call
Override = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class Overriding(TorchFunctionMode):
    """While it is entered, a function is called in place of torch's own."""

    def __init__(self, override: Override) -> None:
        super().__init__()
        self.override = override

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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


def moe_layers(decoder: torch.nn.Module) -> list[MoeLayer]:
    """Return the MoE layers of a decoder, in order; empty for a dense model."""
    config = getattr(decoder, "config", None)
    family = DEFAULT_FAMILY if config is None else family_of(config)
    layers = []
    for name, module in decoder.named_modules():
        match = LAYER.search(name)
        if match and name.endswith(family.module):
            counts = (getattr(module, attribute, None) for attribute in COUNTS)
            count = next((count for count in counts if isinstance(count, int)), None)
            if count is not None:
                experts = count + family.extra_choices
                layers.append(MoeLayer(int(match.group(1)), module, experts, family))
    return sorted(layers, key=lambda layer: layer.index)


class RouteRecorder:
    """The routes of one forward pass; use it through :func:`recording`."""

    def __init__(self, layers: list[MoeLayer]) -> None:
        self.layers = layers
        self.routes: dict[int, LayerRoutes] = {}
        self._counts = {layer.num_experts for layer in layers}
        self._choice: TopkChoice | None = None

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call one of torch's functions, and keep the choice of a top-k over experts."""
        out = func(*args, **kwargs)
        if func in (torch.topk, torch.Tensor.topk):
            scores = args[0] if args else kwargs["input"]
            k = out.indices.shape[-1]
            if scores.shape[-1] in self._counts and k < scores.shape[-1]:
                self._choice = TopkChoice(out.indices.detach(), margin(scores, k))
        return out

    def hook(self, layer: MoeLayer) -> Any:
        """Read the routes whenever the layer's module runs."""

        def read(module: torch.nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
            values = (*args, *kwargs.values())
            inputs = [value for value in values if isinstance(value, torch.Tensor)]
            observed, self._choice = layer.family.read(inputs, output, self._choice), None
            if observed is not None:
                self.routes[layer.index] = observed.by_row

        experts: Any = layer.experts
        if layer.family.reads_output:
            return experts.register_forward_hook(read, with_kwargs=True)
        return experts.register_forward_pre_hook(read, with_kwargs=True)

    def finished(self) -> list[LayerRoutes]:
        """Return the routes of all layers, in order.

        Raises:
            CorruptCapture: a layer's experts never ran, or ran in a way that shows no ids.
        """
        missing = [layer.index for layer in self.layers if layer.index not in self.routes]
        if missing:
            fault = f"the experts of layer {missing[0]} were not seen to run"
            raise CorruptCapture(fault, f"this family's routing cannot be captured; {CAPTURE_FIX}")
        return [self.routes[layer.index] for layer in self.layers]


@contextmanager
def recording(layers: list[MoeLayer]) -> Iterator[RouteRecorder]:
    """Record the routes of the forward pass inside the block."""
    recorder = RouteRecorder(layers)
    token = _current.set(recorder)
    handles = [recorder.hook(layer) for layer in layers]
    try:
        with Overriding(recorder.watch):
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


def why_unreadable(config: Any, decoder: torch.nn.Module) -> str | None:
    """Why the routing of a model cannot be captured; None where it can, or where there is none.

    Args:
        decoder: may be on the meta device; only module names are read.
    """
    text = config.get_text_config()
    if text.model_type == "doge" and text.is_moe:
        return "doge mixes the router scores of all tokens: a single token has no routing"
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
