"""What comparing two engines and the trainer gives; plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from mismatch.specs import CheckSpec
from mismatch.types import Estimate, SidePair, Verdict

DIRECTORY = "engines"


def other_spec(spec: CheckSpec) -> CheckSpec:
    """The second engine's own check: the same prompts and law, one pass of the trainer."""
    assert spec.other_engine is not None
    rollout = replace(spec.rollout, engine=spec.other_engine, exact_kl=0)
    return replace(
        spec,
        rollout=rollout,
        other_engine=None,
        noise_floor=False,
        two_passes=None,
        weights_effect=None,
        inject=(),
        gradients=False,
        fixes=(),
        budget_minutes=None,
        verdict="as-is",
    )


def other_place(spec: CheckSpec) -> str:
    """Where the second engine's tokens lie inside the run directory."""
    assert spec.other_engine is not None
    return f"{DIRECTORY}/{spec.other_engine.engine}"


TRAINER = "trainer"
Kind = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Edge:
    """Two of the three parties on the same tokens; ``delta`` is right minus left.

    Attributes:
        parties: left and right: an engine's name, or ``TRAINER``.
        tokens: the engine that sampled these tokens.
        kind: "prefill": both sides scored given tokens, so that the three edges are alike;
            "decode": the left side is what the engine said while it sampled.
        comparison: few metrics; None where it was not measured.
        reason: why not.
    """

    parties: tuple[str, str]
    tokens: str
    kind: Kind
    comparison: SidePair | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One of the two engines.

    Attributes:
        place: of its own tokens inside the run directory; "" for the run's own.
        verdict: its decode against the trainer, as a check of its own would end; None where no
            level applies.
    """

    engine: str
    version: str
    place: str
    verdict: Verdict | None


@dataclass(frozen=True, slots=True)
class Contrast:
    """Mean |delta| of one edge at a party minus that of the edge it has no part in, same tokens.

    Attributes:
        party: at whose corner the edge is; ``edge`` is its other end.
        tokens: the engine that sampled them.
    """

    party: str
    edge: str
    tokens: str
    difference: Estimate


@dataclass(frozen=True, slots=True)
class Triangle:
    """Two engines and the trainer.

    Attributes:
        odd: the party that stands apart: on every set of tokens both its edges are longer than the
            third, by more than chance and more than ``WORTH``; None where none does, or where it
            could not be told.
        factor: how much longer its shorter edge is than the third, at least, over the token sets.
        reason: one sentence: what was decided and on what.
        not_tested: one sentence each.
    """

    sides: tuple[EngineRow, EngineRow]
    edges: tuple[Edge, ...]
    contrasts: tuple[Contrast, ...]
    odd: str | None
    factor: float | None
    reason: str
    not_tested: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.odd is not None and self.factor is None:  # the third edge is 0: null in a document
            object.__setattr__(self, "factor", math.inf)

    @property
    def parties(self) -> tuple[str, str, str]:
        return self.sides[0].engine, self.sides[1].engine, TRAINER

    def edge(self, one: str, other: str, tokens: str, kind: Kind) -> Edge | None:
        """The edge between two parties on one set of tokens, whichever stands left."""
        return next(
            (
                edge
                for edge in self.edges
                if set(edge.parties) == {one, other} and (edge.tokens, edge.kind) == (tokens, kind)
            ),
            None,
        )
