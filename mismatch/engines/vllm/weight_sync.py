"""What vLLM's kernels compute with, and ways to give it new weights.

Parameters of a loaded vLLM are not what was loaded: linear layers are repacked (oneDNN keeps no
readable copy), experts are shuffled for their kernel. A linear layer is read by giving its kernel
the identity matrix, experts by packing their own indices with the kernel's own function and
inverting that. What cannot be read is named with the reason.

vLLM wraps every layer that may carry an adapter and stacks the matrices of all slots; q, k and v
(gate and up) are one layer with one stack each. B is stored times alpha / rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mismatch.engines.held_weights import (
    BY_TURNS,
    EXPERT_LEAVES,
    HALVES,
    PACKED,
    SLICED,
    UNREADABLE,
    HeldWeights,
    Ranks,
    as_stored,
    experts_prefix,
    numbered,
)
from mismatch.engines.vllm.private import renamed
from mismatch.models.weight_states import RANK, A, B, Checkpoint, Prints

if TYPE_CHECKING:
    import torch


IDENTITY_ROWS = 1024  # of the identity matrix at a time
LOW = 1 << 7  # indices are packed in digits that bfloat16 holds exactly
Write = Callable[["torch.Tensor"], object]


def as_computed(module: Any, leaf: str, parameter: Any) -> torch.Tensor | str:
    """The reader of vLLM's kernels."""
    if hasattr(module, "w13_weight"):
        readable = parameter.is_floating_point() and leaf.endswith("weight")
        return _unpacked(module, parameter.data) if readable else as_stored(module, leaf, parameter)
    if leaf == "weight" and callable(getattr(module, "cpu_linear", None)):
        return by_identity(module, _input_size(module))
    if leaf == "sinks":
        return _sinks_in_use(module, parameter.data)
    return as_stored(module, leaf, parameter)


class TensorParallel(Ranks):
    """vLLM's own group."""

    def __init__(self, count: int) -> None:
        self.count = count

    def gather(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        from vllm.distributed import get_tp_group

        whole: torch.Tensor = get_tp_group().all_gather(tensor.contiguous(), axis)
        return whole


class WeightSync(HeldWeights):
    """Calls for a probe of the weight sync; a part of the worker extension, or one by itself."""

    model_runner: Any
    mismatch_reader = staticmethod(as_computed)

    def mismatch_ranks(self) -> Ranks:
        parallel = getattr(self, "parallel_config", None)
        return TensorParallel(getattr(parallel, "tensor_parallel_size", 1))

    def mismatch_rename(self, checkpoint_names: list[str]) -> dict[str, str]:
        """vLLM's (unfused) name of every checkpoint name that its loader renames."""
        return renamed(self._mismatch_model(), checkpoint_names)

    def mismatch_held_json(self, names: list[str], transposed: list[str]) -> str:
        """What is held, as text, for a server's ``/collective_rpc``."""
        return json.dumps(self.mismatch_held(names, transposed))

    def mismatch_held_adapter(
        self, names: list[str], adapter: int
    ) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """The same of a LoRA adapter's matrices; zeros where no slot holds the adapter."""
        return held_adapter(self._mismatch_model(), names, adapter, self.mismatch_rename)

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
        write_unloaded(self._mismatch_model(), checkpoint, push, self.mismatch_rename)

    def _mismatch_model(self) -> Any:
        return self.model_runner.get_model()


# ---------------------------------------------------------------- what is held


def _input_size(module: Any) -> int:
    for name in ("input_size_per_partition", "input_size", "embedding_dim"):
        if hasattr(module, name):
            return int(getattr(module, name))
    return int(module.weight.shape[1])


def by_identity(module: Any, width: int) -> torch.Tensor:
    """[out, in] weights of a linear layer as its kernel computes with them.

    Every product has one term that is not 0, so that the values come out as they are.
    """
    import torch

    dtype = module.weight.dtype
    columns = []
    for start in range(0, width, IDENTITY_ROWS):
        rows = torch.arange(start, min(start + IDENTITY_ROWS, width))
        probe = torch.zeros(len(rows), width, dtype=dtype)
        probe[torch.arange(len(rows)), rows] = 1
        columns.append(module.cpu_linear(probe, module.weight, None))
    return torch.cat(columns).t()


def _sinks_in_use(module: Any, parameter: torch.Tensor) -> torch.Tensor:
    """The attention backend's own, which may be a copy of the parameter."""
    for child in module.modules():
        sinks = getattr(getattr(child, "impl", None), "sinks", None)
        if sinks is not None:
            return sinks.data  # type: ignore[no-any-return]
    return parameter


def _kernel(module: Any) -> Any:
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    return getattr(kernel, "fused_experts", None)


def _packer(module: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The function that shuffled this layer's experts; None: they lie as loaded."""
    kernel = _kernel(module)
    if getattr(kernel, "isa", None) is None or getattr(kernel, "_use_zentorch", False):
        return None
    from vllm._custom_ops import cpu_prepack_moe_weight

    return lambda weight: cpu_prepack_moe_weight(weight, kernel.isa)


def _unpacked(module: Any, weight: torch.Tensor) -> torch.Tensor | str:
    """[E, out, in] of experts that their kernel has shuffled, or why not."""
    kernel = _kernel(module)
    if kernel is None:
        return UNREADABLE
    pack = _packer(module)
    if pack is None:
        plain = type(kernel).__name__.startswith(("Triton", "CPU", "X86", "Batched"))
        return weight if plain else UNREADABLE
    return unshuffled(weight, pack)


def unshuffled(weight: torch.Tensor, pack: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The inverse of a function that moves the elements of every expert.

    Args:
        weight: [E, out, in], shuffled.
        pack: that function; it is given the elements' own indices, digit by digit.
    """
    import torch

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


# ---------------------------------------------------------------- what a reload leaves out


def write_unloaded(
    model: Any,
    checkpoint: Checkpoint,
    push: int,
    rename: Callable[[list[str]], dict[str, str]],
) -> None:
    """Write experts and sinks into the kernels' own tensors, in place.

    vLLM's reload copies them into tensors that have no memory while it runs, where a model's class
    loads them without a loader of its own (gpt-oss), or leaves experts as loaded, not as their
    kernel wants them (qwen3_moe).
    """
    names = checkpoint.names()
    own = {name: theirs for theirs, name in rename(names).items()}
    targets = dict(_writable(model, frozenset(names)))
    for name, tensor in checkpoint.tensors(push):
        # Experts have the checkpoint's names here; the rest may have vLLM's.
        write = targets.get(name) or targets.get(own.get(name, name))
        if write is not None:
            write(tensor)


def _writable(model: Any, names: frozenset[str]) -> Iterator[tuple[str, Write]]:
    turned = type(model).__name__ in BY_TURNS  # and [E, in, out] in their checkpoints
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if leaf == "sinks":
                yield f"{path}.sinks", _sinks_in_use(module, parameter.data).copy_
            elif hasattr(module, "w13_weight") and leaf in EXPERT_LEAVES:
                prefix = experts_prefix(path)
                if numbered(prefix, names):
                    yield from _Experts(module, parameter.data).writers(prefix, leaf)
                else:
                    fused = f"{prefix}.{EXPERT_LEAVES[leaf]}"
                    yield fused, _expert_writer(module, leaf, parameter.data, turned)


def _expert_writer(module: Any, leaf: str, own: torch.Tensor, turned: bool) -> Write:
    def write(tensor: torch.Tensor) -> None:
        if not leaf.endswith("weight"):
            own.copy_(tensor)
            return
        laid = tensor.transpose(1, 2).contiguous() if turned else tensor
        if laid.shape == own.shape:  # else this family's layout is not known here
            own.copy_(_packed(module, laid))

    return write


class _Experts:
    """One fused tensor of a layer, written expert by expert and packed once all are there."""

    def __init__(self, module: Any, own: torch.Tensor) -> None:
        self.module, self.own = module, own
        self.given: dict[tuple[int, int], torch.Tensor] = {}

    def writers(self, prefix: str, leaf: str) -> Iterator[tuple[str, Write]]:
        parts = ("down_proj",) if leaf.startswith("w2") else HALVES
        for expert in range(len(self.own)):
            for half, part in enumerate(parts):
                name = f"{prefix}.{expert}.{part}.weight"
                yield name, self._writer((expert, half), len(parts))

    def _writer(self, slot: tuple[int, int], halves: int) -> Write:
        def write(tensor: torch.Tensor) -> None:
            self.given[slot] = tensor
            if len(self.given) == len(self.own) * halves:
                import torch

                rows = [self.given[slot] for slot in sorted(self.given)]
                self.given = {}
                whole = torch.cat(rows).view_as(self.own).to(self.own.dtype)
                self.own.copy_(_packed(self.module, whole))

        return write


def _packed(module: Any, weight: torch.Tensor) -> torch.Tensor:
    pack = _packer(module)
    return weight if pack is None else pack(weight)


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
