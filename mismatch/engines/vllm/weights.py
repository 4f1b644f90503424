"""Digests of vLLM's parameters: what one tensor-parallel rank counts of them."""

from __future__ import annotations

from typing import Any

from mismatch.engines import fused_weights


def loaded_digests(model: Any) -> tuple[dict[str, list[int]], list[str]]:
    """Name (vLLM's, unfused) -> digest of this rank's own share, and parameters not understood.

    A rank leaves out what another rank counts already (replicated parameters), so that the sum
    over ranks is the digest of the whole parameter.
    """
    return fused_weights.loaded_digests(model, _owned)


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
