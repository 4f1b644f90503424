"""What a probe of the weight sync is asked, and its results; plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mismatch.specs import EngineSpec
from mismatch.types import NotTested

Status = Literal[
    "arrived",
    "stale",  # holds the values of an earlier push
    "partly",  # some experts or blocks arrived, others did not
    "twice",  # the update was added twice
    "scaled",  # the update, or the whole parameter, has another factor
    "rearranged",  # the right values in other places: transposed, exchanged, shuffled again
    "uninitialised",  # zeros, numbers that are not finite, or of another order of magnitude
    "missing",  # of an adapter: the kernels add nothing
    "alias_lost",  # a tied parameter that does not follow its source
    "altered",  # values of no state
    "not_compared",
]
ADAPTER_PATH = "lora"
BACK = 3  # number of the push that brings the first weights back


@dataclass(frozen=True, slots=True)
class SyncSpec:
    """What to probe.

    Attributes:
        path: one of the engine's own; "own" with ``push``.
        push: package.module:function of the user's, called with a state dict and the engine.
        seed: of the updates and of the tokens.
        keep_caches: leave the engine's caches to the path; default: reset after every push.
        trainer: score with transformers too.
        sequences, length: of the tokens that both sides score.
    """

    engine: EngineSpec
    path: str = "reload"
    push: str | None = None
    seed: int = 0
    keep_caches: bool = False
    trainer: bool = True
    sequences: int = 4
    length: int = 280

    @property
    def adapters(self) -> bool:
        """Whether LoRA adapters are pushed, not the model's own parameters."""
        return self.path == ADAPTER_PATH and self.push is None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One parameter after one push.

    >>> Outcome(1, "partly", {"stale": ("expert 3",)}).parts["stale"]
    ('expert 3',)

    Attributes:
        push: 1 and 2: two updates; 3: the first weights again.
        parts: status of parts that did not arrive -> their labels; "exchanged": with which other.
        factor: of "twice" and "scaled": by how much the update was applied; for a rescaled
            parameter, by how much the whole was.
        rounded: it arrived with the engine's own rounding, not bit for bit.
    """

    push: int
    status: Status
    parts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    factor: float | None = None
    rounded: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the checkpoint over all pushes.

    Attributes:
        status: the worst of its pushes.
        reason: why it was not compared.
    """

    name: str
    status: Status
    outcomes: tuple[Outcome, ...] = ()
    reason: str = ""

    @property
    def arrived(self) -> bool:
        return self.status == "arrived"


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """Both sides on the same tokens, in one state. Nats, means over tokens.

    Attributes:
        push: 0: before any; 1, 2: updates; 3: the first weights again.
        apart: mean |engine - trainer|.
        trainer_moved, engine_moved: mean |logprob - the same before any push|.
    """

    push: int
    tokens: int
    apart: float | None
    trainer_moved: float | None
    engine_moved: float


@dataclass(frozen=True, slots=True)
class CacheRow:
    """The same prompts after a push, with what the engine still had in its caches and without.

    Attributes:
        prompts: how many; each longer than a block of the cache.
        differ: how many gave another first token or logprob.
        largest: nats, of the first token's logprob.
    """

    push: int
    prompts: int
    differ: int
    largest: float


@dataclass(frozen=True, slots=True)
class SyncReport:
    """A probe of one path of one engine with one model.

    Attributes:
        path: how weights were pushed: "reload", "load", "rpc", or package.module:function.
        size: of the updates, in each parameter's root mean square.
        push_failed: push -> what the path raised, from the second on.
        facts: versions, device, dtype, seconds of the parts.
    """

    model: str
    engine: str
    path: str
    seed: int
    size: float
    parameters: tuple[Parameter, ...]
    scores: tuple[ScoreRow, ...] = ()
    caches: tuple[CacheRow, ...] = ()
    push_failed: dict[int, str] = field(default_factory=dict)
    not_tested: tuple[NotTested, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    def of_status(self, status: Status) -> tuple[Parameter, ...]:
        """Return parameters of this status."""
        return tuple(p for p in self.parameters if p.status == status)

    @property
    def faults(self) -> tuple[Parameter, ...]:
        """Parameters that were compared and did not arrive."""
        return tuple(p for p in self.parameters if p.status not in ("arrived", "not_compared"))
