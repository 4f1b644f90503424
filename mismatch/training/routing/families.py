"""MoE families of transformers: where their routing is read, and which cannot be.

Nearly all call ``experts(hidden, ids, weights)``: what that call is given is what was used. The odd
ones are named here, each with the one place that shows its decision. docs/moe-families.md is made
from these facts and from trials of every family (tools/moe_families.py).
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
class Choice:
    """What a router's own top-k decided.

    Attributes:
        ids: [R, K] as the top-k returned them.
        margin: [R] K-th minus (K+1)-th score; None where it is not finite.
    """

    ids: torch.Tensor
    margin: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Seen:
    """What one call showed.

    Attributes:
        ids: [R, K] integers, in the router's slot order.
        weights: [R, K] floats.
        margin: [R], or None.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    margin: torch.Tensor | None


# (tensors that the module was given, what it returned, the last top-k over its experts) -> routes
Reader = Callable[[list[torch.Tensor], Any, Choice | None], Seen | None]


@dataclass(frozen=True, slots=True)
class Family:
    """How to read one family.

    Attributes:
        module: end of the name of the modules to watch, one per MoE layer.
        after: read when the module has returned, not when it is called.
        more: router classes that are no experts of the module (they skip it).
        note: what is special, one sentence for the docs.
    """

    read: Reader
    module: str = ".experts"
    after: bool = False
    more: int = 0
    note: str = ""


def margin(scores: torch.Tensor, k: int) -> torch.Tensor | None:
    """[R] gap between the K-th and (K+1)-th score; None where it is not finite or K is all."""
    if scores.shape[-1] <= k:
        return None
    with torch.no_grad():
        best = torch.topk(scores.detach().float(), k + 1, dim=-1).values
        gap = (best[..., k - 1] - best[..., k]).reshape(-1)
    return gap if bool(torch.isfinite(gap).all()) else None


def experts_call(given: list[torch.Tensor], output: Any, choice: Choice | None) -> Seen | None:
    """``experts(hidden, ids, weights)``; the margin is the last top-k's that chose these ids."""
    ids = [tensor for tensor in given if tensor.dtype in (torch.int64, torch.int32)]
    weights = [t for t in given[1:] if ids and t.is_floating_point() and t.shape == ids[0].shape]
    if len(ids) != 1 or len(weights) != 1:
        return None
    same = choice is not None and _same_sets(choice.ids, ids[0])
    return Seen(ids[0], weights[0], choice.margin if same and choice is not None else None)


def _llama4(given: list[torch.Tensor], output: Any, choice: Choice | None) -> Seen | None:
    scores, _ = output
    if choice is None:
        return None
    return Seen(choice.ids, scores.gather(-1, choice.ids), choice.margin)


def _phimoe(given: list[torch.Tensor], output: Any, choice: Choice | None) -> Seen:
    logits, weights, ids = output
    return Seen(ids, weights, margin(logits, ids.shape[-1]))


def _zaya(given: list[torch.Tensor], output: Any, choice: Choice | None) -> Seen | None:
    seen = experts_call(given, output, None)
    if seen is None or choice is None:
        return None
    return Seen(choice.ids.reshape(seen.ids.shape), seen.weights, choice.margin)


def _jetmoe(given: list[torch.Tensor], output: Any, choice: Choice | None) -> Seen:
    # Sorted by expert: undo it to have the slots of every token.
    order, _, gates, sizes, logits = output
    rows = logits.shape[0]
    counts = torch.tensor(sizes, device=order.device)
    experts = torch.arange(len(sizes), device=order.device).repeat_interleave(counts)
    ids, weights = torch.empty_like(order), torch.empty_like(gates)
    ids[order], weights[order] = experts, gates
    ids, weights = ids.reshape(rows, -1), weights.reshape(rows, -1)
    return Seen(ids, weights, margin(logits, ids.shape[-1]))


USUAL = Family(experts_call)
ODD: dict[str, Family] = {
    "llama4_text": Family(
        _llama4, ".router", after=True, note="every expert runs on every token; read at its router"
    ),
    "phimoe": Family(
        _phimoe,
        ".router",
        after=True,
        note="picks by repeated maxima, not by top-k; read at its router",
    ),
    "jetmoe": Family(
        _jetmoe,
        ".mlp.router",
        after=True,
        note="the attention's own experts are not read: one set of experts per layer",
    ),
    "zaya": Family(
        _zaya, more=1, note="the router may choose to skip the experts: counted as one more expert"
    ),
    "longcat_flash": Family(
        experts_call, note="zero-computation experts count as experts, after the others"
    ),
    "deepseek_v4": Family(
        experts_call, note="the first layers route by token id: no margin, nothing to replay"
    ),
}


def family_of(config: Any) -> Family:
    """How a model's routing is read, from its (text) configuration."""
    return ODD.get(config.get_text_config().model_type, USUAL)


def count_experts(module: torch.nn.Module, family: Family) -> int | None:
    """E of a watched module, or None where it is not one."""
    for name in COUNTS:
        count = getattr(module, name, None)
        if isinstance(count, int):
            return count + family.more
    return None


def _same_sets(chosen: torch.Tensor, used: torch.Tensor) -> bool:
    chosen, used = chosen.reshape(-1, chosen.shape[-1]), used.reshape(-1, used.shape[-1])
    if chosen.shape != used.shape:
        return False
    return torch.equal(chosen.sort(-1).values.to(used.dtype), used.sort(-1).values)
