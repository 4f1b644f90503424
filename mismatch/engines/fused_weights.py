"""Digests of an engine's parameters under the checkpoint's names, before kernels repack them.

vLLM and SGLang fuse q, k and v into one matrix, gate and up into another, and all experts of a
layer into two; they pad with zero rows, and tensor-parallel ranks hold slices. Digests add up and
ignore zeros, so names and slices are undone here. Layouts are not: of what the engine packs only
the order of the experts is known, and a rank's slices have none.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

# Fallback where a model class does not declare its packed modules.
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
EXPERT_LEAVES = {
    "w13_weight": "gate_up_proj",
    "w2_weight": "down_proj",
    "w13_bias": "gate_up_proj_bias",  # vLLM's name, and SGLang's
    "w13_weight_bias": "gate_up_proj_bias",
    "w2_bias": "down_proj_bias",
    "w2_weight_bias": "down_proj_bias",
}
Owned = Callable[[Any, str, str], bool]  # (module, its unfused name, leaf)
Digests = tuple[dict[str, list[int]], list[str]]
NO_DIGESTS: Digests = ({}, ["(all)"])


def loaded_digests(model: Any, owned: Owned | None = None) -> Digests:
    """Name (the engine's, unfused) -> digest, and the names of parameters not understood.

    It runs while the engine loads its weights, so a failure must not cost the engine: the log has
    it, and no weight is compared.

    Args:
        owned: whether this rank counts a part; None: it counts all.
    """
    try:
        return _digests(model, owned)
    except Exception:
        print("weight digests could not be taken:")
        traceback.print_exc()
        return NO_DIGESTS


def _digests(model: Any, owned: Owned | None) -> Digests:
    from mismatch.models.digests import OF_EXPERTS, UNORDERED, digest_tensor

    digests: dict[str, list[int]] = {}
    unknown: list[str] = []
    modules = dict(model.named_modules(remove_duplicate=False))
    packed = packed_in(model)
    for name, parameter in _named_once(model):
        if not parameter.is_floating_point():
            unknown.append(name)  # quantised: packed integers, not the checkpoint's values
            continue
        path, _, leaf = name.rpartition(".")
        if leaf in EXPERT_LEAVES:  # of all ranks: each holds a share of its own
            own_name = f"{path.removesuffix('.routed_experts')}.{EXPERT_LEAVES[leaf]}"
            digests[own_name] = list(digest_tensor(parameter.data)[:OF_EXPERTS])
            continue
        module = modules[path]
        known = UNORDERED if getattr(module, "tp_size", 1) > 1 else None
        for part, tensor in parts_of(path, parameter.data, module, packed):
            if owned is None or owned(module, part.rpartition(".")[2], leaf):
                digests[f"{part}.{leaf}".lstrip(".")] = list(digest_tensor(tensor)[:known])
    return digests, unknown


def _named_once(model: Any) -> Iterator[tuple[str, Any]]:
    """Every parameter under its first name; a tied head also under its own, as trainers name it."""
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in seen or name.endswith("lm_head.weight"):
            yield name, parameter
        seen.add(id(parameter))


def packed_in(model: Any) -> dict[str, list[str]]:
    """Fused module -> the modules of the checkpoint that it holds, in their order."""
    return {**PACKED, **(getattr(model, "packed_modules_mapping", None) or {})}


def parts_of(
    path: str, tensor: Any, module: Any, packed: dict[str, list[str]]
) -> Iterator[tuple[str, Any]]:
    """(path of an unfused module, its values) of one parameter."""
    parent, _, own = path.rpartition(".")
    sizes = getattr(module, "output_partition_sizes", None) or []
    if own in packed and len(sizes) == len(packed[own]) > 1 and sum(sizes) == tensor.shape[0]:
        for part, piece in zip(packed[own], tensor.split(list(sizes)), strict=True):
            yield f"{parent}.{part}", piece
        return
    yield path, tensor
