"""vLLM's private names that differ between versions 0.22 and 0.33: what stands where.

Every function degrades: where a version lacks a name the caller gets nothing, and the measurement
that needs it is reported as not tested. Runs in vLLM's worker process.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

from mismatch.types import Ints

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
# Modules whose ``select_experts`` vLLM's CPU kernels call themselves. These kernels choose their
# experts without the router (up to 0.28), so a capture function of the router sees nothing there.
CPU_CHOOSERS = (
    "vllm.model_executor.layers.fused_moe.cpu_fused_moe",  # 0.22 to 0.26
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe",  # 0.27 to 0.30
)


def moe_layers(model: Any) -> list[tuple[int, Any]]:
    """Return (decoder layer, module with its router) of every MoE layer, in order.

    A module is known by a router that can be watched, not by its class: that is ``FusedMoE`` in
    vLLM 0.22 and ``MoERunner`` from 0.24 on.
    """
    layers: dict[int, Any] = {}
    for name, module in model.named_modules():
        router = getattr(module, "router", None)
        match = LAYER.search(getattr(module, "layer_name", None) or name)
        if match and callable(getattr(router, "set_capture_fn", None)):
            layers.setdefault(int(match[1]), module)
    return sorted(layers.items())


def kernel_of(moe: Any) -> str:
    """Return the name of the class or function that computes a MoE layer's experts."""
    experts = getattr(moe, "routed_experts", moe)  # the layer itself in 0.22
    method = getattr(experts, "quant_method", None)
    kernel = getattr(method, "moe_kernel", None)
    chosen = getattr(kernel, "fused_experts", None) or getattr(method, "cpu_fused_moe", None)
    return type(method if chosen is None else chosen).__name__


def serve_float32_sinks() -> None:
    """Have CPU attention before vLLM 0.31 serve a float32 model's sinks, which it takes in bf16.

    Only sinks that bf16 holds exactly are cast, as those of a bf16 checkpoint are.
    """
    try:
        home: Any = importlib.import_module("vllm.v1.attention.backends.cpu_attn")
        attention = home.CPUAttentionBackendImpl
        release = importlib.import_module("vllm").__version_tuple__[:2]
    except (ImportError, AttributeError):
        return
    if release >= (0, 31) or getattr(attention.forward, "casts_sinks", False):
        return
    forward = attention.forward

    def cast_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        sinks = getattr(self, "sinks", None)
        if sinks is not None and sinks.dtype.itemsize == 4:
            rounded = sinks.bfloat16()
            if (rounded.float() == sinks).all():
                self.sinks = rounded
        return forward(self, *args, **kwargs)

    cast_first.casts_sinks = True  # type: ignore[attr-defined]
    attention.forward = cast_first


def number_of_experts(router: Any) -> int:
    """Return the experts that a router chooses from; the most that 16 bits hold if it is unsaid."""
    return int(getattr(router, "global_num_experts", 0) or 1 << 16)


def renamed(model: Any, checkpoint_names: list[str]) -> dict[str, str]:
    """Return vLLM's name, as if nothing were fused -> checkpoint name, of what its loader renames.

    ``apply_list`` is public in every version; before 0.26 fusing is not part of the mapper.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return {}
    if any(field.name == "orig_to_new_stacked" for field in fields(mapper)):
        mapper = replace(mapper, orig_to_new_stacked={})
    return {new: name for name in checkpoint_names for new in mapper.apply_list([name]) if new}


class RouteWatch:
    """Calls a function with the experts that every MoE layer chooses, until :meth:`close`.

    Args:
        layers: as :func:`moe_layers` returns them.
        seen: gets the layer and its expert ids [tokens, k], an integer tensor.
    """

    def __init__(self, layers: list[tuple[int, Any]], seen: Callable[[int, Any], None]) -> None:
        self.at_work: int | None = None
        self.seen = seen
        self._undo: list[Callable[[], object]] = []
        for layer, module in layers:
            module.router.set_capture_fn(partial(seen, layer))
            self._undo.append(partial(module.router.set_capture_fn, None))
            self._undo.append(module.register_forward_pre_hook(partial(self._enter, layer)).remove)
        for name in CPU_CHOOSERS:
            try:
                home: Any = importlib.import_module(name)
                choose = home.select_experts
            except (ImportError, AttributeError):
                continue  # this version's kernels ask the router
            home.select_experts = partial(self._chosen, choose)
            self._undo.append(partial(setattr, home, "select_experts", choose))

    def close(self) -> None:
        """Stop watching; vLLM is as it was."""
        while self._undo:
            self._undo.pop()()

    def _enter(self, layer: int, *_: Any) -> None:
        self.at_work = layer

    def _chosen(self, choose: Callable[..., tuple[Any, Ints]], *args: Any, **kwargs: Any) -> Any:
        weights, ids = choose(*args, **kwargs)
        if self.at_work is not None:
            self.seen(self.at_work, ids)
        return weights, ids
