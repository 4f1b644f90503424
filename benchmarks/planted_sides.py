"""Faults for either side, planted in memory: ``PLANTED_SIDE=NAME@PLACE``.

Places: ``engine`` (vLLM or transformers), ``trainer`` (the trainer's passes, in float32 too, and
not the reference), ``shared`` (model code: every pass of the training world). Files on disk stay
right, so that only numbers, and digests of what an engine holds, can show the fault.

NAME~SHARE plants a share of the fault: what it changes is multiplied by SHARE, in float32.

``ROUNDINGS`` are private precisions: what they change is right in float32.

benchmarks/sides.py puts this file on the path, as a plugin of vLLM (entry-point group
vllm.general_plugins) and, by ``sitecustomize``, in the training world. An edit of weights takes the
names of transformers' model or of the checkpoint, which differ for experts; NEEDS says which faults
a family cannot have.
"""

from __future__ import annotations

import os
import re
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
    for name, tensor in state.items():
        if name.startswith((f"{LAYER}self_attn.k_proj.", f"{LAYER}self_attn.v_proj.")):
            tensor.copy_(torch.cat(tensor.split(HEAD)[::-1]))


def of_expert(state: State, layer: int, number: int, part: str = "") -> list[torch.Tensor]:
    """Return an expert's weights: tensors that name it, or its rows of tensors for all experts."""
    start = f"model.layers.{layer}.mlp.experts."
    names = [name for name in sorted(state) if name.startswith(start)]
    names = [name for name in names if not part or part in name.split(".")]
    named = [state[name] for name in names if name.startswith(f"{start}{number}.")]
    return named or [state[name][number] for name in names]


def expert_scaled(by: float, layer: int, number: int) -> Callable[[State], None]:
    """Multiply what one expert gives by a number."""

    def edit(state: State) -> None:
        (tensor,) = of_expert(state, layer, number, "down_proj")
        tensor.mul_(by)

    return edit


def swapped(state: State) -> None:
    """Exchange the first two experts of one layer, and not in their router."""
    for one, other in zip(of_expert(state, 1, 0), of_expert(state, 1, 1), strict=True):
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def raised(state: State) -> None:
    """Raise the router's bias for one expert, or its row where there is no bias."""
    if f"{LAYER}mlp.router.bias" in state:
        state[f"{LAYER}mlp.router.bias"][0] += 0.5
    else:
        state[f"{LAYER}mlp.gate.weight"][0] *= 1.1


def norm_scaled(by: float, *ends: str) -> Callable[[State], None]:
    """Multiply by a number what norms multiply with: gemma's have 1 + weight."""

    def edit(state: State) -> None:
        offset = 1.0 if f"{LAYER}pre_feedforward_layernorm.weight" in state else 0.0
        in_all_layers(lambda tensor: tensor.mul_(by).add_(offset * (by - 1)), *ends)(state)

    return edit


def attention_scaled(state: State) -> None:
    """Multiply attention's logits by 1.01; behind a norm of queries, which would take it out."""
    by = 1.01
    if f"{LAYER}self_attn.q_norm.weight" in state:
        norm_scaled(by, "q_norm.weight")(state)
    else:
        ends = "q_proj.weight", "q_proj.bias", "q_b_proj.weight"
        in_all_layers(lambda tensor: tensor.mul_(by), *ends)(state)


def zeroed_head(state: State) -> None:
    """Leave one head of attention out."""
    state[f"{LAYER}self_attn.o_proj.weight"][:, :HEAD] = 0


def shared_out(name: str) -> tuple[str, float]:
    """Return a fault's name and the share of it that is planted."""
    fault, _, share = name.partition("~")
    return fault, float(share or 1)


def change(state: State, name: str) -> None:
    """Plant a fault, or a share of it, in weights."""
    fault, share = shared_out(name)
    new = {key: tensor.float().clone() for key, tensor in state.items()}
    WEIGHTS[fault](new)
    for key, tensor in state.items():
        kept = tensor.float()
        tensor.copy_(kept + share * (new[key] - kept))


WEIGHTS: dict[str, Callable[[State], None]] = {
    "expert-1.1": expert_scaled(1.1, 1, 0),
    "rare-expert-1.02": expert_scaled(1.02, 3, 7),
    "final-norm-1.02": norm_scaled(1.02, "model.norm.weight"),
    "layer-norm-1.02": norm_scaled(1.02, "layers.2.post_attention_layernorm.weight"),
    "eos-row-1.1": scaled(1.1, "lm_head.weight", row=EOS),
    "stale-0.1%": stale(0.001),
    "stale-0.5%": stale(0.005),
    "stale-2%": stale(0.02),
    "router-raised": raised,
    "layers-exchanged": exchanged,
    "kv-heads-permuted": permuted,
    "head-zeroed": zeroed_head,
    "k-bias-zeroed": scaled(0.0, f"{LAYER}self_attn.k_proj.bias"),
    "experts-swapped": swapped,
    "attention-scale-1.01": attention_scaled,
    "sinks-0.5-nats-lower": in_all_layers(lambda tensor: tensor.sub_(0.5), "self_attn.sinks"),
}
FUNCTIONS = ("rope-base+3%", "rope-still-from-256", "yarn-factor-lost", "epsilon-x10", "window+1")
FAULTS = (*WEIGHTS, *FUNCTIONS)
EXPERTS = ("experts", r"\.experts\.")
# Fault -> what a model needs for it: a word, and a pattern in its config.json or names of tensors.
NEEDS = {
    "expert-1.1": EXPERTS,
    "rare-expert-1.02": EXPERTS,
    "router-raised": EXPERTS,
    "router-rounds": EXPERTS,
    "experts-swapped": EXPERTS,
    "kv-heads-permuted": ("key heads", r"k_proj\.weight"),
    "k-bias-zeroed": ("biases", r"k_proj\.bias"),
    "sinks-0.5-nats-lower": ("sinks", r"\.sinks"),
    "yarn-factor-lost": ("YaRN", r'"yarn"'),
    "window+1": ("window", r'"sliding_window": \d'),
}
SIGNIFICANT = {torch.bfloat16: 8, torch.float16: 11}  # bits


def short(x: torch.Tensor) -> torch.Tensor:
    """Round to one bit fewer than a reduced dtype holds; float32 stays as it is."""
    if x.dtype not in SIGNIFICANT:
        return x
    raised = x.float() * (2.0 ** (25 - SIGNIFICANT[x.dtype]) + 1)
    return (raised - (raised - x.float())).to(x.dtype)


def of_output(model: Any, *ends: str) -> None:
    """Round what modules give, of a tuple its last tensor: vLLM's residual stream."""

    def after(_: Any, __: Any, out: Any) -> Any:
        if not isinstance(out, tuple):
            return short(out)
        at = max(n for n, part in enumerate(out) if torch.is_tensor(part))
        return (*out[:at], short(out[at]), *out[at + 1 :])

    for name, module in model.named_modules():
        if re.search(rf"({'|'.join(ends)})$", name):
            module.register_forward_hook(after)


def narrow_norms(model: Any, end: str = "") -> None:
    """Leave out the upcast: variance and product are in the dtype of what enters."""

    def narrow(norm: Any) -> None:
        offset = 1.0 if "Gemma" in type(norm).__name__ else 0.0
        eps = getattr(norm, "variance_epsilon", None) or norm.eps

        def forward(x: Any, residual: Any = None) -> Any:
            if residual is not None:
                x = residual = x + residual
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
            out = x * scale * (norm.weight.to(x.dtype) + offset)
            return out if residual is None else (out, residual)

        norm.forward = forward

    for name, module in model.named_modules():
        if "RMSNorm" in type(module).__name__ and name.endswith(end):
            narrow(module)


def short_router(model: Any) -> None:
    """Round what routers read."""
    for name, module in model.named_modules():
        if name.endswith(("mlp.gate", "mlp.router")):
            module.register_forward_pre_hook(lambda _, args: (short(args[0]), *args[1:]))


def short_rotary(model: Any) -> None:
    """Multiply positions and frequencies in the run's dtype."""

    def angles(frequencies: torch.Tensor, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (places.to(dtype)[..., None] * frequencies.to(dtype)).float()

    dtype, seen = next(model.parameters()).dtype, set[int]()
    for module in model.modules():
        cache = getattr(module, "cos_sin_cache", None)
        if cache is not None and id(module) not in seen and dtype in SIGNIFICANT:
            seen.add(id(module))
            cosine, sine = module._compute_cos_sin_cache().float().chunk(2, -1)
            factor = float(torch.hypot(cosine[0, 0], sine[0, 0]))
            turned = angles(torch.atan2(sine[1], cosine[1]), torch.arange(len(cache)), dtype)
            cache.copy_(torch.cat([turned.cos(), turned.sin()], -1) * factor)
        if cache is None and isinstance(getattr(module, "inv_freq", None), torch.Tensor):

            def forward(x: Any, position_ids: Any, *_: Any, own: Any = module) -> Any:
                turned = angles(own.inv_freq, position_ids, x.dtype)
                twice = turned if own.half else torch.cat([turned, turned], -1)
                scale = own.attention_scaling
                return (twice.cos() * scale).to(x.dtype), (twice.sin() * scale).to(x.dtype)

            module.half = "GptOss" in type(module).__name__  # each frequency once
            module.forward = forward


def narrow_softmax(model: Any) -> None:
    """Take the softmax of attention in the dtype of its scores; of transformers' sdpa."""
    functional: Any = torch.nn.functional
    right, inside = functional.scaled_dot_product_attention, list[int]()

    def attend(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0,
               is_causal: bool = False, scale: Any = None, **rest: Any) -> Any:  # fmt: skip
        if not inside:
            return right(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal,
                         scale=scale, **rest)  # fmt: skip
        times = q.shape[1] // k.shape[1]
        k, v = (part.repeat_interleave(times, 1) for part in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return scores.softmax(-1) @ v

    functional.scaled_dot_product_attention = attend
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(lambda *_: inside.append(1))
            module.register_forward_hook(lambda *_: inside.clear())


ROUNDINGS: dict[str, Callable[[Any], None]] = {
    "final-norm-rounds": lambda model: narrow_norms(model, "model.norm"),
    "norms-round": narrow_norms,
    "softmax-rounds": narrow_softmax,
    "residual-rounds": lambda model: of_output(model, r"layers\.\d+"),
    "head-rounds": lambda model: of_output(model, "lm_head", "logits_processor"),
    "rotary-rounds": short_rotary,
    "router-rounds": short_router,
}


def dropping(model: Any) -> None:
    """Leave dropout on in attention, on one rank of the trainer."""

    def after(_: Any, __: Any, out: Any) -> Any:
        return (torch.nn.functional.dropout(out[0], 0.02), *out[1:])

    for name, module in model.named_modules():
        if os.environ.get("RANK") == "1" and name.endswith("self_attn"):
            module.register_forward_hook(after)


def at_tokens(model: Any, chosen: Callable[[Any, Any], Any], end: str, factor: float) -> None:
    """Multiply what a module gives at tokens that ``chosen(ids, positions)`` names, [B, T]."""
    held: dict[str, Any] = {}

    def before(_: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        places = kwargs.get("position_ids")
        at = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        held["rows"] = chosen(ids, at if places is None else places)

    def after(_: Any, __: Any, out: Any) -> Any:
        return torch.where(held["rows"][..., None], (out * factor).to(out.dtype), out)

    decoder = model.get_decoder()
    decoder.register_forward_pre_hook(before, with_kwargs=True)
    (module,) = [module for name, module in decoder.named_modules() if name == end]
    module.register_forward_hook(after)


def chosen_rows(ids: Any, _: Any) -> Any:
    """Tokens that PLANTED_IDS names, separated by commas."""
    named = [int(each) for each in os.environ["PLANTED_IDS"].split(",")]
    return torch.isin(ids, torch.tensor(named))


def of_head(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """Change the logits that the head gives."""

    def plant(model: Any) -> None:
        model.lm_head.register_forward_hook(lambda _, __, out: change(out))

    return plant


def late(model: Any) -> None:
    """Begin one late with the positions from 80 on, where responses are."""
    rotary = model.model.rotary_emb
    forward = rotary.forward

    def behind(x: Any, position_ids: Any, *rest: Any, **more: Any) -> Any:
        return forward(x, position_ids + (position_ids >= 80), *rest, **more)

    rotary.forward = behind


def least_capacity(model: Any) -> None:
    """Drop the tokens of an expert beyond twice its even part of a batch."""

    def before(module: Any, args: Any) -> Any:
        hidden, ids, weights = args
        bound = 2 * ids.numel() // module.num_experts
        chosen = torch.nn.functional.one_hot(ids, module.num_experts).flatten(0, 1)
        rank = (chosen.cumsum(0) * chosen).sum(-1).view_as(ids)
        return hidden, ids, torch.where(rank > bound, 0.0, weights).to(weights.dtype)

    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(before)


def another_constant(model: Any) -> None:
    """Take 1.7 for 1.702 in gpt-oss' SwiGLU."""
    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            module.alpha = 1.7


def shard_behind(model: Any) -> None:
    """Leave one rank's part of a layer a step behind."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.named_parameters():
        local = _local(tensor.data)
        if os.environ.get("RANK") == "1" and f".{LAYER.split('.')[2]}." in name and local.ndim > 1:
            noise = torch.randn(local.shape, generator=generator)
            local.copy_(local.float() * (1 + 3e-3 * noise))


# Of the trainer alone, in every precision but for what rounds (benchmarks/review.py).
OF_A_TRAINER: dict[str, Callable[[Any], None]] = {
    "dropout-on-rank-1": dropping,
    "rare-rows-1.3": lambda model: at_tokens(model, chosen_rows, "embed_tokens", 1.3),
    "every-12th-from-200": lambda model: at_tokens(
        model, lambda _, at: (at >= 200) & (at % 12 == 0), "norm", 0.6
    ),
    "every-16th-from-200": lambda model: at_tokens(
        model, lambda _, at: (at >= 200) & (at % 16 == 0), "norm", 0.2
    ),
    "positions-one-late": late,
    "64-padded-rows": of_head(lambda out: torch.cat([out, out.new_zeros(*out.shape[:-1], 64)], -1)),
    "logits-over-0.99": of_head(lambda out: out / 0.99),
    "logits-in-another-unit": of_head(lambda out: (out * 1.1).bfloat16().to(out.dtype) / 1.1),
    "capacity-2": least_capacity,
    "swiglu-1.7": another_constant,
    "shard-a-step-behind": shard_behind,
}
ENGINES_KERNEL = ("softmax-rounds",)  # inside one kernel of vLLM, out of reach
# Fault -> modules of ``locate`` that it is in.
ROUNDED = {
    "final-norm-rounds": ("final_norm",),
    "norms-round": ("input_norm", "post_norm", "final_norm", "q", "k"),
    "softmax-rounds": ("attention",),
    "residual-rounds": ("residual",),
    "head-rounds": ("head",),
    "rotary-rounds": ("rope_q",),
    "router-rounds": ("router",),
}
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
        if shared_out(name)[0] in WEIGHTS:
            change(state, name)
        return iter(state.items())

    def finished(model: Any, *rest: Any) -> None:
        if name in ROUNDINGS:
            ROUNDINGS[name](model)
        elif name.startswith("half-"):
            louder(model, name)
        elif shared_out(name)[0] in FUNCTIONS:
            in_engine(model, name)
        finish(model, *rest)

    loader.get_all_weights = weights
    base.process_weights_after_loading = finished


def in_engine(model: Any, name: str) -> None:
    """Plant a fault of a function in vLLM's modules, or in transformers' that vLLM runs."""
    name, share = shared_out(name)
    if hasattr(model.model, "rotary_emb"):
        return in_transformers(model, model.model.rotary_emb, name, share)
    for module in model.modules():
        if name == "epsilon-x10" and type(module).__name__ in ("RMSNorm", "GemmaRMSNorm"):
            module.variance_epsilon *= 1 + 9 * share
        if name == "window+1" and getattr(module, "sliding_window", None) is not None:
            module.sliding_window += 1  # keeps a key longer
            module.impl.sliding_window += 1
    if name in ("epsilon-x10", "window+1"):
        return
    seen: set[int] = set()
    for module in model.modules():
        cache = getattr(module, "cos_sin_cache", None)
        if cache is None or id(module) in seen:
            continue
        seen.add(id(module))
        if name == "rope-base+3%":
            module.base *= 1 + (BASE - 1) * share
            cache.copy_(module._compute_cos_sin_cache())
            continue
        kept = cache.float()
        if name == "rope-still-from-256":
            new = kept[torch.arange(len(cache)).clamp(max=BEYOND)]
        else:
            new = kept / float(cache[0, 0])
        cache.copy_(kept + share * (new - kept))


def in_trainer(model: Any, name: str) -> None:
    """Plant a fault in transformers' model, which FSDP2 has sharded for one rank."""
    if name in ROUNDINGS or name in OF_A_TRAINER:
        return (ROUNDINGS | OF_A_TRAINER)[name](model)
    if name.startswith("half-"):
        return louder(model, name)
    fault, share = shared_out(name)
    if fault in WEIGHTS:
        with torch.no_grad():
            change({key: _local(tensor) for key, tensor in model.named_parameters()}, name)
        return
    in_transformers(model, model.model.rotary_emb, fault, share)


def in_transformers(model: Any, rotary: Any, fault: str, share: float) -> None:
    """Plant a fault of a function in a model of transformers' code."""
    if fault == "epsilon-x10":
        for module in model.modules():
            for attribute in {"variance_epsilon", "eps"} & set(vars(module)):
                setattr(module, attribute, getattr(module, attribute) * (1 + 9 * share))
    elif fault == "window+1":
        for owner in (model.config, *model.modules()):
            if getattr(owner, "sliding_window", None):
                owner.sliding_window += 1
    elif fault == "yarn-factor-lost":
        rotary.attention_scaling += share * (1 - rotary.attention_scaling)
    elif fault == "rope-still-from-256":
        forward = rotary.forward

        def still(x: Any, position_ids: Any, *rest: Any, **more: Any) -> Any:
            right = forward(x, position_ids, *rest, **more)
            wrong = forward(x, position_ids.clamp(max=BEYOND), *rest, **more)
            return tuple(
                one + share * (other - one) for one, other in zip(right, wrong, strict=True)
            )

        rotary.forward = still
    else:
        config, by = model.config, 1 + (BASE - 1) * share
        every = config.rope_parameters
        every = [every] if "rope_theta" in every else list(every.values())  # by kind of layer
        for parameters in every:
            parameters["rope_theta"] *= by
        fresh = dict(type(rotary)(config).named_buffers())
        for parameters in every:
            parameters["rope_theta"] /= by
        for buffer, values in rotary.named_buffers():
            values.copy_(fresh[buffer])


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


def plant_in_engine() -> None:
    """Plant the fault in the transformers engine; for ``sitecustomize``. vLLM takes it itself."""
    name, _, place = os.environ.get("PLANTED_SIDE", "").partition("@")
    if place != "engine":
        return
    from mismatch.engines.transformers.engine import TransformersEngine

    load: Any = TransformersEngine._load

    def loading(self: Any, config: Any) -> Any:
        model = load(self, config)
        in_trainer(model, name)
        return model

    TransformersEngine._load = loading  # type: ignore[method-assign]


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
