"""What vLLM's kernels compute with, and ways to give it new weights.

Parameters of a loaded vLLM are not what was loaded: linear layers are repacked (oneDNN keeps no
readable copy), experts are shuffled for their kernel. A linear layer is read by giving its kernel
the identity matrix, experts by packing their indices with the kernel's own function and
inverting that. What cannot be read is named with the reason.

vLLM wraps every layer that may carry an adapter and stacks the matrices of all slots; q, k and v
(gate and up) are one layer with one stack each. B is stored times alpha / rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from mismatch.engines.held_weights import (
    BY_TURNS,
    EXPERT_LEAVES,
    PACKED,
    SLICED,
    UNREADABLE,
    HeldWeights,
    Ranks,
    as_stored,
    expert_parts,
    experts_prefix,
    numbered,
)
from mismatch.engines.model_calls import attribute
from mismatch.engines.vllm import private
from mismatch.engines.vllm.private import expert_packer, experts_kernel, renamed, sinks_in_use
from mismatch.errors import MismatchError
from mismatch.models.weight_states import RANK, A, B, Checkpoint, Prints

LOW = 1 << 7  # indices are packed in digits that bfloat16 holds exactly


def as_computed(module: Any, leaf: str, parameter: Any) -> torch.Tensor | str:
    """Read what vLLM's kernels compute with."""
    if hasattr(module, "w13_weight"):
        readable = parameter.is_floating_point() and leaf.endswith("weight")
        return _unpacked(module, parameter.data) if readable else as_stored(module, leaf, parameter)
    if leaf == "weight" and (weight := private.by_identity(module)) is not None:
        return weight
    if leaf == "sinks":
        return sinks_in_use(module, parameter.data)
    return as_stored(module, leaf, parameter)


class WeightSync(HeldWeights):
    """Calls for a probe of the weight sync; a part of the worker extension, or one by itself."""

    mismatch_reader = staticmethod(as_computed)

    def _mismatch_model(self) -> Any:
        return private.model_of(self)

    def mismatch_ranks(self) -> Ranks:
        return Ranks(attribute(self, private.TP_SIZE), private.gathered)

    def mismatch_rename(self, checkpoint_names: list[str]) -> dict[str, str]:
        return renamed(self._mismatch_model(), checkpoint_names)

    def mismatch_held_json(self, names: list[str], transposed: list[str]) -> str:
        """Return what is held as text, for a server's ``/collective_rpc``."""
        return json.dumps(self.mismatch_held(names, transposed))

    def mismatch_held_adapter(
        self, names: list[str], adapter: int, rank: int = RANK
    ) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Return the same of a LoRA adapter's matrices; zeros where no slot holds the adapter.

        Args:
            names: of an adapter's file, by the checkpoint's modules.
            adapter: vLLM's lora_int_id.
            rank: of its widest matrices.
        """
        try:
            model = self._mismatch_model()
            slots = list(attribute(model, private.SLOTS))
        except MismatchError as error:
            return {}, dict.fromkeys(names, error.message)
        wanted = {name.removesuffix(f".{A}") for name in names if name.endswith(A)}
        modules = {
            own.removesuffix(".weight"): checkpoint.removesuffix(".weight")
            for own, checkpoint in self.mismatch_rename([f"{m}.weight" for m in wanted]).items()
        }
        slot = slots.index(adapter) if adapter in slots else None
        prints, missing = {}, {}
        for path, layer in model.named_modules():
            for part, a, b in _matrices(path, layer, slot, rank):
                module = modules.get(part, part)
                if module not in wanted:
                    continue
                for name, tensor in ((f"{module}.{A}", a), (f"{module}.{B}", b)):
                    if getattr(layer, "tp_size", 1) > 1:
                        missing[name] = SLICED
                    else:
                        prints[name] = asdict(Prints.of(name, tensor))
        return prints, missing

    def mismatch_push(self, path: str, directory: str, seed: int, push: int) -> None:
        """Give the engine one state of a checkpoint.

        Args:
            path: ``load``: the model's own load_weights, as frameworks call it; ``rpc``: vLLM's
                reload, and what it leaves out written into the kernels' layouts.
        """
        checkpoint = Checkpoint(directory, seed)
        if path == "load":
            self._mismatch_model().load_weights(checkpoint.tensors(push))
            return
        self.reload_weights(weights_iterator=checkpoint.tensors(push))  # type: ignore[attr-defined]
        write_unloaded(self._mismatch_model(), checkpoint, push)


# ---------------------------------------------------------------- what is held


def _unpacked(module: Any, weight: torch.Tensor) -> torch.Tensor | str:
    """Return [E, out, in] of experts that their kernel has shuffled, or why not."""
    kernel, pack = experts_kernel(module), expert_packer(module)
    if pack is not None:
        return unshuffled(weight, pack)
    plain = type(kernel).__name__.startswith(("Triton", "CPU", "X86", "Batched"))
    return weight if plain else UNREADABLE


def unshuffled(weight: torch.Tensor, pack: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Invert a function that moves the elements of every expert.

    Args:
        weight: [E, out, in], shuffled.
        pack: that function; it is given the elements' own indices, digit by digit.
    """
    size = weight[0].numel()
    index = torch.arange(size).view(1, *weight.shape[1:])
    places = torch.zeros(size, dtype=torch.int64)
    factor = 1
    while factor < size:
        digit = (index // factor % LOW).to(weight.dtype).contiguous()
        places += pack(digit).flatten().long() * factor
        factor *= LOW
    result = torch.empty_like(weight).flatten(1)
    result[:, places] = weight.flatten(1)
    return result.view_as(weight)


def _matrices(
    path: str, layer: Any, slot: int | None, rank: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (unfused module, A [rank, in], B [out, rank]) of one wrapped layer."""
    stacks = [*zip(*(attribute(layer, name, ()) for name in private.STACKS), strict=False)]
    parent, _, own = path.rpartition(".")
    parts = PACKED[own] if own in PACKED and len(stacks) == len(PACKED[own]) else [own]
    for part, (a, b) in zip(parts, stacks, strict=False):
        if a.ndim != 4:  # [slots, 1, rank, in]: embeddings and experts lie otherwise
            return
        of_a, of_b = a[slot or 0, 0, :rank], b[slot or 0, 0, :, :rank]
        empty = slot is None
        yield f"{parent}.{part}", *(m.new_zeros(m.shape) if empty else m for m in (of_a, of_b))


# ---------------------------------------------------------------- what a reload leaves out


def write_unloaded(model: Any, checkpoint: Checkpoint, push: int) -> None:
    """Write experts and sinks into the kernels' own tensors, in place.

    vLLM's reload copies them into tensors that have no memory while it runs, where a model's class
    loads them without a custom loader (gpt-oss), or leaves experts as loaded, not as their
    kernel wants them (qwen3_moe).
    """
    names = checkpoint.names()
    own_names = {name: theirs for theirs, name in renamed(model, names).items()}
    turned = type(model).__name__ in BY_TURNS  # and [E, in, out] in their checkpoints
    targets = dict(_targets(model, frozenset(names)))
    # Experts with a name each are packed together once all are there.
    parts: dict[tuple[int, str], dict[tuple[int, int], torch.Tensor]] = {}
    for name, tensor in checkpoint.tensors(push):
        # Experts have the checkpoint's names here; the rest may have vLLM's.
        target = targets.get(name) or targets.get(own_names.get(name, name))
        if target is None:
            continue
        module, leaf, slot = target
        own, pack = getattr(module, leaf).data, expert_packer(module)
        if leaf == "sinks":
            sinks_in_use(module, own).copy_(tensor)
            continue
        if slot is not None:
            rows = parts.setdefault((id(module), leaf), {})
            rows[slot] = tensor
            if len(rows) < len(own) * len(expert_parts(leaf)):
                continue
            tensor = torch.cat([rows[place] for place in sorted(rows)]).view_as(own).to(own.dtype)
            del parts[id(module), leaf]
        elif leaf.endswith("weight"):
            tensor = tensor.transpose(1, 2).contiguous() if turned else tensor
            if tensor.shape != own.shape:  # this family's layout is not known here
                continue
        own.copy_(pack(tensor) if pack and leaf.endswith("weight") else tensor)


def _targets(
    model: Any, names: frozenset[str]
) -> Iterator[tuple[str, tuple[Any, str, tuple[int, int] | None]]]:
    """Yield name -> (module, parameter, (expert, part) where experts have a name each)."""
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if leaf == "sinks":
                yield f"{path}.sinks", (module, leaf, None)
            elif hasattr(module, "w13_weight") and leaf in EXPERT_LEAVES:
                prefix = experts_prefix(path)
                if not numbered(prefix, names):
                    yield f"{prefix}.{EXPERT_LEAVES[leaf]}", (module, leaf, None)
                    continue
                for expert in range(len(parameter)):
                    for half, part in enumerate(expert_parts(leaf)):
                        name = f"{prefix}.{expert}.{part}.weight"
                        yield name, (module, leaf, (expert, half))
