"""What an engine's kernels compute with, under the checkpoint's names, as prints that travel.

vLLM and SGLang fuse q, k and v, gate and up, and all experts of a layer; they pad with zero rows,
and tensor-parallel ranks hold slices. Names and slices are undone here. How a kernel lays out one
tensor is the engine's own affair: its reader gives the values back.

Also here: digests of the weights as loaded, under the same names. They add up and ignore zeros, so
that padding and fused names need no care; only the order of packed experts is known, and the slices
of a rank have none.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mismatch.errors import MismatchError
from mismatch.models.digests import OF_EXPERTS, UNORDERED, digest_tensor
from mismatch.models.weight_states import Prints

if TYPE_CHECKING:
    import torch


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
UNREADABLE = "its layout in the kernel is not known here"
SLICED = "a rank holds a slice; whole parameters are compared"
SPREAD = "the experts are spread over the ranks"
ROWS = {"ColumnParallelLinear", "VocabParallelEmbedding"}  # classes whose ranks hold some rows
COLUMNS = {"RowParallelLinear"}  # and some columns, of the weight alone
COPIED = ("k_proj", "v_proj")  # several ranks may hold the same heads
BY_TURNS = ("GptOssForCausalLM",)  # rows of gate and up of an expert come by turns
HALVES = ("gate_proj", "up_proj")  # of an expert's first matrix, in their order
COMPOSED = "composed_loader"  # of vLLM and SGLang: changes values, as Mamba's A = -exp(A_log)
ROUTED = ".routed_experts"  # a module of vLLM's that checkpoints do not name
Values = Iterator[tuple[str, "torch.Tensor | str"]]  # or why there are none
Gather = Callable[["torch.Tensor", int], "torch.Tensor"]
Reader = Callable[[Any, str, Any], "torch.Tensor | str"]


class Ranks:
    """The tensor-parallel ranks of an engine, as one of them sees them; here: one alone."""

    def __init__(self, count: int = 1, gathered: Gather | None = None) -> None:
        self.count, self._gathered = count, gathered

    def gather(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """Return the slices of all ranks in their order, along an axis; called by all of them."""
        return tensor if self._gathered is None else self._gathered(tensor, axis)


def or_why(read: Callable[..., torch.Tensor | str], *args: Any) -> torch.Tensor | str:
    """Return what a function reads, or which name this version of the engine lacks for it."""
    try:
        return read(*args)
    except MismatchError as error:
        return error.message


def as_stored(module: Any, leaf: str, parameter: Any) -> torch.Tensor | str:
    """Read kernels that compute with the parameter itself."""
    return parameter.data if parameter.is_floating_point() else UNREADABLE


class HeldWeights:
    """The call of a probe that reads an engine's weights; called next to the model."""

    mismatch_reader: Reader = staticmethod(as_stored)

    def mismatch_ranks(self) -> Ranks:
        """Return those that hold slices of the model together."""
        return Ranks()

    def mismatch_rename(self, checkpoint_names: list[str]) -> dict[str, str]:
        """Return the engine's (unfused) name -> checkpoint name, of what its loader renames."""
        return {}

    def mismatch_held(
        self, names: list[str], transposed: list[str]
    ) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Return prints of all parameters by checkpoint name, and why others could not be read.

        Args:
            names: of the checkpoint.
            transposed: of these parameters, those held with their last two axes exchanged.
        """
        prints, missing = {}, {}
        try:
            renamed, model = self.mismatch_rename(names), self._mismatch_model()
            ranks = self.mismatch_ranks()
        except MismatchError as error:
            return {}, dict.fromkeys(names, error.message)
        for name, value in held_tensors(model, self.mismatch_reader, frozenset(names), ranks):
            checkpoint = renamed.get(name, name)
            if isinstance(value, str):
                missing[checkpoint] = value
                continue
            turned = value.transpose(-1, -2) if checkpoint in transposed else value
            prints[checkpoint] = asdict(Prints.of(checkpoint, turned))
        return prints, missing

    def _mismatch_model(self) -> Any:
        raise NotImplementedError


def held_tensors(
    model: Any, read: Reader, names: frozenset[str], ranks: Ranks | None = None
) -> Values:
    """Yield (the engine's name, unfused; values in the layout of the model's class).

    Args:
        names: the checkpoint's; decides whether experts have a name each.
        ranks: that hold slices; None: one holds everything.
    """
    ranks, packed = ranks or Ranks(), packed_in(model)
    halves = type(model).__name__ not in BY_TURNS
    for path, module in model.named_modules(remove_duplicate=False):
        of_experts = hasattr(module, "w13_weight")
        for leaf, parameter in module.named_parameters(recurse=False):
            if of_experts and leaf not in EXPERT_LEAVES:
                continue
            value = or_why(read, module, leaf, parameter)
            if of_experts:
                whole = or_why(_whole_experts, module, leaf, value, halves, ranks)
                yield from _experts(experts_prefix(path), leaf, whole, names)
            elif isinstance(value, str):
                yield f"{path}.{leaf}", value
            else:
                size = getattr(module, "org_vocab_size", None)  # without the rows that pad it
                for part, tensor in parts_of(path, value, module, packed):
                    own = or_why(_whole, module, part, leaf, tensor, ranks)
                    kept = own if size is None or isinstance(own, str) else own[:size]
                    yield f"{part}.{leaf}".lstrip("."), kept


def _whole(module: Any, part: str, leaf: str, tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Gather the slices of a parameter, where ranks hold slices of it."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    # vLLM's layers hold the number of their ranks, SGLang's linear layers their group.
    group = getattr(module, "tp_group", None)
    alone = getattr(module, "tp_size", getattr(group, "world_size", 1)) == 1
    axis: int | None = None
    # Sinks are one a head, in a module that says nothing of ranks.
    if leaf == "sinks" or (kinds & ROWS and not alone):
        axis = 0
    elif not alone and kinds & COLUMNS and leaf == "weight":
        axis = 1
    if ranks.count == 1 or axis is None:
        return tensor
    whole = ranks.gather(tensor, axis)
    copies = getattr(module, "num_kv_head_replicas", 1) if part.endswith(COPIED) else 1
    if copies == 1:
        return whole
    import torch

    return torch.cat(whole.chunk(ranks.count, axis)[::copies], axis)


def _whole_experts(
    module: Any, leaf: str, value: torch.Tensor | str, halves: bool, ranks: Ranks
) -> torch.Tensor | str:
    """Return [E, out, in] or [E, out] of all ranks, which hold slices of every expert."""
    if isinstance(value, str) or ranks.count == 1:
        return value
    if getattr(module, "use_ep", False) or getattr(module, "moe_ep_size", 1) > 1:
        return SPREAD
    import torch

    if leaf.startswith("w2"):  # outputs are added up: the first rank alone adds the bias
        return ranks.gather(value, 2) if leaf == "w2_weight" else value
    parts = value.chunk(2, 1) if halves else (value,)
    return torch.cat([ranks.gather(part, 1) for part in parts], 1)


def experts_prefix(path: str) -> str:
    """Return the beginning of the checkpoint's names of what a layer's fused experts hold."""
    return path.removesuffix(ROUTED)


def numbered(prefix: str, names: frozenset[str]) -> bool:
    """Tell whether the checkpoint has one name an expert."""
    return f"{prefix}.0.down_proj.weight" in names


def expert_parts(leaf: str) -> tuple[str, ...]:
    """Return the checkpoint's matrices of one expert that a fused tensor holds, in their order."""
    return ("down_proj",) if leaf.startswith("w2") else HALVES


def _experts(prefix: str, leaf: str, value: Any, names: frozenset[str]) -> Values:
    """Yield a layer's fused experts, under fused names or under one name an expert."""
    if isinstance(value, str) or not numbered(prefix, names):
        yield f"{prefix}.{EXPERT_LEAVES[leaf]}", value
        return
    parts = expert_parts(leaf)
    for expert, tensor in enumerate(value):
        for part, rows in zip(parts, tensor.chunk(len(parts)), strict=True):
            yield f"{prefix}.{expert}.{part}.weight", rows


def packed_in(model: Any) -> dict[str, list[str]]:
    """Return fused module -> the modules of the checkpoint that it holds, in their order."""
    return {**PACKED, **(getattr(model, "packed_modules_mapping", None) or {})}


def parts_of(
    path: str, tensor: Any, module: Any, packed: dict[str, list[str]]
) -> Iterator[tuple[str, Any]]:
    """Yield (path of an unfused module, its values) of one parameter."""
    parent, _, own = path.rpartition(".")
    sizes = getattr(module, "output_partition_sizes", None) or []
    if own in packed and len(sizes) == len(packed[own]) > 1 and sum(sizes) == tensor.shape[0]:
        for part, piece in zip(packed[own], tensor.split(list(sizes)), strict=True):
            yield f"{parent}.{part}", piece
        return
    yield path, tensor


# ---------------------------------------------------------------- digests once loaded

Owned = Callable[[Any, str, str], bool]  # (module, its unfused name, leaf)
Digests = tuple[dict[str, list[int]], list[str]]
NO_DIGESTS: Digests = ({}, ["(all)"])


def loaded_digests(model: Any, owned: Owned | None = None) -> Digests:
    """Return name (the engine's, unfused) -> digest, and parameters that are not understood.

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
    digests: dict[str, list[int]] = {}
    unknown: list[str] = []
    modules = dict(model.named_modules(remove_duplicate=False))
    packed = packed_in(model)
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # Under its first name; a tied head also under the head's name, as trainers name it.
        if id(parameter) in seen and not name.endswith("lm_head.weight"):
            continue
        seen.add(id(parameter))
        loader = getattr(parameter, "weight_loader", None)
        if not parameter.is_floating_point() or getattr(loader, "__name__", "") == COMPOSED:
            unknown.append(name)  # packed integers, or a function of the checkpoint's values
            continue
        path, _, leaf = name.rpartition(".")
        if leaf in EXPERT_LEAVES:  # of all ranks: each holds a different share
            digests[f"{experts_prefix(path)}.{EXPERT_LEAVES[leaf]}"] = list(
                digest_tensor(parameter.data)[:OF_EXPERTS]
            )
            continue
        module = modules[path]
        parts = UNORDERED if getattr(module, "tp_size", 1) > 1 else None
        for part, tensor in parts_of(path, parameter.data, module, packed):
            if owned is None or owned(module, part.rpartition(".")[2], leaf):
                digests[f"{part}.{leaf}".lstrip(".")] = list(digest_tensor(tensor)[:parts])
    return digests, unknown
