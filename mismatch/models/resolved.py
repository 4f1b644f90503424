"""The configuration that a loaded model computes with, read off its modules, of any library.

Names of a field are the same for vLLM, SGLang and transformers, so that two sides can be held
against each other. Values come from what the forward pass reads (tables, attributes of modules),
not from config.json: what a loader has dropped or overridden is seen. A field that a model's
classes do not show is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

DIGITS = 5  # significant digits that are kept
ORIGINAL = "original_inv_freq"  # transformers keeps it next to the one in use


LOGIT_FACTORS = ("logits_scaling", "logit_scale", "lm_head_multiplier")
CAPPING = ("eager", "flex_attention", "mismatch_plain", "mismatch_plain_fp8_kv")


def honours_softcap(config: Any, attention: str) -> bool | None:
    """Return whether a kernel of transformers caps its scores as the configuration declares.

    transformers hands the cap to every kernel as an argument. Its eager and flex kernels and flash
    attention apply it; its call of PyTorch's scaled_dot_product_attention drops it.

    Args:
        attention: its name in transformers' registry.

    Returns:
        None where no cap is declared, or where the kernel's name does not say.
    """
    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is None:
        return None
    if attention in CAPPING or "flash" in attention:
        return True
    return False if attention == "sdpa" else None


def resolved(model: Any, honours_sinks: bool | None = None) -> dict[str, Any]:
    """Return field -> value. A field of several layers holds each different value once, sorted.

    Args:
        model: a torch module with its weights.
        honours_sinks: of an attention kernel outside the model; None: the modules say it.
    """
    modules = list(model.modules())
    layers = _attention(modules)
    fields = (
        _rope(modules)
        | _routers(modules)
        | {
            "rms_norm_eps": _norms(modules),
            "sliding_window": [_window(layer, model) for layer in layers],
            "attention_scale": _distinct(_scale(layer) for layer in layers),
            "attn_logit_softcapping": _distinct(_cap(layer) for layer in layers),
            "final_logit_softcapping": _final_cap(modules, model),
            "tie_word_embeddings": _tied(model),
            "attention_sinks": _sinks(modules, layers, honours_sinks),
            "logit_factor": _logit_factor(model),
        }
    )
    return {name: value for name, value in fields.items() if value not in (None, [])}


def _attention(modules: Sequence[Any]) -> list[Any]:
    """Return the attention of each layer: an engine's own, else that of transformers."""
    tests: tuple[Callable[[Any], bool], ...] = (
        lambda m: hasattr(getattr(m, "impl", None), "scale"),  # vLLM
        lambda m: type(m).__name__ == "RadixAttention",  # SGLang
        lambda m: hasattr(m, "layer_idx") and hasattr(m, "scaling"),
    )
    for belongs in tests:
        if belonging := [module for module in modules if belongs(module)]:
            return belonging
    return []


def _rope(modules: Sequence[Any]) -> dict[str, Any]:
    """Frequencies in radians a position, and the factor on cosine and sine (YaRN)."""
    tables: dict[tuple[float, ...], None] = {}
    factors: set[float] = set()
    for module in modules:
        cache = getattr(module, "cos_sin_cache", None)
        if cache is not None and getattr(cache, "ndim", 0) == 2 and len(cache) > 1:
            rows = _array(cache[:2])
            half = rows.shape[1] // 2
            tables[_rounded(np.abs(np.arctan2(rows[1, half:], rows[1, :half])))] = None
            factors.add(_short(rows[0, 0]))
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and not name.endswith(ORIGINAL):
                tables[_rounded(_array(buffer))] = None
                kind = name.removesuffix("inv_freq")
                factors.add(_short(getattr(module, f"{kind}attention_scaling", 1.0)))
    return {
        "rope_frequencies": sorted(list(table) for table in tables),
        "attention_factor": sorted(factors),
    }


def _norms(modules: Sequence[Any]) -> list[float]:
    norms = [module for module in modules if "Norm" in type(module).__name__]
    return _distinct(_first(norm, "variance_epsilon", "eps", "epsilon") for norm in norms)


def _routers(modules: Sequence[Any]) -> dict[str, Any]:
    """Experts a token, and whether their weights are normalised to 1."""
    inside = [getattr(module, "router", module) for module in modules]
    routers = [m for m in inside if isinstance(getattr(m, "top_k", None), int)]
    normed = [_first(router, "renormalize", "norm_topk_prob") for router in routers]
    return {
        "num_experts_per_tok": _distinct(router.top_k for router in routers),
        "norm_topk_prob": sorted({bool(value) for value in normed if value is not None}),
    }


def _first(module: Any, *names: str) -> Any:
    """Return the first of these attributes that a module has."""
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def _window(layer: Any, model: Any) -> int | None:
    """Tokens that a token attends to in a layer, itself included; None: all."""
    if hasattr(layer, "sliding_window_size"):  # SGLang counts the tokens before
        return _positive(layer.sliding_window_size, 1)
    if hasattr(layer, "sliding_window"):
        return _positive(layer.sliding_window, 0)
    config = model.config  # transformers masks by it
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer.layer_idx] != "sliding_attention":
        return None
    if getattr(config, "use_sliding_window", True) is False:
        return None
    return _positive(getattr(config, "sliding_window", None), 0)


def _positive(window: Any, before: int) -> int | None:
    return int(window) + before if isinstance(window, int) and window > 0 else None


def _scale(layer: Any) -> Any:
    return layer.impl.scale if hasattr(layer, "impl") else layer.scaling


def _cap(layer: Any) -> float:
    """Return the cap on attention scores; 0: none."""
    held = layer.impl if hasattr(layer, "impl") else layer
    return _first(held, "logits_soft_cap", "logit_cap", "attn_logit_softcapping") or 0.0


def _final_cap(modules: Sequence[Any], model: Any) -> float:
    """Return the cap on logits; 0: none."""
    for module in modules:
        if hasattr(module, "soft_cap") or hasattr(module, "final_logit_softcapping"):
            return _first(module, "soft_cap", "final_logit_softcapping") or 0.0
    return getattr(getattr(model, "config", None), "final_logit_softcapping", None) or 0.0


def _logit_factor(model: Any) -> dict[str, float] | None:
    """Return the field of config.json by which a family's logits are multiplied or divided."""
    config = getattr(model, "config", None)
    fields = {name: getattr(config, name, None) for name in LOGIT_FACTORS}
    given = {name: float(value) for name, value in fields.items() if isinstance(value, int | float)}
    return given or None


def _tied(model: Any) -> bool | None:
    """Whether head and embedding are one parameter; None: the names do not show it."""
    ends = {name.rpartition(".")[2]: module for name, module in model.named_modules()}
    head = getattr(model, "lm_head", None)  # named_modules names a shared module once
    inputs = [ends[name] for name in ("embed_tokens", "wte", "embed_in") if name in ends]
    if head is None or not inputs:
        return None
    first, second = getattr(head, "weight", None), getattr(inputs[0], "weight", None)
    return None if first is None or second is None else first is second


def _sinks(modules: Sequence[Any], layers: Sequence[Any], honoured: bool | None) -> bool | None:
    """Whether the model's learned sinks take part in the softmax; None: it has none."""
    if honoured is not None:
        return honoured
    learned = any(hasattr(module, "sinks") for module in modules)
    if not learned or not layers or not hasattr(layers[0], "impl"):
        return None
    return any(getattr(layer.impl, "sinks", None) is not None for layer in layers)


def _distinct(values: Iterable[Any]) -> list[float]:
    return sorted({_short(value) for value in values if value is not None})


def _array(tensor: Any) -> np.ndarray:
    return np.asarray(tensor.detach().float().cpu().numpy(), np.float64)


def _rounded(values: np.ndarray) -> tuple[float, ...]:
    return tuple(_short(value) for value in values)


def _short(value: Any) -> float:
    return float(f"{float(value):.{DIGITS}g}")
