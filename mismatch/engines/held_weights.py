"""What an engine's kernels compute with, under the checkpoint's names, as prints that travel.

vLLM and SGLang fuse q, k and v, gate and up, and all experts of a layer; that is undone here. How
a kernel lays out one tensor is the engine's own affair: its reader gives the values back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mismatch.engines.fused_weights import EXPERT_LEAVES, packed_in, parts_of
from mismatch.models.weight_states import Prints

if TYPE_CHECKING:
    import torch

UNREADABLE = "its layout in the kernel is not known here"
SLICED = "a rank holds a slice; whole parameters are compared"
HALVES = ("gate_proj", "up_proj")  # of an expert's first matrix, in their order
ROUTED = ".routed_experts"  # a module of vLLM's that checkpoints do not name
Values = Iterator[tuple[str, "torch.Tensor | str"]]  # or why there are none
Reader = Callable[[Any, str, Any], "torch.Tensor | str"]


def as_stored(module: Any, leaf: str, parameter: Any) -> torch.Tensor | str:
    """The reader of kernels that compute with the parameter itself."""
    return parameter.data if parameter.is_floating_point() else UNREADABLE


class HeldWeights:
    """The call of a probe that reads an engine's weights; a part of what is called beside it."""

    mismatch_reader: Reader = staticmethod(as_stored)

    def mismatch_rename(self, checkpoint_names: list[str]) -> dict[str, str]:
        """The engine's (unfused) name of every checkpoint name that its loader renames."""
        return {}

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
        model = self._mismatch_model()
        for name, value in held_tensors(model, self.mismatch_reader, frozenset(names)):
            checkpoint = renamed.get(name, name)
            if isinstance(value, str):
                missing[checkpoint] = value
                continue
            turned = value.transpose(-1, -2) if checkpoint in transposed else value
            prints[checkpoint] = asdict(Prints.of(checkpoint, turned))
        return prints, missing

    def _mismatch_model(self) -> Any:
        raise NotImplementedError


def held_tensors(model: Any, read: Reader, names: frozenset[str]) -> Values:
    """(the engine's name, unfused; values in the layout of the model's class).

    Args:
        names: the checkpoint's; decides whether experts have a name each.
    """
    packed = packed_in(model)
    for path, module in model.named_modules(remove_duplicate=False):
        experts = hasattr(module, "w13_weight")
        sliced = getattr(module, "tp_size", 1) > 1
        for leaf, parameter in module.named_parameters(recurse=False):
            if sliced:
                yield f"{path}.{leaf}", SLICED
            elif not experts:
                value = read(module, leaf, parameter)
                yield from _plain(path, leaf, value, module, packed)
            elif leaf in EXPERT_LEAVES:
                yield from _experts(path, leaf, read(module, leaf, parameter), names)


def _plain(path: str, leaf: str, value: Any, module: Any, packed: dict[str, list[str]]) -> Values:
    if isinstance(value, str):
        yield f"{path}.{leaf}", value
        return
    for part, tensor in parts_of(path, value, module, packed):
        size = getattr(module, "org_vocab_size", None)  # without the rows that pad a vocabulary
        yield f"{part}.{leaf}".lstrip("."), tensor if size is None else tensor[:size]


def experts_prefix(path: str) -> str:
    """Of the names in a checkpoint of what a layer's fused experts hold."""
    return path.removesuffix(ROUTED)


def numbered(prefix: str, names: frozenset[str]) -> bool:
    """Whether the checkpoint has one name an expert."""
    return f"{prefix}.0.down_proj.weight" in names


def _experts(path: str, leaf: str, value: Any, names: frozenset[str]) -> Values:
    """Of a layer's fused experts, under fused names or under one name an expert."""
    prefix = experts_prefix(path)
    if isinstance(value, str) or not numbered(prefix, names):
        yield f"{prefix}.{EXPERT_LEAVES[leaf]}", value
        return
    for expert, tensor in enumerate(value):
        parts = ("down_proj",) if leaf.startswith("w2") else HALVES
        for part, rows in zip(parts, tensor.chunk(len(parts)), strict=True):
            yield f"{prefix}.{expert}.{part}.weight", rows
