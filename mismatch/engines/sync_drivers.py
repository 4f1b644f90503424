"""What a probe of the weight sync asks of an engine: push, read back, drop caches.

How what its kernels compute with is read is in mismatch/engines/held_weights.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from mismatch.engines.base import Engine
from mismatch.engines.registry import engine_info, probed_engines
from mismatch.errors import MismatchError
from mismatch.models.weight_states import (
    Checkpoint,
    Prints,
    state_of,
)
from mismatch.specs import EngineSpec
from mismatch.types import NotTested

Held = tuple[dict[str, Prints], dict[str, str]]  # by checkpoint name; name -> why not


def held_from_plain(answer: Any) -> Held:
    """Read what :meth:`mismatch.engines.held_weights.HeldWeights.mismatch_held` answers."""
    prints, missing = answer
    return {name: Prints.from_plain(plain) for name, plain in prints.items()}, missing


@dataclass(frozen=True, slots=True)
class Answer:
    """First token after a prompt.

    Attributes:
        logprob: nats, of the likeliest token.
        cached: tokens of the prompt that came out of a cache.
    """

    logprob: float
    cached: int


class Driver(Protocol):
    """One loaded engine whose weights are pushed by its ``EngineInfo.weight_paths``."""

    def __init__(self, engine: Engine, checkpoint: Checkpoint, scratch: Path) -> None: ...

    @staticmethod
    def prepared(engine: EngineSpec, path: str) -> EngineSpec:
        """What to start so that this path can be taken.

        Raises:
            MismatchError: it cannot be on this machine or with this model.
        """

    def push(self, path: str, push: int) -> None:
        """Give the engine the state of this push; 3: the first weights again."""

    def push_own(self, function: Callable[..., Any], weights: dict[str, Any]) -> None:
        """The same by a function of the user's."""

    def held(self, names: list[str], transposed: list[str]) -> Held:
        """What the engine holds now."""

    def answers(self, prompts: Sequence[list[int]]) -> list[Answer] | None:
        """First tokens, with whatever is cached; None: this engine keeps no cache."""

    def drop_caches(self) -> None:
        """What is computed from older weights is forgotten."""

    def not_tested(self) -> list[NotTested]:
        """Ways to new weights that this engine has and this machine does not."""


class AsGiven:
    """A driver all of whose paths can be taken by the engine as it was asked for."""

    @staticmethod
    def prepared(engine: EngineSpec, path: str) -> EngineSpec:
        return engine


class CalledDriver(AsGiven):
    """What drivers share whose engine answers calls beside its model, in other processes."""

    def __init__(self, engine: Engine, checkpoint: Checkpoint, scratch: Path) -> None:
        self.engine: Any = engine
        self.checkpoint = checkpoint
        self.scratch = scratch

    def held(self, names: list[str], transposed: list[str]) -> Held:
        return held_from_plain(self.engine._call("mismatch_held", names, transposed)[0])

    @contextmanager
    def files(self, push: int) -> Iterator[str]:
        """A directory of this state's files, within the block."""
        if not state_of(push):
            yield str(self.checkpoint.directory)
            return
        folder = self.scratch / f"push-{push}"
        try:
            yield str(self.checkpoint.write(push, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def driver_class(engine: str) -> type[Driver]:
    """The driver of an engine.

    Raises:
        MismatchError: it has none.
    """
    named = engine_info(engine).sync_driver
    if named is None:
        raise MismatchError(
            f"the weight sync of {engine} cannot be probed", f"one of {', '.join(probed_engines())}"
        )
    module, _, name = named.partition(":")
    driver: type[Driver] = getattr(import_module(module), name)
    return driver
