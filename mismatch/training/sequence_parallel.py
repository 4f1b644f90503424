"""Sequence parallelism (Ulysses): the rows of a batch split over ranks, heads inside attention.

N ranks share every micro-batch: each has S / N positions of all its rows. Embedding, norms, experts
and head see these positions alone. Attention needs the whole sequence: an all-to-all gives every
rank all positions of H / N heads, the kernel runs as it is, with its masks, windows and sinks, and
a second all-to-all gives the positions back. After Jacobs et al., DeepSpeed-Ulysses
(arXiv 2309.14509); the collectives are differentiable.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mismatch.errors import MismatchError
from mismatch.specs import TrainSpec
from mismatch.training.attention.sink_sdpa import eager_of
from mismatch.training.distributed import World
from mismatch.training.packing import PAD_ID, Batch
from mismatch.types import Bools

SPLIT_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
FLAG = "--sequence-parallel"


def require_splittable(spec: TrainSpec, config: Any) -> None:
    """Refuse a model that cannot be split, before its weights load.

    Raises:
        MismatchError: heads that N does not divide, or layers that mix positions outside attention.
    """
    count, text = spec.sequence_parallel, config.get_text_config()
    if count == 1:
        return
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int) or heads % count:
        fault = f"{FLAG} {count} does not divide the {heads} attention heads of {text.model_type}"
        raise MismatchError(fault, f"give a divisor of {heads}, or leave it out")
    others = sorted(set(getattr(text, "layer_types", None) or ()) - set(SPLIT_LAYERS))
    if others:
        fault = f"{FLAG}: {text.model_type} mixes positions outside attention: {', '.join(others)}"
        raise MismatchError(fault, "leave it out")


@dataclass
class SequenceParallel:
    """This rank's place among the N ranks that share a batch.

    Attributes:
        size: N; 1: nothing is split.
        rank: among the N.
        index: of this group of ranks.
        count: of groups; each takes every ``count``-th micro-batch.
        whole: the batch of the current forward and backward pass, its width a multiple of N.
    """

    size: int
    rank: int
    index: int
    count: int
    group: dist.ProcessGroup | None = None
    whole: Batch | None = None

    @classmethod
    def of(cls, world: World, size: int) -> SequenceParallel:
        """All ranks call it.

        Raises:
            MismatchError: the world cannot be cut into groups of ``size``.
        """
        if size == 1:
            return cls(1, 0, world.rank, world.size)
        if world.size % size:
            fault = f"{FLAG} {size} does not divide the {world.size} ranks"
            raise MismatchError(fault, "set --nproc-per-node to a multiple of it")
        index, rank = divmod(world.rank, size)
        return cls(size, rank, index, world.size // size, _group(size))

    def split(self, batch: Batch) -> Batch:
        """Return this rank's positions of a batch; its ``rows`` stay the whole's: see `local`."""
        if self.size == 1:
            return batch
        # Columns of padding, up to a multiple of N; one more document where rows are packed.
        more, pad = -batch.input_ids.shape[1] % self.size, torch.nn.functional.pad
        ids, mask = pad(batch.input_ids, (0, more), value=PAD_ID), batch.attention_mask
        mask = None if mask is None else pad(mask, (0, more))
        positions = batch.position_ids
        if positions is not None:
            end = torch.arange(more, dtype=positions.dtype, device=positions.device)[None]
            positions = torch.cat([positions, end], dim=1)
        self.whole = replace(batch, input_ids=ids, attention_mask=mask, position_ids=positions)
        width = ids.shape[1] // self.size
        own = slice(self.rank * width, (self.rank + 1) * width)
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        return replace(
            self.whole,
            input_ids=ids[:, own],
            attention_mask=None if mask is None else mask[:, own],
            position_ids=positions[:, own],
            whole=self.whole,
        )

    def local(self, rows: torch.Tensor, width: int) -> tuple[Bools, torch.Tensor]:
        """Return flattened rows [n] of a batch of ``width`` that this rank has.

        Returns:
            [n] bool, which they are; and their flattened rows in this rank's part.
        """
        if self.size == 1:
            return np.ones(len(rows), np.bool_), rows
        part = -(-width // self.size)
        sequence, column = rows // width, rows % width
        here = column // part == self.rank
        return here.cpu().numpy(), (sequence * part + column % part)[here]

    @contextmanager
    def installed(self, implementation: str) -> Iterator[None]:
        """In the block, backward passes included, all-to-all feeds this attention kernel."""
        from transformers import AttentionInterface, AttentionMaskInterface

        if self.size == 1:
            yield
            return
        attention = AttentionInterface._global_mapping
        masks = AttentionMaskInterface._global_mapping
        kernel: Any = attention.get(implementation)
        mask: Any = masks[implementation]
        AttentionInterface.register(implementation, self._attention(kernel))
        AttentionMaskInterface.register(implementation, self._mask(mask))
        try:
            yield
        finally:
            masks[implementation] = mask
            if kernel is None:  # "eager": every family has a different one
                del attention[implementation]
            else:
                attention[implementation] = kernel

    def _mask(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """Masks of the whole sequence, whatever part of it the caller has."""

        def mask(**arguments: Any) -> Any:
            assert self.whole is not None
            length, padding = self.whole.input_ids.shape[1], self.whole.attention_mask
            return build(
                **arguments
                | {"q_length": length, "kv_length": length, "q_offset": 0, "kv_offset": 0}
                | {"attention_mask": None if padding is None else padding.bool()}
            )

        return mask

    def _attention(self, kernel: Callable[..., Any] | None) -> Callable[..., Any]:
        def attention(
            module: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: Any,
            *rest: Any,
            **options: Any,
        ) -> tuple[torch.Tensor, None]:
            assert self.whole is not None
            queries, groups = query.shape[1], key.shape[1]
            # As often as it takes for every rank to have whole groups of heads.
            times = next(n for n in range(1, queries // groups + 1) if groups * n % self.size == 0)
            key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
            heads = slice(*(queries // self.size * n for n in (self.rank, self.rank + 1)))
            if options.get("s_aux") is not None:
                options["s_aux"] = options["s_aux"][heads]
            if "position_ids" in options:
                options["position_ids"] = self.whole.position_ids
            run = kernel or eager_of(module)
            assert run is not None
            # [B, H, S / N, D] to [B, H / N, S, D], and [B, S, H / N, D] to [B, S / N, H, D]
            parts = (self._exchanged(x) for x in (query, key, value))
            # The module as its kernel sees it: with this rank's heads and sinks.
            view = copy.copy(module)
            view.__dict__["num_key_value_groups"] = queries // key.shape[1]
            sinks = getattr(module, "sinks", None)
            if isinstance(sinks, torch.Tensor):
                own = {name: x for name, x in module._parameters.items() if name != "sinks"}
                view._parameters = own
                view.__dict__["sinks"] = sinks[heads]
            return self._exchanged(run(view, *parts, attention_mask, *rest, **options)[0]), None

        return attention

    def _exchanged(self, states: torch.Tensor) -> torch.Tensor:
        """Cut dimension 1 into N parts, send one to each rank, and join theirs on dimension 2."""
        batch, cut, joined, size = states.shape
        parts = states.reshape(batch, self.size, cut // self.size, joined, size).movedim(1, 0)
        whole: torch.Tensor = _Exchange.apply(parts, self.group)  # type: ignore[no-untyped-call]
        return whole.movedim(0, 2).flatten(2, 3)


@cache
def _group(size: int) -> dist.ProcessGroup:
    subgroups: Any = dist.new_subgroups  # it has no types
    own: dist.ProcessGroup = subgroups(group_size=size)[0]
    return own


class _Exchange(torch.autograd.Function):
    """All-to-all: part n of [N, …] goes to rank n; part n of the result came from rank n."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(grad, ctx.group), None


def _exchanged(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = parts.contiguous()
    out = torch.empty_like(parts)
    dist.all_to_all_single(out.view(torch.uint8), parts.view(torch.uint8), group=group)
    return out
