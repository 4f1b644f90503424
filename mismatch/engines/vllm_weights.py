"""Digests of vLLM's parameters under the checkpoint's names, before kernels repack them.

vLLM fuses q, k and v into one matrix, gate and up into another, and all experts of a layer into
two; it pads the vocabulary with zero rows and gives every tensor-parallel rank a slice. Digests are
additive and ignore order and zeros, so only names and slices have to be undone, not layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Fallback where a model class does not declare its packed modules.
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
EXPERT_LEAVES = {
    "w13_weight": "gate_up_proj",
    "w2_weight": "down_proj",
    "w13_bias": "gate_up_proj_bias",
    "w2_bias": "down_proj_bias",
}


def loaded_digests(model: Any) -> tuple[dict[str, list[int]], list[str]]:
    """Name (vLLM's, unfused) -> digest of this rank's own share, and parameters not understood.

    A rank leaves out what another rank counts already (replicated parameters), so that the sum
    over ranks is the digest of the whole parameter.
    """
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
        for part, tensor, owned in _parts(name, path, leaf, parameter.data, modules[path], packed):
            if owned:
                digests[part] = list(digest_tensor(tensor))
    return digests, unknown


def _named_once(model: Any) -> Iterator[tuple[str, Any]]:
    """Every parameter under its first name; a tied head also under its own, as trainers name it."""
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in seen or name.endswith("lm_head.weight"):
            yield name, parameter
        seen.add(id(parameter))


def _parts(
    name: str, path: str, leaf: str, tensor: Any, module: Any, packed: dict[str, list[str]]
) -> Iterator[tuple[str, Any, bool]]:
    """(unfused name, values, counted by this rank) of one parameter."""
    if leaf in EXPERT_LEAVES:
        parent = path.removesuffix(".routed_experts")
        yield f"{parent}.{EXPERT_LEAVES[leaf]}", tensor, True
        return
    parent, _, own = path.rpartition(".")
    sizes = getattr(module, "output_partition_sizes", None) or []
    if own in packed and len(sizes) == len(packed[own]) > 1 and sum(sizes) == tensor.shape[0]:
        for part, piece in zip(packed[own], tensor.split(list(sizes)), strict=True):
            yield f"{parent}.{part}.{leaf}", piece, _owned(module, part, leaf)
        return
    yield name, tensor, _owned(module, own, leaf)


def _owned(module: Any, part: str, leaf: str) -> bool:
    """Whether this rank counts this part: sliced parts always, copies on the first rank only."""
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    rank = get_tensor_model_parallel_rank()
    if part in ("k_proj", "v_proj"):
        return bool(rank % getattr(module, "num_kv_head_replicas", 1) == 0)
    sliced = isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding))
    sliced |= isinstance(module, RowParallelLinear) and leaf == "weight"
    sliced |= leaf == "sinks"
    return (sliced and getattr(module, "tp_size", 2) > 1) or rank == 0
