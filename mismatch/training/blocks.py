"""Changing what routers do: inside MoE blocks, up to the moment the experts run, and nowhere else.

An intervention (replayed routes, injected noise) is a torch function mode that is entered when a
block of a layer starts and left right before its experts run. It has to hold for the forward pass
and for its recomputation in the backward pass of a checkpointed layer, which may come long after
the ``with`` block has ended: :func:`checkpoint_contexts` carries it there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from mismatch.errors import MismatchError
from mismatch.training.answering import Given
from mismatch.training.routing import MoeLayer


class Intervention(Protocol):
    """One change of what the routers of a forward pass do."""

    def mode(self, layer: MoeLayer, block: torch.nn.Module) -> AbstractContextManager[Any]:
        """What is entered around the part of a block that comes before its experts."""

    def before_experts(self, layer: MoeLayer, given: Given) -> Given:
        """The arguments of the experts, changed or as they are."""

    def finish(self) -> None:
        """After the forward pass: raise MismatchError if it did not reach every layer."""


@dataclass
class Installed:
    """Interventions and the blocks they belong to; hooks exist only inside :meth:`hooks`."""

    blocks: list[tuple[MoeLayer, torch.nn.Module]]
    interventions: tuple[Intervention, ...]
    depth: int = 0
    _open: ExitStack = field(default_factory=ExitStack)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Intervene within the block; nested use changes nothing."""
        handles = []
        self.depth += 1
        if self.depth == 1:
            for layer, block in self.blocks:
                handles += self._hook(layer, block)
        try:
            yield
        finally:
            self.depth -= 1
            for handle in handles:
                handle.remove()
            self._open.close()

    def _hook(self, layer: MoeLayer, block: torch.nn.Module) -> list[Any]:
        def enter(module: torch.nn.Module, args: Any) -> None:
            for one in self.interventions:
                self._open.enter_context(one.mode(layer, block))

        def experts(module: torch.nn.Module, args: Any, kwargs: Any) -> Given:
            self._open.close()
            given = (args, kwargs)
            for one in self.interventions:
                given = one.before_experts(layer, given)
            return given

        def leave(module: torch.nn.Module, args: Any, out: Any) -> None:
            self._open.close()

        around = [
            block.register_forward_pre_hook(enter),
            block.register_forward_hook(leave, always_call=True),
        ]
        if block is layer.experts:
            return around
        # Before the recorder's hook, so that what is recorded is what runs.
        hook = layer.experts.register_forward_pre_hook(experts, prepend=True, with_kwargs=True)
        return [*around, hook]


_current: ContextVar[Installed | None] = ContextVar("interventions", default=None)


@contextmanager
def intervening(
    decoder: torch.nn.Module, layers: Sequence[MoeLayer], interventions: Sequence[Intervention]
) -> Iterator[None]:
    """Apply interventions to the forward passes inside the block (and their recomputation).

    Raises:
        MismatchError: an intervention did not reach every MoE layer.
    """
    if not interventions:
        yield
        return
    installed = Installed(blocks_of(decoder, layers), tuple(interventions))
    token = _current.set(installed)
    try:
        with installed.hooks():
            yield
    finally:
        _current.reset(token)
    for one in interventions:
        one.finish()


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """``context_fn`` of torch's checkpointing: the same interventions when a layer is run again.

    Without it a backward pass that comes after :func:`intervening` would recompute the layer with
    the model's own choice of experts: an error at best, else gradients of another forward.
    """
    installed = _current.get()
    return nullcontext(), nullcontext() if installed is None else installed.hooks()


def blocks_of(
    decoder: torch.nn.Module, layers: Sequence[MoeLayer]
) -> list[tuple[MoeLayer, torch.nn.Module]]:
    """Every MoE layer with the module that holds its experts and asks the router.

    In families that show their decision in the router alone, that router.

    Raises:
        MismatchError: a layer's experts hang nowhere in the decoder.
    """
    parents = {id(child): parent for parent in decoder.modules() for child in parent.children()}
    parents |= {id(layer.experts): layer.experts for layer in layers if layer.family.after}
    lost = [layer.index for layer in layers if id(layer.experts) not in parents]
    if lost:
        raise MismatchError(
            f"the block around the experts of layer {lost[0]} was not found",
            "this family's routers cannot be intercepted: drop --replay-routing and --inject",
        )
    return [(layer, parents[id(layer.experts)]) for layer in layers]
