"""Load a rank's part of a Hugging Face checkpoint into a Megatron-Core model.

What a rank holds follows from the shapes of its parameters: a dimension that is shorter than
the whole tensor's is a slice of it. So one rule serves tensor and expert parallelism, Megatron's
own layers and TransformerEngine's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open

from mismatch.errors import MismatchError
from mismatch.features.megatron.layout import headers
from mismatch.features.megatron.names import Shape, Source

LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..*)")
LOCAL_EXPERT = re.compile(r"(.*\.mlp\.experts\.)(?:(local_experts\.)(\d+)(\..*)|(.*?)(\d+)$)")


def load(model: torch.nn.Module, folder: Path, shape: Shape, experts: int) -> None:
    """Fill a rank's parameters; all ranks call it.

    Args:
        model: the ``GPTModel`` of this rank.
        experts: that this rank holds of every MoE layer.

    Raises:
        MismatchError: a tensor that is missing or of another shape, or one that no rank took.
    """
    stored = headers(folder)
    files = {path: safe_open(path, framework="pt") for path, _ in stored.values()}
    offset = _first_layer(model)
    taken: set[str] = set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = _global(name, offset, parallel_state.get_expert_model_parallel_rank(), experts)
            source = shape.source(whole)
            missing = [each for each in source.tensors if each not in stored]
            if missing:
                fault = f"{folder} has no {missing[0]}, which Megatron-Core's {whole} is made of"
                raise MismatchError(fault, "use the weights that belong to this config.json")
            taken.update(source.tensors)
            parts = [_read(files[stored[each][0]], each, source) for each in source.tensors]
            expert = ".experts." in name
            rank, size = (
                (parallel_state.get_expert_tensor_parallel_rank,
                 parallel_state.get_expert_tensor_parallel_world_size)
                if expert
                else (parallel_state.get_tensor_model_parallel_rank,
                      parallel_state.get_tensor_model_parallel_world_size)
            )  # fmt: skip
            value = _part(_made(parts, source, shape), parameter, rank(), size(), whole, source)
            parameter.copy_(value)
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, taken)
    left = sorted(shape.tensors().keys() - set().union(*of_all))
    if left:
        fault = f"no rank of Megatron-Core's model holds {left[0]} of {folder}"
        raise MismatchError(fault, "score with your own loader: --scorer package.module:Class")


def _first_layer(model: torch.nn.Module) -> int:
    """Return how many layers the earlier pipeline stages hold."""
    layers: Any = model.get_submodule("decoder").layers
    return int(layers[0].layer_number) - 1 if len(layers) else 0


def _global(name: str, first_layer: int, expert_rank: int, experts: int) -> str:
    """Return a parameter's name with the numbers of layer and expert in the whole model."""
    if found := LAYER.fullmatch(name):
        name = f"{found[1]}{int(found[2]) + first_layer}{found[3]}"
    if found := LOCAL_EXPERT.fullmatch(name):
        number = int(found[3] or found[6]) + expert_rank * experts
        rest = f"{found[2]}{number}{found[4]}" if found[2] else f"{found[5]}{number}"
        name = f"{found[1]}{rest}"
    return name


def _read(file: Any, name: str, source: Source) -> torch.Tensor:
    if source.expert is None:
        whole: torch.Tensor = file.get_tensor(name)
        return whole
    one: torch.Tensor = file.get_slice(name)[source.expert : source.expert + 1][0]
    return one


def _made(parts: list[torch.Tensor], source: Source, shape: Shape) -> torch.Tensor:
    """Return the whole parameter as Megatron-Core would hold it on one rank."""
    if source.kind == "qkv":
        grouped = [part.reshape(shape.groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, 1).flatten(0, 1)
    if source.kind == "halves":
        return torch.cat(parts)
    if source.kind == "woven":  # [H, 2 I] or [2 I]: gate and up in turn
        woven = parts[0].T if parts[0].dim() == 2 else parts[0]
        return torch.cat((woven[0::2], woven[1::2]))
    return parts[0].T if source.kind == "turned" else parts[0]


def _part(
    whole: torch.Tensor,
    parameter: torch.nn.Parameter,
    rank: int,
    size: int,
    name: str,
    source: Source,
) -> torch.Tensor:
    """Return this rank's slice."""
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        padding = parameter.shape[0] * size - whole.shape[0]
        whole = torch.nn.functional.pad(whole, (0, 0, 0, padding)) if padding > 0 else whole
    cut = [at for at, length in enumerate(parameter.shape) if length != whole.shape[at]]
    if not cut and whole.shape == parameter.shape:
        return whole
    if len(cut) != 1 or parameter.shape[cut[0]] * size != whole.shape[cut[0]]:
        raise MismatchError(
            f"{name} is {list(whole.shape)} in the checkpoint; a rank of {size} holds "
            f"{list(parameter.shape)} in Megatron-Core",
            "use the weights that belong to this config.json",
        )
    if source.kind in ("halves", "woven"):  # each rank has a part of gate and a part of up
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, cut[0])[rank]
