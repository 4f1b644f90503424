"""Faults planted in vLLM's weights and kernels after loading: ``PLANTED_FAULT=NAME:STRENGTH``.

A plugin of vLLM (entry-point group vllm.general_plugins), put on the path by
benchmarks/calibration.py. The files on disk, and so the trainer, stay right.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import MethodType
from typing import Any

LAYER = 1


def register() -> None:
    """Plant the fault: vLLM calls this in every process."""
    name, _, strength = os.environ.get("PLANTED_FAULT", "").partition(":")
    if not name:
        return
    from vllm.model_executor.model_loader import base_loader

    loader: Any = base_loader
    finish = loader.process_weights_after_loading

    def planted(model: Any, *rest: Any) -> None:
        FAULTS[name](model, float(strength))
        finish(model, *rest)

    loader.process_weights_after_loading = planted


def layer_noise(model: Any, strength: float) -> None:
    """Every matrix of one layer, multiplied by 1 + strength x noise."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.named_parameters():
        if f".{LAYER}." in name and tensor.ndim > 1:
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.data.copy_(tensor.float() * (1 + strength * noise))


def swapped_experts(model: Any, strength: float) -> None:
    """Exchange the first two experts of one layer, and not in their router."""
    for name, tensor in model.named_parameters():
        if f".{LAYER}." in name and ".experts" in name:
            tensor.data[:2] = tensor.data[:2].flip(0).clone()


def epsilon(model: Any, strength: float) -> None:
    """Multiply the epsilon of every norm by the strength."""
    for module in _modules(model, "RMSNorm"):
        module.variance_epsilon *= strength


def narrow_norms(model: Any, strength: float) -> None:
    """Norms whose variance and product are in the dtype of what enters; the strength is unused."""
    import torch

    def forward(self: Any, x: Any, residual: Any = None) -> Any:
        if residual is not None:
            x = residual = x + residual
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        out = x * scale * self.weight
        return out if residual is None else (out, residual)

    for module in _modules(model, "RMSNorm"):
        module.forward = forward.__get__(module)


def rope(model: Any, strength: float) -> None:
    """Rotations of positions that are stretched by the strength."""
    import torch

    seen = set()
    for module in model.modules():
        cache = getattr(module, "cos_sin_cache", None)
        if cache is None or id(module) in seen:
            continue
        seen.add(id(module))
        places = (torch.arange(len(cache)) * strength).round().long().clamp(max=len(cache) - 1)
        cache.copy_(cache[places].clone())


def rope_beyond(model: Any, strength: float) -> None:
    """Keep rotations constant from the position that the strength names."""
    import torch

    seen = set()
    for module in model.modules():
        cache = getattr(module, "cos_sin_cache", None)
        if cache is None or id(module) in seen:
            continue
        seen.add(id(module))
        places = torch.arange(len(cache)).clamp(max=int(strength))
        cache.copy_(cache[places].clone())


def yarn_factor(model: Any, strength: float) -> None:
    """Lose a part of the factor on cosine and sine: 1 takes out all of it."""
    seen = set()
    for module in model.modules():
        cache = getattr(module, "cos_sin_cache", None)
        if cache is None or id(module) in seen:
            continue
        seen.add(id(module))
        cache.copy_((cache.float() / float(cache[0, 0]) ** strength).to(cache.dtype))


def softcap(model: Any, strength: float) -> None:
    """Logits capped at the strength, which the model does not ask for."""
    for module in _modules(model, "LogitsProcessor"):
        module.soft_cap = strength


def head_noise(model: Any, strength: float) -> None:
    """Multiply the language-model head alone by 1 + strength x noise."""
    import torch

    weight = model.lm_head.weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    weight.data.copy_(weight.float() * (1 + strength * noise))


def query_scale(model: Any, strength: float) -> None:
    """Multiply the query projection of one layer by the strength: an adapter of a wrong scale."""
    for name, tensor in model.named_parameters():
        if f".{LAYER}." in name and "qkv_proj" in name:
            tensor.data[: tensor.shape[0] // 2].mul_(strength)


def cache_collision(model: Any, strength: float) -> None:
    """Blocks of the prefix cache are known by their place alone: a prompt reads another's."""
    from vllm.v1.core import kv_cache_utils

    cache: Any = kv_cache_utils
    right = kv_cache_utils.hash_block_tokens

    def hash_block_tokens(function: Any, parent: Any, ids: Any, extra: Any = None) -> Any:
        return right(function, parent, (0,) * len(ids), extra)

    cache.hash_block_tokens = hash_block_tokens


def sampler_temperature(model: Any, strength: float) -> None:
    """Draw tokens at another temperature than the one that log-probabilities are reported at."""
    _drawn(lambda logits, metadata: logits.div_(strength))


def late_end(model: Any, strength: float) -> None:
    """Lower the logits of end tokens by the strength, nats, where tokens are drawn alone."""
    ends = model.config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]

    def lower(logits: Any, metadata: Any) -> None:
        logits[:, ends] -= strength

    _drawn(lower)


def _drawn(change: Any) -> None:
    """Change the logits that tokens are drawn with, and not those that are reported."""
    from vllm.v1.sample.sampler import Sampler

    given: Any = Sampler.sample

    def sample(self: Any, logits: Any, metadata: Any, *rest: Any, **named: Any) -> Any:
        logits = logits.clone()
        change(logits, metadata)
        return given(self, logits, metadata, *rest, **named)

    planted: Any = Sampler
    planted.sample = sample


def sampler_top_k(model: Any, strength: float) -> None:
    """Draw among the likeliest tokens alone, as many as the strength."""

    def cut(logits: Any, metadata: Any) -> None:
        least = logits.topk(int(strength)).values[:, -1:]
        logits.masked_fill_(logits < least, -float("inf"))

    _drawn(cut)


def sampler_top_p(model: Any, strength: float) -> None:
    """Draw among the likeliest tokens of this mass alone."""

    def cut(logits: Any, metadata: Any) -> None:
        ordered, places = logits.softmax(-1).sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= strength
        logits.masked_fill_(beyond.scatter(1, places, beyond), -float("inf"))

    _drawn(cut)


def _penalised(penalty: float) -> None:
    """Give every request vLLM's own repetition penalty, whatever was asked for."""
    from vllm.v1.worker.gpu_input_batch import InputBatch

    given: Any = InputBatch.add_request

    def add_request(self: Any, request: Any) -> Any:
        request.sampling_params.repetition_penalty = penalty
        return given(self, request)

    planted: Any = InputBatch
    planted.add_request = add_request


def repetition_penalty(model: Any, strength: float) -> None:
    """Draw under a repetition penalty that nobody declared."""
    _penalised(strength)


def forced_prefix(model: Any, strength: float) -> None:
    """Begin every response with the likeliest tokens of the first, as many as the strength."""
    _penalised(1.0000001)  # else a sampler does not hear what was drawn
    chosen: dict[int, int] = {}

    def force(logits: Any, metadata: Any) -> None:
        for row, held in enumerate(metadata.output_token_ids):
            if len(held) < strength:
                token = chosen.setdefault(len(held), int(logits[row].argmax()))
                logits[row, :token] = logits[row, token + 1 :] = -float("inf")

    _drawn(force)


def decoded_rows(model: Any, strength: float) -> None:
    """Report other log-probabilities while decoding: DECODED="ROWS:STEPS:NATS" of each 4 rows."""
    from vllm.v1.sample.sampler import Sampler

    rows, steps, nats = (float(part) for part in os.environ["DECODED"].split(":"))
    given: Any = Sampler.gather_logprobs
    seen = {"steps": 0}

    def gather_logprobs(logprobs: Any, *rest: Any, **named: Any) -> Any:
        out = given(logprobs, *rest, **named)
        if len(out.logprobs) >= 4 * rows:  # of a batch that decodes
            seen["steps"] += 1
            if strength <= seen["steps"] < strength + steps:
                out.logprobs[: 4 * int(rows) : 4] -= nats
        return out

    planted: Any = Sampler
    planted.gather_logprobs = staticmethod(gather_logprobs)


def head_off(model: Any, strength: float) -> None:
    """Let a head of layer 1 give nothing where a decoded position is a multiple of the strength."""
    held: dict[str, Any] = {}

    def before(module: Any, args: Any, kwargs: Any) -> None:
        held["places"] = kwargs.get("positions", args[-1] if args else None)

    def among(module: Any, args: Any) -> Any:
        at, (values, *rest) = held["places"], args
        prefill = len(at) > 1 and bool(((at[1:] - at[:-1]) == 1).float().mean() > 0.5)
        off = (at % int(strength) == 0) & (not prefill)
        values[off, :32] = 0
        return values, *rest

    for name, module in model.named_modules():
        if name.endswith((f"layers.{LAYER}.self_attn", f"layers.{LAYER}.attn")):
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.o_proj.register_forward_pre_hook(among)


def no_sinks(model: Any, strength: float) -> None:
    """Sinks lowered by the strength, nats: 30 takes them out."""
    for name, tensor in model.named_parameters():
        if name.endswith("sinks"):
            tensor.data.sub_(strength)


def norm_behind_rope(model: Any, strength: float) -> None:
    """Rotate queries and keys of qwen3 first and normalise them then; the strength is unused."""

    def forward(self: Any, positions: Any, hidden_states: Any) -> Any:
        sizes = [self.q_size, self.kv_size, self.kv_size]
        q, k, v = self.qkv_proj(hidden_states)[0].split(sizes, dim=-1)
        q, k = self.rotary_emb(positions, q.contiguous(), k.contiguous())
        q = self.q_norm(q.reshape(*q.shape[:-1], -1, self.head_dim)).reshape(q.shape)
        k = self.k_norm(k.reshape(*k.shape[:-1], -1, self.head_dim)).reshape(k.shape)
        return self.o_proj(self.attn(q, k, v))[0]

    for module in _modules(model, "Qwen3Attention"):
        module.forward = MethodType(forward, module)


def exact_gelu(model: Any, strength: float) -> None:
    """Take the exact GELU in gated MLPs, whatever config.json says; the strength is unused."""
    from torch.nn.functional import gelu

    def forward(x: Any) -> Any:
        half = x.shape[-1] // 2
        return gelu(x[..., :half]) * x[..., half:]

    for module in _modules(model, "GeluAndMul"):
        module.forward = forward


def no_shared_gate(model: Any, strength: float) -> None:
    """Add qwen2_moe's shared expert without its gate; the strength is unused."""
    for module in _modules(model, "Qwen2MoeMLP"):
        module.expert_gate = None


def adapter_scale(model: Any, strength: float) -> None:
    """Scale LoRA adapters, which are loaded later, by alpha / rank times the strength."""
    from vllm.lora import peft_helper

    planted: Any = peft_helper.PEFTHelper
    planted._scaling = lambda self, rank, alpha: alpha / rank * strength


def _modules(model: Any, kind: str) -> Iterator[Any]:
    return (module for module in model.modules() if type(module).__name__ == kind)


FAULTS = {
    "layer-noise": layer_noise,
    "swapped-experts": swapped_experts,
    "epsilon": epsilon,
    "rope": rope,
    "narrow-norms": narrow_norms,
    "rope-beyond": rope_beyond,
    "no-sinks": no_sinks,
    "yarn-factor": yarn_factor,
    "softcap": softcap,
    "head-noise": head_noise,
    "query-scale": query_scale,
    "cache-collision": cache_collision,
    "sampler-temperature": sampler_temperature,
    "late-end": late_end,
    "sampler-top-k": sampler_top_k,
    "sampler-top-p": sampler_top_p,
    "repetition-penalty": repetition_penalty,
    "forced-prefix": forced_prefix,
    "decoded-rows": decoded_rows,
    "head-off": head_off,
    "norm-behind-rope": norm_behind_rope,
    "exact-gelu": exact_gelu,
    "no-shared-gate": no_shared_gate,
    "adapter-scale": adapter_scale,
}
