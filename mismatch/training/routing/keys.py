"""Keys that sparse attention selects: capture and replay, in any transformers model.

An indexer scores every earlier token and gives attention the K best (DeepSeek-V3.2, and the
families that took it over). Like a router it makes a discrete choice, so it is recorded like one:
of tokens that have more than K to choose from, the ids and the margin of the choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from mismatch.training.packing import Batch
from mismatch.training.routing.capture import Overriding

INDEXER = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.indexer$")


@dataclass(frozen=True, slots=True)
class KeyLayer:
    """One layer with sparse attention, and the module that selects its keys."""

    index: int
    indexer: torch.nn.Module

    @property
    def top_k(self) -> int:
        return int(getattr(self.indexer, "index_topk", 0))


def key_layers(decoder: torch.nn.Module) -> list[KeyLayer]:
    """Return the layers that select single tokens; layers that share a selection are left out."""
    found = [(INDEXER.search(name), module) for name, module in decoder.named_modules()]
    layers = [KeyLayer(int(match[1]), module) for match, module in found if match]
    # Others select pools or blocks of tokens.
    return [each for each in layers if each.top_k and not hasattr(each.indexer, "index_kpool")]


def sparse_top_k(decoder: torch.nn.Module) -> int | None:
    """Return K of the layers that can be read; 0: none of the indexers can; None: no indexer."""
    if layers := key_layers(decoder):
        return layers[0].top_k
    return 0 if any(name.endswith(".indexer") for name, _ in decoder.named_modules()) else None


@dataclass(frozen=True, slots=True)
class LayerKeys:
    """The selection of one layer for R tokens.

    Attributes:
        ids: [R, K] positions in the token's own sequence.
        margin: [R] K-th minus (K+1)-th score of the indexer.
    """

    ids: torch.Tensor
    margin: torch.Tensor


@dataclass(frozen=True, slots=True)
class KeyRows:
    """The tokens of a forward pass whose selections are kept, or replaced.

    Attributes:
        flat: [R] their rows of the flattened [B * S].
        start: [R] column of the first token of each one's sequence.
        replay: [R, L, K] positions to attend to; None: the model's own selection.
    """

    flat: torch.Tensor
    start: torch.Tensor
    replay: torch.Tensor | None = None

    @classmethod
    def of(cls, batch: Batch, wanted: torch.Tensor, replay: torch.Tensor | None) -> KeyRows:
        """Return the rows of those tokens of a batch that ``wanted`` [n] bool marks."""
        flat = batch.rows[wanted.to(batch.rows.device)]
        if batch.position_ids is None:
            return cls(flat, torch.zeros_like(flat), replay)
        return cls(flat, flat - batch.position_ids.reshape(-1)[flat], replay)


class KeyRecorder:
    """The selections of one forward pass; nothing is recorded outside of :meth:`recording`."""

    def __init__(self, layers: list[KeyLayer], rows: KeyRows) -> None:
        self.layers, self.rows = layers, rows
        self.keys: dict[int, LayerKeys] = {}
        self._scores: torch.Tensor | None = None

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call one of torch's functions, and keep the scores of a top-k."""
        out = func(*args, **kwargs)
        if func in (torch.topk, torch.Tensor.topk):
            self._scores = args[0] if args else kwargs["input"]
        return out

    def hook(self, column: int, layer: KeyLayer) -> Any:
        """Read, and where asked for replace, the selection whenever the indexer has run."""

        def read(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            width, rows = output.shape[-1], self.rows
            scores, self._scores = self._scores, None
            if scores is None or scores.shape[:-1] != output.shape[:-1] or width != layer.top_k:
                return output  # it selects in a way that is not known
            best = scores.detach().reshape(-1, scores.shape[-1])[rows.flat].float()
            best = best.topk(width + 1, dim=-1).values
            ids = output.reshape(-1, width)[rows.flat].long() - rows.start[:, None]
            if rows.replay is not None:
                ids, output = rows.replay[:, column].to(output.device), output.clone()
                given = (ids + rows.start[:, None]).to(output.dtype)
                output.view(-1, width)[rows.flat] = given
            self.keys[layer.index] = LayerKeys(ids, best[:, -2] - best[:, -1])
            return output

        return layer.indexer.register_forward_hook(read)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the forward pass inside the block."""
        layers = self.layers if len(self.rows.flat) else []
        handles = [self.hook(column, layer) for column, layer in enumerate(layers)]
        try:
            with Overriding(self.watch) if layers else nullcontext():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def finished(self) -> LayerKeys | None:
        """Return the selections of all layers, ids [R, L, K]; None where one was not seen."""
        found = [self.keys[layer.index] for layer in self.layers if layer.index in self.keys]
        if len(found) < len(self.layers) or len({each.ids.shape for each in found}) != 1:
            return None
        ids, margins = [each.ids for each in found], [each.margin for each in found]
        return LayerKeys(torch.stack(ids, dim=1), torch.stack(margins, dim=1))
