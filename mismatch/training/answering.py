"""Torch function modes with one hook, and changes of routers that know whether they took hold."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode

from mismatch.errors import MismatchError

if TYPE_CHECKING:
    from mismatch.training.routing import MoeLayer

Given = tuple[tuple[Any, ...], dict[str, Any]]  # args, kwargs


class Answering(TorchFunctionMode):
    """While it is entered, :meth:`answer` is called in place of torch's functions."""

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call gives; the plain one is ``func(*args, **kwargs)``."""
        raise NotImplementedError

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.answer(func, args, kwargs or {})


class RouterChange:
    """An intervention (see mismatch.training.blocks) that has to take hold in every MoE layer.

    Attributes:
        unreached: the error where it did not, with ``{where}`` for the layer, and its fix.
    """

    unreached: ClassVar[tuple[str, str]]

    def __init__(self) -> None:
        self._entered: set[int] = set()
        self._reached: set[int] = set()

    def mode(self, layer: MoeLayer, block: torch.nn.Module) -> AbstractContextManager[Any]:
        self._entered.add(layer.index)
        return self.answering(layer, block)

    def answering(self, layer: MoeLayer, block: torch.nn.Module) -> Answering:
        """The mode of one layer."""
        raise NotImplementedError

    def before_experts(self, layer: MoeLayer, given: Given) -> Given:
        return given

    def reached(self, layer: MoeLayer) -> None:
        """It took hold in this layer."""
        self._reached.add(layer.index)

    def finish(self) -> None:
        missed = sorted(self._entered - self._reached)
        if missed or not self._reached:
            what, fix = self.unreached
            where = f" of layer {missed[0]}" if missed else ""
            raise MismatchError(what.format(where=where), fix)
