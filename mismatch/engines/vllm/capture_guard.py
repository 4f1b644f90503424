"""Routed experts that vLLM does not hand out by itself, or refuses to; in vLLM's worker process.

vLLM refuses capture from monolithic MoE kernels, which route within the kernel, once the weights
are loaded. The Triton kernel that runs gpt-oss in MXFP4 on Hopper is one of them; its choice is a
function of the router's logits alone, so that it can be taken from those. Where another kernel
refuses, the engine goes on without routes.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from mismatch.engines.routed_experts import stable_top_k

TRITON_MODULE = "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe"
TRITON_CLASS = "OAITritonMxfp4ExpertsMonolithic"
BINDER_MODULE = "vllm.model_executor.layers.fused_moe.routed_experts_capturer"
BINDER = "bind_routed_experts_capturer"
REFUSED = "mismatch_capture_refused"  # attribute of a model whose routes cannot be captured


def install() -> None:
    """Before a model is built: take what can be taken, and never fail for the rest."""
    take_triton_routes()
    tolerate_refusal()


def take_triton_routes() -> None:
    """Have vLLM's monolithic Triton kernel write the experts that it routes to.

    With ``renormalize`` the kernel takes the top k of the logits themselves; of equal logits the
    lower expert wins (``triton_kernels/topk_details``). Other versions without this class are left
    as they are.
    """
    try:
        kernel: Any = getattr(importlib.import_module(TRITON_MODULE), TRITON_CLASS)
    except (ImportError, AttributeError):
        return
    apply = kernel.apply
    if getattr(apply, "writes_routes", False):
        return

    def apply_and_write(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = kwargs.get("routing_replay_out")
        if out is not None:
            out.copy_(stable_top_k(kwargs["router_logits"], self.topk))
        return apply(self, *args, **kwargs)

    apply_and_write.writes_routes = True  # type: ignore[attr-defined]
    kernel.apply = apply_and_write
    kernel.supports_routing_replay_capture = lambda self: bool(self.renormalize)


def tolerate_refusal() -> None:
    """Where vLLM refuses to capture a model's routes, note why on the model and go on."""
    try:
        bind: Any = getattr(importlib.import_module(BINDER_MODULE), BINDER)
    except (ImportError, AttributeError):
        return
    if getattr(bind, "tolerant", False):
        return

    def bind_or_note(model: Any, *args: Any, **kwargs: Any) -> None:
        try:
            bind(model, *args, **kwargs)
        except ValueError as error:
            setattr(model, REFUSED, str(error))

    bind_or_note.tolerant = True  # type: ignore[attr-defined]
    for module in list(sys.modules.values()):  # those that imported it by name, and its own
        if getattr(module, "__dict__", {}).get(BINDER) is bind:
            setattr(module, BINDER, bind_or_note)
