"""What vLLM's kernels compute with, under the checkpoint's names, and ways to give it new weights.

Parameters of a loaded vLLM are not what was loaded: linear layers are repacked (oneDNN keeps no
readable copy), experts are shuffled for their kernel, q, k and v are one matrix. A linear layer is
read by giving its kernel the identity matrix, experts by packing their own indices with the
kernel's own function and inverting that. What cannot be read is named with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mismatch.engines.fused_weights import EXPERT_LEAVES, PACKED
from mismatch.engines.vllm.adapter_sync import SLICED, held_adapter
from mismatch.models.weight_states import Checkpoint, Prints

if TYPE_CHECKING:
    import torch

IDENTITY_ROWS = 1024  # of the identity matrix at a time
LOW = 1 << 7  # indices are packed in digits that bfloat16 holds exactly
UNREADABLE = "its layout in the kernel is not known here"
HALVES = ("gate_proj", "up_proj")
Parts = Iterator[tuple[str, "torch.Tensor"]]


class WeightSync:
    """Calls for a probe of the weight sync; a part of the worker extension, or one by itself."""

    model_runner: Any

    def mismatch_rename(self, checkpoint_names: list[str]) -> dict[str, str]:
        """vLLM's (unfused) name of every checkpoint name that its loader renames."""
        mapper = getattr(self.model_runner.get_model(), "hf_to_vllm_mapper", None)
        if mapper is None:
            return {}
        # Fusing is undone by us, name by name: keep only the renaming.
        stacked, mapper.orig_to_new_stacked = mapper.orig_to_new_stacked, {}
        try:
            names = {mapper.map_name(name): name for name in checkpoint_names}
        finally:
            mapper.orig_to_new_stacked = stacked
        return {name: checkpoint for name, checkpoint in names.items() if name}

    def mismatch_held(
        self, names: list[str], transposed: list[str]
    ) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Prints of all parameters by checkpoint name, and why others could not be read.

        Args:
            names: of the checkpoint.
            transposed: of these parameters, the ones held with their last two axes exchanged.
        """
        renamed: dict[str, str] = self.mismatch_rename(names)
        prints, missing = {}, {}
        for name, value in held_tensors(self.model_runner.get_model(), frozenset(names)):
            checkpoint = renamed.get(name, name)
            if isinstance(value, str):
                missing[checkpoint] = value
                continue
            turned = value.transpose(-1, -2) if checkpoint in transposed else value
            prints[checkpoint] = asdict(Prints.of(checkpoint, turned))
        return prints, missing

    def mismatch_held_json(self, names: list[str], transposed: list[str]) -> str:
        """The same as text, for a server's ``/collective_rpc``."""
        return json.dumps(self.mismatch_held(names, transposed))

    def mismatch_held_adapter(
        self, names: list[str], adapter: int
    ) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """The same of a LoRA adapter's matrices; zeros where no slot holds the adapter."""
        return held_adapter(self.model_runner.get_model(), names, adapter, self.mismatch_rename)

    def mismatch_push(self, path: str, directory: str, seed: int, push: int) -> None:
        """Give the engine one state of a checkpoint.

        Args:
            path: ``load``: the model's own load_weights, as frameworks call it; ``rpc``: vLLM's
                reload, and what it leaves out written into the kernels' layouts.
        """
        checkpoint = Checkpoint(directory, seed)
        if path == "load":
            self.model_runner.get_model().load_weights(checkpoint.tensors(push))
            return
        self.reload_weights(weights_iterator=checkpoint.tensors(push))  # type: ignore[attr-defined]
        write_unloaded(self.model_runner.get_model(), checkpoint, push, self.mismatch_rename)


# ---------------------------------------------------------------- what is held


def held_tensors(
    model: Any, names: frozenset[str] = frozenset()
) -> Iterator[tuple[str, torch.Tensor | str]]:
    """(vLLM's name, unfused; values in the layout of the model's class, or why there are none).

    Args:
        names: the checkpoint's; decides whether experts have a name each.
    """
    packed = {**PACKED, **(getattr(model, "packed_modules_mapping", None) or {})}
    for path, module in model.named_modules(remove_duplicate=False):
        if getattr(module, "tp_size", 1) > 1 and list(module.parameters(recurse=False)):
            for leaf, _ in module.named_parameters(recurse=False):
                yield f"{path}.{leaf}", SLICED
        elif hasattr(module, "w13_weight"):
            yield from _experts(path, module, names)
        else:
            yield from _plain(path, module, packed)


def _plain(
    path: str, module: Any, packed: Mapping[str, list[str]]
) -> Iterator[tuple[str, torch.Tensor | str]]:
    for leaf, parameter in module.named_parameters(recurse=False):
        value: torch.Tensor | str = parameter.data
        if leaf == "weight" and callable(getattr(module, "cpu_linear", None)):
            value = by_identity(module, _input_size(module))
        elif leaf == "sinks":
            value = _sinks_in_use(module, parameter.data)
        elif not parameter.is_floating_point():
            value = UNREADABLE
        if isinstance(value, str):
            yield f"{path}.{leaf}", value
            continue
        for part, tensor in _unfused(path, value, module, packed):
            yield f"{part}.{leaf}".lstrip("."), _unpadded(tensor, module)


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


def _unpadded(tensor: torch.Tensor, module: Any) -> torch.Tensor:
    """Without the rows that vLLM adds to a vocabulary."""
    size = getattr(module, "org_vocab_size", None)
    return tensor if size is None else tensor[:size]


def _unfused(
    path: str, tensor: torch.Tensor, module: Any, packed: Mapping[str, list[str]]
) -> Parts:
    parent, _, own = path.rpartition(".")
    sizes = getattr(module, "output_partition_sizes", None) or []
    if own in packed and len(sizes) == len(packed[own]) > 1 and sum(sizes) == tensor.shape[0]:
        start = 0
        for part, size in zip(packed[own], sizes, strict=True):
            yield f"{parent}.{part}", tensor[start : start + size]
            start += size
        return
    yield path, tensor


# ---------------------------------------------------------------- experts


def _experts(
    path: str, module: Any, names: frozenset[str]
) -> Iterator[tuple[str, torch.Tensor | str]]:
    """Of a layer's fused experts, under fused names or under one name an expert."""
    prefix = path.removesuffix(".routed_experts")
    for leaf, parameter in module.named_parameters(recurse=False):
        if leaf not in EXPERT_LEAVES:
            continue
        fused = f"{prefix}.{EXPERT_LEAVES[leaf]}"
        value: torch.Tensor | str = UNREADABLE
        if parameter.is_floating_point():
            value = _unpacked(module, parameter.data) if leaf.endswith("weight") else parameter.data
        if isinstance(value, str):
            yield fused, value
        elif f"{prefix}.0.down_proj.weight" in names:
            yield from _numbered(prefix, leaf, value)
        else:
            yield fused, value


def _numbered(prefix: str, leaf: str, value: torch.Tensor) -> Parts:
    for expert, tensor in enumerate(value):
        if leaf.startswith("w2"):
            yield f"{prefix}.{expert}.down_proj.weight", tensor
            continue
        for half, part in zip(HALVES, tensor.chunk(2), strict=True):
            yield f"{prefix}.{expert}.{half}.weight", part


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
    loads them without a loader of its own (gpt-oss).
    """
    targets = dict(_writable(model))
    for name, tensor in checkpoint.tensors(push):
        own = next(iter(rename([name])), name)
        target = targets.get(name) or targets.get(own)
        if target is not None:
            target(tensor)


def _writable(model: Any) -> Iterator[tuple[str, Callable[[torch.Tensor], None]]]:
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if leaf == "sinks":
                yield f"{path}.sinks", _writer(_sinks_in_use(module, parameter.data))
            elif hasattr(module, "w13_weight") and leaf in EXPERT_LEAVES:
                fused = f"{path.removesuffix('.routed_experts')}.{EXPERT_LEAVES[leaf]}"
                yield fused, _expert_writer(module, leaf, parameter)


def _writer(target: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def write(tensor: torch.Tensor) -> None:
        target.copy_(tensor)

    return write


def _expert_writer(module: Any, leaf: str, parameter: Any) -> Callable[[torch.Tensor], None]:
    def write(tensor: torch.Tensor) -> None:
        if not leaf.endswith("weight"):
            parameter.data.copy_(tensor)
            return
        laid = tensor.transpose(1, 2).contiguous()  # [E, in, out] in gpt-oss's checkpoints
        pack = _packer(module)
        parameter.data.copy_(laid if pack is None else pack(laid))

    return write
