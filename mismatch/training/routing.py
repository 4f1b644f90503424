"""Which experts every token went to, in every MoE layer, whatever the family.

Two facts hold across transformers' MoE families: the block calls ``experts(hidden, ids, weights)``
with what the router decided, and the router picks with ``torch.topk`` over a row of E scores (the
last such call, where groups of experts are scored first). Reading the first gives the ids and
weights that were really used, in the router's slot order and after the family's own softmax and
scaling; reading the second gives the scores that were compared, hence the margin. No list of router
classes is needed, and their outputs' order, which differs by family, does not matter. To *replay*
experts, the same ``torch.topk`` call is the place to answer with given ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mismatch.errors import CorruptCapture

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """One MoE layer: the model's layer index and its module of experts."""

    index: int
    experts: torch.nn.Module
    num_experts: int


@dataclass(frozen=True, slots=True)
class LayerRoutes:
    """What one layer decided in one forward pass over R rows (padding included).

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
    found = []
    for name, module in decoder.named_modules():
        place = LAYER.search(name)
        count = getattr(module, "num_experts", None)
        if place and name.endswith(".experts") and isinstance(count, int):
            found.append(MoeLayer(int(place.group(1)), module, count))
    return sorted(found, key=lambda layer: layer.index)


class RouteRecorder(TorchFunctionMode):
    """Records the routes of one forward pass; use it through :func:`recording`."""

    def __init__(self, layers: list[MoeLayer]) -> None:
        super().__init__()
        self.layers = layers
        self.routes: dict[int, LayerRoutes] = {}
        self._counts = {layer.num_experts for layer in layers}
        self._choice: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            scores = args[0] if args else (kwargs or {})["input"]
            if scores.shape[-1] in self._counts and out.indices.shape[-1] < scores.shape[-1]:
                self._choice = (out.indices.detach(), _margin(scores, out.indices.shape[-1]))
        return out

    def take(self, layer: MoeLayer, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Called right before the experts of a layer run."""
        ids = ids.detach().reshape(-1, ids.shape[-1])
        margin = None
        if self._choice is not None and _same_sets(self._choice[0], ids):
            margin = self._choice[1]
        self._choice = None
        self.routes[layer.index] = LayerRoutes(
            ids, weights.detach().reshape(ids.shape).float(), margin
        )

    def finished(self) -> list[LayerRoutes]:
        """Routes of all layers, in order.

        Raises:
            CorruptCapture: a layer's experts never ran, or ran in a way that shows no ids.
        """
        missing = [layer.index for layer in self.layers if layer.index not in self.routes]
        if missing:
            raise CorruptCapture(
                f"the experts of layer {missing[0]} were not seen to run",
                "this family's routing cannot be captured: --no-routing",
            )
        return [self.routes[layer.index] for layer in self.layers]


@contextmanager
def recording(layers: list[MoeLayer]) -> Iterator[RouteRecorder]:
    """Record the routes of the forward pass inside the block."""
    recorder = RouteRecorder(layers)
    handles = []
    for layer in layers:
        handles.append(
            layer.experts.register_forward_pre_hook(_hook(recorder, layer), with_kwargs=True)
        )
    try:
        with recorder:
            yield recorder
    finally:
        for handle in handles:
            handle.remove()


def _hook(recorder: RouteRecorder, layer: MoeLayer) -> Any:
    def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        ids = [v for v in given if v.dtype in (torch.int64, torch.int32)]
        weights = [
            v for v in given[1:] if ids and v.is_floating_point() and v.shape == ids[0].shape
        ]
        if len(ids) == 1 and len(weights) == 1:
            recorder.take(layer, ids[0], weights[0])

    return before


def _margin(scores: torch.Tensor, k: int) -> torch.Tensor:
    """[R] gap between the last chosen and the first rejected expert."""
    with torch.no_grad():
        best = torch.topk(scores.detach().float(), k + 1, dim=-1).values
        return (best[..., k - 1] - best[..., k]).reshape(-1)


def _same_sets(chosen: torch.Tensor, used: torch.Tensor) -> bool:
    chosen = chosen.reshape(-1, chosen.shape[-1])
    if chosen.shape != used.shape:
        return False
    return torch.equal(chosen.sort(-1).values.to(used.dtype), used.sort(-1).values)
