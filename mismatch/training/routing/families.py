"""MoE families of transformers: which module shows the routing, and how it is read there.

Nearly all call ``experts(hidden, ids, weights)``, whose arguments are the routing. The exceptions
are listed here. docs/moe-families.md is generated from this table and from trials of every family
(tools/moe_families.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

LAYER = re.compile(r"(?:^|\.)(?:layers|blocks)\.(\d+)\.")
COUNTS = ("num_experts", "total_experts", "num_router_classes")
CAPTURE_FIX = "run without routing: --no-routing"


@dataclass(frozen=True, slots=True)
class TopkChoice:
    """The result of a router's own top-k.

    Attributes:
        ids: [R, K] as the top-k returned them.
        margin: [R] K-th minus (K+1)-th score; None where it is not finite.
    """

    ids: torch.Tensor
    margin: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ObservedRoutes:
    """The routing that one call showed.

    Attributes:
        ids: [R, K] integers, in the router's slot order.
        weights: [R, K] floats.
        margin: [R], or None.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    margin: torch.Tensor | None


# (tensor arguments of the module, its output, the last top-k over its experts) -> routes
Reader = Callable[[list[torch.Tensor], Any, TopkChoice | None], ObservedRoutes | None]


@dataclass(frozen=True, slots=True)
class Family:
    """How to read the routing of one family.

    Attributes:
        module: suffix of the names of the modules to hook, one per MoE layer.
        reads_output: hook after the module's forward, not before it.
        extra_choices: choices of the router that are no experts of the module (skipping it).
        note: for the docs, one sentence.
    """

    read: Reader
    module: str = ".experts"
    reads_output: bool = False
    extra_choices: int = 0
    note: str = ""


def margin(scores: torch.Tensor, k: int) -> torch.Tensor | None:
    """[R] gap between the K-th and (K+1)-th score; None where it is not finite or K is all."""
    if scores.shape[-1] <= k:
        return None
    with torch.no_grad():
        best = torch.topk(scores.detach().float(), k + 1, dim=-1).values
        gap = (best[..., k - 1] - best[..., k]).reshape(-1)
    return gap if bool(torch.isfinite(gap).all()) else None


def experts_call(
    inputs: list[torch.Tensor], output: Any, choice: TopkChoice | None
) -> ObservedRoutes | None:
    """``experts(hidden, ids, weights)``; the margin is that of the last top-k with these ids."""
    ids = [tensor for tensor in inputs if tensor.dtype in (torch.int64, torch.int32)]
    weights = [t for t in inputs[1:] if ids and t.is_floating_point() and t.shape == ids[0].shape]
    if len(ids) != 1 or len(weights) != 1:
        return None
    same = choice is not None and _same_sets(choice.ids, ids[0])
    return ObservedRoutes(
        ids[0], weights[0], choice.margin if same and choice is not None else None
    )


def _llama4(
    inputs: list[torch.Tensor], output: Any, choice: TopkChoice | None
) -> ObservedRoutes | None:
    scores, _ = output
    if choice is None:
        return None
    return ObservedRoutes(choice.ids, scores.gather(-1, choice.ids), choice.margin)


def _phimoe(inputs: list[torch.Tensor], output: Any, choice: TopkChoice | None) -> ObservedRoutes:
    logits, weights, ids = output
    return ObservedRoutes(ids, weights, margin(logits, ids.shape[-1]))


def _zaya(
    inputs: list[torch.Tensor], output: Any, choice: TopkChoice | None
) -> ObservedRoutes | None:
    routes = experts_call(inputs, output, None)
    if routes is None or choice is None:
        return None
    return ObservedRoutes(choice.ids.reshape(routes.ids.shape), routes.weights, choice.margin)


def _jetmoe(inputs: list[torch.Tensor], output: Any, choice: TopkChoice | None) -> ObservedRoutes:
    # Sorted by expert: undo it to have the slots of every token.
    order, _, gates, sizes, logits = output
    rows = logits.shape[0]
    counts = torch.tensor(sizes, device=order.device)
    experts = torch.arange(len(sizes), device=order.device).repeat_interleave(counts)
    ids, weights = torch.empty_like(order), torch.empty_like(gates)
    ids[order], weights[order] = experts, gates
    ids, weights = ids.reshape(rows, -1), weights.reshape(rows, -1)
    return ObservedRoutes(ids, weights, margin(logits, ids.shape[-1]))


DEFAULT_FAMILY = Family(experts_call)
SPECIAL_FAMILIES: dict[str, Family] = {
    "llama4_text": Family(
        _llama4,
        ".router",
        reads_output=True,
        note="every expert runs on every token; read at its router",
    ),
    "phimoe": Family(
        _phimoe,
        ".router",
        reads_output=True,
        note="picks by repeated maxima, not by top-k; read at its router",
    ),
    "jetmoe": Family(
        _jetmoe,
        ".mlp.router",
        reads_output=True,
        note="the attention's own experts are not read: one set of experts per layer",
    ),
    "zaya": Family(
        _zaya,
        extra_choices=1,
        note="the router may choose to skip the experts: counted as one more expert",
    ),
    "longcat_flash": Family(
        experts_call, note="zero-computation experts count as experts, after the others"
    ),
    "deepseek_v4": Family(
        experts_call, note="the first layers route by token id: no margin, nothing to replay"
    ),
}


def family_of(config: Any) -> Family:
    """The family of a model, from its (text) configuration."""
    return SPECIAL_FAMILIES.get(config.get_text_config().model_type, DEFAULT_FAMILY)


def count_experts(module: torch.nn.Module, family: Family) -> int | None:
    """E of a module of experts (or router); None where it is not one."""
    for name in COUNTS:
        count = getattr(module, name, None)
        if isinstance(count, int):
            return count + family.extra_choices
    return None


def _same_sets(chosen: torch.Tensor, used: torch.Tensor) -> bool:
    chosen, used = chosen.reshape(-1, chosen.shape[-1]), used.reshape(-1, used.shape[-1])
    if chosen.shape != used.shape:
        return False
    return torch.equal(chosen.sort(-1).values.to(used.dtype), used.sort(-1).values)
