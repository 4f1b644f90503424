"""A path that the loop tries, and what it lost."""

from __future__ import annotations

from dataclasses import dataclass, field

from mismatch.specs import EngineSpec


@dataclass(frozen=True, slots=True)
class SyncSpec:
    """The path to try."""

    engine: EngineSpec
    path: str = "reload"
    seed: int = 0
    trainer: bool = False
    length: int = 280


@dataclass(frozen=True, slots=True)
class Lost:
    """A parameter that did not arrive."""

    name: str


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a path lost."""

    path: str
    faults: tuple[Lost, ...]
    push_failed: dict[int, str] = field(default_factory=dict)

    @property
    def line(self) -> str:
        return f"{len(self.faults)} parameters do not arrive"
