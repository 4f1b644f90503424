"""Twenty faults for either side, planted in memory: ``PLANTED_SIDE=NAME@PLACE``.

Places: ``engine`` (vLLM alone), ``trainer`` (the passes of the trainer, in float32 too, and not the
reference), ``shared`` (model code: every pass of the training world). Files on disk stay right, so
that only numbers, and digests of what an engine holds, can show the fault.

benchmarks/sides.py puts this file on the path, as a plugin of vLLM (entry-point group
vllm.general_plugins) and, by ``sitecustomize``, in the training world. Weights have the names of
tiny-gpt-oss.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

State = dict[str, torch.Tensor]
LAYER = "model.layers.1."
HEAD = 32  # values of one
EOS = 6


def scaled(by: float, *names: str, row: int | None = None) -> Callable[[State], None]:
    """Multiply tensors, or one row of them, by a number."""

    def edit(state: State) -> None:
        for name in names:
            tensor = state[name]
            (tensor if row is None else tensor[row]).mul_(by)

    return edit


def stale(strength: float) -> Callable[[State], None]:
    """Multiply every matrix by 1 + strength x noise, as an update that did not arrive does."""

    def edit(state: State) -> None:
        for name, tensor in state.items():
            if tensor.ndim > 1:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(tensor.float() * (1 + strength * noise))

    return edit


def in_all_layers(change: Callable[[torch.Tensor], Any], *ends: str) -> Callable[[State], None]:
    """Change every tensor whose name has one of these ends."""

    def edit(state: State) -> None:
        for name, tensor in state.items():
            if name.endswith(ends):
                change(tensor)

    return edit


def exchanged(state: State) -> None:
    """Exchange layers 1 and 3, which have the same kind of attention."""
    for name in [name for name in state if name.startswith(LAYER)]:
        other = name.replace(LAYER, "model.layers.3.")
        kept = state[name].clone()
        state[name].copy_(state[other])
        state[other].copy_(kept)


def permuted(state: State) -> None:
    """Reverse the order of the key and value heads of one layer."""
    for name in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"):
        tensor = state[f"{LAYER}self_attn.{name}"]
        tensor.copy_(torch.cat(tensor.split(HEAD)[::-1]))


def swapped(state: State) -> None:
    """Exchange the first two experts of one layer, and not in their router."""
    for name, tensor in state.items():
        if name.startswith(f"{LAYER}mlp.experts."):
            tensor[:2].copy_(tensor[:2].flip(0).clone())


def raised(state: State) -> None:
    """Raise the router's bias for one expert."""
    state[f"{LAYER}mlp.router.bias"][0] += 0.5


def zeroed_head(state: State) -> None:
    """Leave one head of attention out."""
    state[f"{LAYER}self_attn.o_proj.weight"][:, :HEAD] = 0


WEIGHTS: dict[str, Callable[[State], None]] = {
    "expert-1.1": scaled(1.1, f"{LAYER}mlp.experts.down_proj", row=0),
    "rare-expert-1.02": scaled(1.02, "model.layers.3.mlp.experts.down_proj", row=7),
    "final-norm-1.02": scaled(1.02, "model.norm.weight"),
    "layer-norm-1.02": scaled(1.02, "model.layers.2.post_attention_layernorm.weight"),
    "eos-row-1.1": scaled(1.1, "lm_head.weight", row=EOS),
    "stale-0.1%": stale(0.001),
    "stale-0.5%": stale(0.005),
    "stale-2%": stale(0.02),
    "router-bias": raised,
    "layers-exchanged": exchanged,
    "kv-heads-permuted": permuted,
    "head-zeroed": zeroed_head,
    "k-bias-zeroed": scaled(0.0, f"{LAYER}self_attn.k_proj.bias"),
    "experts-swapped": swapped,
    "attention-scale-1.01": in_all_layers(
        lambda tensor: tensor.mul_(1.01), "q_proj.weight", "q_proj.bias"
    ),
    "sinks-0.5-nats-lower": in_all_layers(lambda tensor: tensor.sub_(0.5), "self_attn.sinks"),
}
FUNCTIONS = ("rope-base+3%", "rope-still-from-256", "yarn-factor-lost", "epsilon-x10")
FAULTS = (*WEIGHTS, *FUNCTIONS)
MLP = "half-mlp-1.05"  # of a model of any family (benchmarks/families.py, smallest.py)
# What "half-PART-FACTOR" makes louder -> ends of the modules' names, on either side.
PARTS = {
    "embedding": ("embed_tokens", "model.embedding"),
    "norm": ("s.1.input_layernorm",),
    "attention": ("s.1.self_attn", "s.1.attn"),
    "mlp": ("h.1.mlp", "s.1.mlp", "s.1.feed_forward", "s.1.block_sparse_moe", "s.1.mixer"),
    "final-norm": ("model.norm",),
}
BEYOND = 256
BASE = 1.03


def register() -> None:
    """Plant the fault in vLLM, which calls this in every process."""
    name, _, place = os.environ.get("PLANTED_SIDE", "").partition("@")
    if place != "engine":
        return
    from vllm.model_executor.model_loader import base_loader, default_loader

    loader: Any = default_loader.DefaultModelLoader
    base: Any = base_loader
    read: Any = loader.get_all_weights
    finish: Any = base.process_weights_after_loading

    def weights(self: Any, *rest: Any) -> Iterator[tuple[str, torch.Tensor]]:
        state = {key: tensor.clone() for key, tensor in read(self, *rest)}
        if name in WEIGHTS:
            WEIGHTS[name](state)
        return iter(state.items())

    def finished(model: Any, *rest: Any) -> None:
        if name.startswith("half-"):
            louder(model, name)
        elif name in FUNCTIONS:
            in_engine(model, name)
        finish(model, *rest)

    loader.get_all_weights = weights
    base.process_weights_after_loading = finished


def in_engine(model: Any, name: str) -> None:
    """Plant a fault of a function in vLLM's modules."""
    if name == "epsilon-x10":
        for module in model.modules():
            if type(module).__name__ == "RMSNorm":
                module.variance_epsilon *= 10
        return
    seen: set[int] = set()
    for module in model.modules():
        cache = getattr(module, "cos_sin_cache", None)
        if cache is None or id(module) in seen:
            continue
        seen.add(id(module))
        if name == "rope-base+3%":
            module.base *= BASE
            cache.copy_(module._compute_cos_sin_cache())
        elif name == "rope-still-from-256":
            cache.copy_(cache[torch.arange(len(cache)).clamp(max=BEYOND)].clone())
        else:
            cache.copy_((cache.float() / float(cache[0, 0])).to(cache.dtype))


def in_trainer(model: Any, name: str) -> None:
    """Plant a fault in transformers' model, which FSDP2 has sharded for one rank."""
    if name in WEIGHTS:
        with torch.no_grad():
            WEIGHTS[name]({key: _local(tensor) for key, tensor in model.named_parameters()})
        return
    if name.startswith("half-"):
        return louder(model, name)
    rotary = model.model.rotary_emb
    if name == "epsilon-x10":
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon *= 10
    elif name == "yarn-factor-lost":
        rotary.attention_scaling = 1.0
    elif name == "rope-still-from-256":
        forward = rotary.forward
        rotary.forward = lambda x, position_ids, *rest, **more: forward(
            x, position_ids.clamp(max=BEYOND), *rest, **more
        )
    else:
        config = model.config
        config.rope_parameters["rope_theta"] *= BASE
        fresh = type(rotary)(config)
        config.rope_parameters["rope_theta"] /= BASE
        rotary.inv_freq.copy_(fresh.inv_freq)


def louder(model: Any, name: str) -> None:
    """Multiply half of the channels that a part of the model gives, on either side.

    A norm behind it would take out a factor on all of them.
    """
    part, factor = name.removeprefix("half-").rsplit("-", 1)
    named = dict(model.named_modules())
    (module,) = [module for name, module in named.items() if name.endswith(PARTS[part])]

    def after(_: Any, __: Any, output: Any) -> Any:
        whole = output[0] if isinstance(output, tuple) else output
        factors = torch.ones(whole.shape[-1], device=whole.device)  # bf16 has no 1.001
        factors[::2] = float(factor)
        changed = (whole * factors).to(whole.dtype)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    module.register_forward_hook(after)


def _local(tensor: Any) -> torch.Tensor:
    """Return what a rank holds: all of it where there is one rank."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def plant_in_world() -> None:
    """Plant the fault in the passes of a training world; for ``sitecustomize``."""
    name, _, place = os.environ.get("PLANTED_SIDE", "").partition("@")
    if place not in ("trainer", "shared"):
        return
    if "mismatch.features.locate.worker" in sys.orig_argv:
        return plant_in_recording(name, place)
    from mismatch.processes.workers.train import Passes

    load: Any = Passes.load

    def loading(self: Any, pass_: Any) -> None:
        wanted = place == "shared" or pass_.name.startswith("fsdp")
        if self.loaded is not None and hasattr(self.loaded.scorer, "planted") != wanted:
            self.loaded = None  # loaded again, right or wrong
        load(self, pass_)
        scorer = self.loaded.scorer
        if wanted and not hasattr(scorer, "planted"):
            in_trainer(scorer.model, name)
            scorer.planted = True

    Passes.load = loading  # type: ignore[method-assign]


def plant_in_recording(name: str, place: str) -> None:
    """Plant the fault where ``mismatch locate`` records the trainer's modules."""
    from mismatch.features.locate import reference

    where: Any = reference
    load = where.load

    def loading(spec: Any, *rest: Any, **more: Any) -> Any:
        loaded = load(spec, *rest, **more)
        if place == "shared" or not spec.attention.startswith("plain"):
            in_trainer(loaded.scorer.model, name)
        return loaded

    where.load = loading
