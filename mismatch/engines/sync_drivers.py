"""What a probe of the weight sync asks of an engine: push, read back, drop caches.

How what its kernels compute with is read is in mismatch/engines/held_weights.py.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch.engines.base import Engine
from mismatch.engines.registry import engine_info, probed_engines
from mismatch.errors import MismatchError
from mismatch.models.weight_states import Checkpoint, Prints, state_of
from mismatch.plugins import load
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


class Driver(ABC):
    """One loaded engine whose weights are pushed by its ``EngineInfo.weight_paths``."""

    def __init__(self, engine: Engine, checkpoint: Checkpoint, scratch: Path) -> None:
        self.engine: Any = engine
        self.checkpoint = checkpoint
        self.scratch = scratch

    @staticmethod
    def prepared(engine: EngineSpec, path: str) -> EngineSpec:
        """Return what to start so that this path can be taken.

        Raises:
            MismatchError: it cannot be on this machine or with this model.
        """
        return engine

    @abstractmethod
    def push(self, path: str, push: int) -> None:
        """Give the engine the state of this push; 3: the first weights again."""

    @abstractmethod
    def push_own(self, function: Callable[..., Any], weights: dict[str, Any]) -> None:
        """Do the same by a function of the user's."""

    def held(self, names: list[str], transposed: list[str]) -> Held:
        """Return what the engine holds now; the default: by a call next to its model."""
        return held_from_plain(self.engine._call("mismatch_held", names, transposed)[0])

    def answers(self, prompts: Sequence[list[int]]) -> list[Answer] | None:
        """Return first tokens, with whatever is cached; None: this engine keeps no cache."""
        return None

    @abstractmethod
    def drop_caches(self) -> None:
        """Forget what was computed from older weights."""

    def not_tested(self) -> list[NotTested]:
        """Return ways to new weights that this engine has and this machine does not."""
        return []

    @contextmanager
    def files(self, push: int) -> Iterator[str]:
        """Yield a directory of this state's files, which is there within the block."""
        if not state_of(push):
            yield str(self.checkpoint.directory)
            return
        folder = self.scratch / f"push-{push}"
        try:
            yield str(self.checkpoint.write(push, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def driver_class(engine: str) -> type[Driver]:
    """Return the driver of an engine.

    Raises:
        MismatchError: it has none.
    """
    named = engine_info(engine).sync_driver
    if named is None:
        fault = f"the weight sync of {engine} cannot be probed"
        raise MismatchError(fault, f"one of {', '.join(probed_engines())}")
    driver: type[Driver] = load(named)
    return driver
