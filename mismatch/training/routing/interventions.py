"""Interventions on routers: active inside MoE blocks until their experts run, and nowhere else.

An intervention (replayed routes, injected noise, another dtype) is a torch function mode that is
entered when a block starts and left right before its experts run. It also applies when a
checkpointed layer is recomputed in the backward pass, which may be long after the ``with`` block
has ended: :func:`checkpoint_contexts` restores it there.

- :class:`RouterNoise` adds normal noise to the logits: the effect that other batch neighbours have
  on a router, on machines where they have none. Every token of every layer has other noise, drawn
  from the seed and its position in the rollout: the same for any micro-batches, layout and ranks.
- :class:`RouterDtype` runs the router's linear map in another dtype (float32), from the weights and
  hidden states as they are, and does not round its logits before softmax and choice. The experts
  then get float32 weights, as vLLM's do. The model needs no other load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from mismatch.errors import MismatchError
from mismatch.training.packing import Batch
from mismatch.training.routing.capture import MoeLayer, Override, Overriding
from mismatch.types import Bools, Ints

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]  # args, kwargs


@dataclass
class Installed:
    """Interventions and the blocks they belong to; hooks exist only inside :meth:`hooks`."""

    blocks: list[tuple[MoeLayer, torch.nn.Module]]
    interventions: tuple[RouterIntervention, ...]
    depth: int = 0
    _open: ExitStack = field(default_factory=ExitStack)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Apply the interventions within the block; nested use changes nothing."""
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
            for intervention in self.interventions:
                self._open.enter_context(intervention.mode(layer, block))

        def experts(module: torch.nn.Module, args: Any, kwargs: Any) -> CallArguments:
            self._open.close()
            arguments = (args, kwargs)
            for intervention in self.interventions:
                arguments = intervention.before_experts(layer, arguments)
            return arguments

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
    decoder: torch.nn.Module,
    layers: Sequence[MoeLayer],
    interventions: Sequence[RouterIntervention],
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
    for intervention in interventions:
        intervention.finish()


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """``context_fn`` of torch's checkpointing: the same interventions when a layer is recomputed.

    Without it a backward pass after :func:`intervening` would recompute the layer with the model's
    own choice of experts: an error at best, else the gradients of another forward pass.
    """
    installed = _current.get()
    return nullcontext(), nullcontext() if installed is None else installed.hooks()


def blocks_of(
    decoder: torch.nn.Module, layers: Sequence[MoeLayer]
) -> list[tuple[MoeLayer, torch.nn.Module]]:
    """Return every MoE layer with the block that contains its router and experts.

    In families whose routing is read at the router, that router.

    Raises:
        MismatchError: a layer's experts hang nowhere in the decoder.
    """
    parents = {id(child): parent for parent in decoder.modules() for child in parent.children()}
    parents |= {id(layer.experts): layer.experts for layer in layers if layer.family.reads_output}
    orphans = [layer.index for layer in layers if id(layer.experts) not in parents]
    if orphans:
        fault = f"the block around the experts of layer {orphans[0]} was not found"
        fix = "this family's routers cannot be intercepted: drop --replay-routing and --inject"
        raise MismatchError(fault, fix)
    return [(layer, parents[id(layer.experts)]) for layer in layers]


class RouterIntervention:
    """One change of the routers of a forward pass; fails unless it reached every MoE layer."""

    unreached: ClassVar[tuple[str, str]]
    """Message (with ``{where}`` for the layer) and fix of that error."""

    def __init__(self) -> None:
        self._entered: set[int] = set()
        self._reached: set[int] = set()

    def mode(self, layer: MoeLayer, block: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context manager around the part of a block that runs before its experts."""
        self._entered.add(layer.index)
        return Overriding(self.override(layer, block))

    def override(self, layer: MoeLayer, block: torch.nn.Module) -> Override:
        """Return what is called in place of torch's functions in one layer."""
        raise NotImplementedError

    def before_experts(self, layer: MoeLayer, arguments: CallArguments) -> CallArguments:
        """Return the arguments of the experts, changed or not."""
        return arguments

    def finish(self) -> None:
        """After the forward pass: raise MismatchError unless every layer was reached."""
        missing = sorted(self._entered - self._reached)
        if missing or not self._reached:
            what, fix = self.unreached
            where = f" of layer {missing[0]}" if missing else ""
            raise MismatchError(what.format(where=where), fix)


class RouterNoise(RouterIntervention):
    """Normal noise on the router logits of one forward pass.

    Args:
        sigma: standard deviation, in the unit of the logits.
        seed: of all noise.
        sequences: [n] indices of the forward pass's sequences in the rollout, in order.
        lengths: [n] their lengths in tokens.
        batch: its ``rows`` locate these tokens.
        own: [tokens] bool, those that this rank has, where ranks share a batch; None: all.
    """

    unreached = (
        "--inject router-noise: the router{where} gave no logits that could be disturbed",
        "this family's router is built in a way that is not known: leave --inject out",
    )

    def __init__(
        self,
        sigma: float,
        seed: int,
        sequences: Ints,
        lengths: Ints,
        batch: Batch,
        own: Bools | None = None,
    ) -> None:
        super().__init__()
        self.sigma, self.seed = sigma, seed
        self.sequences, self.lengths, self.batch, self.own = sequences, lengths, batch, own

    def override(self, layer: MoeLayer, block: torch.nn.Module) -> Override:
        """Add the noise to the output of the block's first linear map with E outputs."""
        done = False

        def noisy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal done
            out = func(*args, **kwargs)
            router = func is torch.nn.functional.linear and out.shape[-1] == layer.num_experts
            if done or not router:
                return out
            done = True
            return self.added(layer, out)

        return noisy

    def draw(self, layer: int, experts: int) -> np.ndarray:
        """Return noise of the real tokens (no padding), sequence after sequence: [n, E] float32."""
        parts = [
            np.random.default_rng([self.seed, layer, int(sequence)]).standard_normal(
                (int(length), experts), np.float32
            )
            for sequence, length in zip(self.sequences, self.lengths, strict=True)
        ]
        drawn = np.float32(self.sigma) * np.concatenate(parts)
        return drawn if self.own is None else drawn[self.own]

    def added(self, layer: MoeLayer, logits: torch.Tensor) -> torch.Tensor:
        """``logits`` [..., E] plus the noise of a layer, in the dtype of ``logits``."""
        rows = logits.numel() // layer.num_experts
        noise = torch.zeros(rows, layer.num_experts, device=logits.device)
        drawn = torch.from_numpy(self.draw(layer.index, layer.num_experts))
        noise[self.batch.rows] = drawn.to(logits.device)
        self._reached.add(layer.index)
        return (logits.float() + noise.reshape(logits.shape)).to(logits.dtype)


class RouterDtype(RouterIntervention):
    """Run every router's linear map in ``dtype``, for one forward pass."""

    unreached = (
        "--router-dtype: the router{where} has no linear map onto its experts",
        "this family's router is built in a way that is not known: leave it out",
    )

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def override(self, layer: MoeLayer, block: torch.nn.Module) -> Override:
        def cast(value: Any) -> Any:
            return value.to(self.dtype) if isinstance(value, torch.Tensor) else value

        def upcast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if func is not torch.nn.functional.linear:
                return func(*args, **kwargs)
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            if weight.shape[0] != layer.num_experts:
                return func(*args, **kwargs)
            self._reached.add(layer.index)
            with torch.autocast(weight.device.type, enabled=False):
                return func(*map(cast, args), **{name: cast(x) for name, x in kwargs.items()})

        return upcast
