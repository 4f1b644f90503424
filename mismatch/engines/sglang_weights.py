"""Digests of SGLang's parameters under the checkpoint's names, before kernels repack them.

SGLang fuses what vLLM fuses (see mismatch/engines/vllm_weights.py) and pads with zeros; digests
ignore order and zeros, so only names have to be undone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
EXPERT_LEAVES = {
    "w13_weight": "gate_up_proj",
    "w2_weight": "down_proj",
    "w13_weight_bias": "gate_up_proj_bias",
    "w2_weight_bias": "down_proj_bias",
}


def loaded_digests(model: Any) -> tuple[dict[str, list[int]], list[str]]:
    """Name (unfused) -> digest of every parameter, and the names of those not understood."""
    from mismatch.weights_digest import digest_tensor

    digests: dict[str, list[int]] = {}
    unknown: list[str] = []
    modules = dict(model.named_modules(remove_duplicate=False))
    packed = {**PACKED, **(getattr(model, "packed_modules_mapping", None) or {})}
    for name, parameter in _named_once(model):
        if not parameter.is_floating_point():
            unknown.append(name)  # quantised: packed integers, not the checkpoint's values
            continue
        path, _, leaf = name.rpartition(".")
        for part, tensor in _parts(name, leaf, parameter.data, modules.get(path), packed):
            digests[part] = list(digest_tensor(tensor))
    return digests, unknown


def moe_layers(model: Any) -> list[tuple[int, Any]]:
    """(decoder layer, module that holds its experts) of every MoE layer, in order."""
    found: dict[int, Any] = {}
    for name, module in model.named_modules():
        if hasattr(module, "w13_weight") and hasattr(module, "w2_weight"):
            numbers = [part for part in name.split(".") if part.isdigit()]
            if numbers:
                found[int(numbers[0])] = module
    return sorted(found.items())


def _named_once(model: Any) -> Iterator[tuple[str, Any]]:
    """Every parameter under its first name; a tied head also under its own, as trainers name it."""
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in seen or name.endswith("lm_head.weight"):
            yield name, parameter
        seen.add(id(parameter))


def _parts(
    name: str, leaf: str, tensor: Any, module: Any, packed: dict[str, list[str]]
) -> Iterator[tuple[str, Any]]:
    """(unfused name, values) of one parameter."""
    path = name.removesuffix(f".{leaf}")
    if leaf in EXPERT_LEAVES:
        yield f"{path}.{EXPERT_LEAVES[leaf]}", tensor
        return
    parent, _, own = path.rpartition(".")
    sizes = getattr(module, "output_partition_sizes", None) or []
    if own in packed and len(sizes) == len(packed[own]) > 1 and sum(sizes) == tensor.shape[0]:
        pieces = tensor.split(list(sizes))
        for part, piece in zip(packed[own], pieces, strict=True):
            yield f"{parent}.{part}.{leaf}", piece
        return
    yield name, tensor
