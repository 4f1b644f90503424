"""A worker of ``mismatch locate`` with a fault planted in a loaded model.

The environment variable ``MISMATCH_PLANT`` names it, ``SIDE:FAULT``. Everything else is the
product's worker: the fault sits in the modules that are recorded, not in what is recorded.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

LAYER = 1  # where one layer is at fault


def local(parameter: Any) -> torch.Tensor:
    """Return the storage of a parameter, sharded over one rank or not."""
    held: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return held.data


# ---------------------------------------------------------------- the trainer's model


def trainer_rope(decoder: Any) -> None:
    """One layer's rope has another theta."""
    other = copy.deepcopy(decoder.rotary_emb)
    count = other.inv_freq.numel()
    other.inv_freq.mul_(4.0 ** -(torch.arange(count) / count))

    def hook(module: Any, args: Any, kwargs: Any) -> Any:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        positions = torch.arange(hidden.shape[1])[None]
        return args, kwargs | {"position_embeddings": other(hidden, positions)}

    decoder.layers[LAYER].self_attn.register_forward_pre_hook(hook, with_kwargs=True)


def trainer_clamp(decoder: Any) -> None:
    """Experts clamp at another limit."""
    for layer in decoder.layers:
        layer.mlp.experts.limit = 0.5


def trainer_router_bf16(decoder: Any) -> None:
    """Routers multiply values that were rounded to bf16."""
    for layer in decoder.layers:
        router = getattr(layer.mlp, "router", None) or layer.mlp.gate
        held = local(router.weight)
        held.copy_(held.bfloat16().to(held.dtype))
        router.register_forward_pre_hook(
            lambda module, args: tuple(x.bfloat16().to(x.dtype) for x in args)
        )


# ---------------------------------------------------------------- vLLM's model


def engine_layer(model: Any) -> Any:
    """Return the attention of one layer."""
    layer = model.model.layers[LAYER]
    return getattr(layer, "self_attn", None) or layer.attn


def engine_rope(model: Any) -> None:
    """One layer's rope turns by other angles."""
    attention = engine_layer(model)
    rope = copy.deepcopy(attention.rotary_emb)
    cache: torch.Tensor = rope.cos_sin_cache
    rope.cos_sin_cache = cache[(torch.arange(len(cache)) * 0.9).long()].clone()
    attention.rotary_emb = rope


def engine_window(model: Any) -> None:
    """Layers with a sliding window see one key less."""
    for layer in model.model.layers:
        attention = getattr(layer, "self_attn", None) or layer.attn
        implementation = attention.attn.impl
        if implementation.sliding_window > 1:
            implementation.sliding_window -= 1


def engine_sinks(model: Any) -> None:
    """Attention ignores its sinks."""
    for layer in model.model.layers:
        layer.attn.sinks.data.fill_(-1e4)


def engine_eps(model: Any) -> None:
    """Give the second norm of one layer 100 times the epsilon."""
    model.model.layers[LAYER].post_attention_layernorm.variance_epsilon *= 100


TRAINER: dict[str, Callable[[Any], None]] = {
    "rope": trainer_rope,
    "clamp": trainer_clamp,
    "router-bf16": trainer_router_bf16,
}
ENGINE: dict[str, Callable[[Any], None]] = {
    "rope": engine_rope,
    "window": engine_window,
    "sinks": engine_sinks,
    "eps": engine_eps,
}


def plant() -> None:
    """Wrap the one place where each side's model is ready to be recorded."""
    side, _, fault = os.environ.get("MISMATCH_PLANT", ":").partition(":")
    if side == "trainer":
        from mismatch.features.locate import reference

        place: Any = reference
        load = place.load

        def loaded(spec: Any, *args: Any, **kwargs: Any) -> Any:
            model = load(spec, *args, **kwargs)
            if not spec.attention.startswith("plain"):
                TRAINER[fault](model.scorer.decoder)
            return model

        place.load = loaded
    elif side == "engine":
        from mismatch.features.locate.engine_side import ModuleCapture

        begin: Any = ModuleCapture.watch

        def planted(self: Any, model: nn.Module) -> None:
            ENGINE[fault](model)
            begin(self, model)

        ModuleCapture.watch = planted  # type: ignore[method-assign]


if __name__ == "__main__":
    from mismatch.features.locate.worker import main
    from mismatch.run.messages import exit_worker

    plant()
    exit_worker(main(sys.argv[1:]))
