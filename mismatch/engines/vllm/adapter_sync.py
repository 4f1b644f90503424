"""What vLLM's kernels add for a LoRA adapter, under the adapter's own names.

vLLM wraps every layer that may carry an adapter and stacks the matrices of all slots; q, k and v
(gate and up) are one layer with one stack each. B is stored times alpha / rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mismatch.engines.fused_weights import PACKED
from mismatch.engines.held_weights import SLICED
from mismatch.models.adapter_states import RANK, A, B
from mismatch.models.weight_states import Prints

if TYPE_CHECKING:
    import torch


def held_adapter(
    model: Any, names: list[str], adapter: int, rename: Callable[[list[str]], dict[str, str]]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """(name -> Prints as plain data, name -> why not) of these matrices.

    Args:
        names: of an adapter's file, by the checkpoint's modules.
        adapter: vLLM's lora_int_id; a slot that does not hold it counts as zeros.
        rename: checkpoint names -> {vLLM's: checkpoint's}.
    """
    wanted = {name.removesuffix(f".{A}") for name in names if name.endswith(A)}
    modules = {
        own.removesuffix(".weight"): checkpoint.removesuffix(".weight")
        for own, checkpoint in rename([f"{module}.weight" for module in wanted]).items()
    }
    slots = list(model.lora_manager.lora_index_to_id)
    slot = slots.index(adapter) if adapter in slots else None
    prints, missing = {}, {}
    for path, layer in model.named_modules():
        for part, a, b in _matrices(path, layer, slot):
            module = modules.get(part, part)
            if module not in wanted:
                continue
            for name, tensor in ((f"{module}.{A}", a), (f"{module}.{B}", b)):
                if getattr(layer, "tp_size", 1) > 1:
                    missing[name] = SLICED
                else:
                    prints[name] = asdict(Prints.of(name, tensor))
    return prints, missing


def _matrices(
    path: str, layer: Any, slot: int | None
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(unfused module, A [rank, in], B [out, rank]) of one wrapped layer."""
    stacks = getattr(layer, "lora_a_stacked", None)
    if stacks is None:
        return
    parent, _, own = path.rpartition(".")
    parts = PACKED[own] if own in PACKED and len(stacks) == len(PACKED[own]) else [own]
    for part, a, b in zip(parts, stacks, layer.lora_b_stacked, strict=False):
        if a.ndim != 4:  # [slots, 1, rank, in]: embeddings and experts lie otherwise
            return
        of_a, of_b = a[slot or 0, 0, :RANK], b[slot or 0, 0, :, :RANK]
        empty = slot is None
        yield f"{parent}.{part}", *(m.new_zeros(m.shape) if empty else m for m in (of_a, of_b))
