"""Results of ``mismatch locate`` and their document; plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mismatch.experiments.locate.sites import Site
from mismatch.types import NotTested

Role = Literal["source", "amplifier", "passed on"]
Status = Literal["none", "located", "unlocated"]


@dataclass(frozen=True, slots=True)
class SiteError:
    """One module of one side against the float32 reference, over all tokens that were recorded.

    All errors are relative: root mean square of the difference over that of the reference.

    Attributes:
        error: of its output.
        cosine: of its output to the reference's.
        new: of its output to what the reference's module gives for this side's own input.
        cost: the same of a plain forward in the side's dtype; None where that was not recorded.
        excess: ``new`` over the larger of ``cost`` and the dtype's rounding.
        lowest_excess: the smallest ``excess`` when one sequence is left out.
        gain: error of the reference's output on this side's input, over that input's own error;
            None where the input has no error to speak of.
        other_experts: of a router: share of tokens whose set of experts is another.
    """

    layer: int | None
    site: str
    error: float
    cosine: float
    new: float
    cost: float | None
    excess: float
    lowest_excess: float
    gain: float | None
    role: Role
    other_experts: float | None = None

    @property
    def place(self) -> Site:
        return Site(self.layer, self.site)


@dataclass(frozen=True, slots=True)
class Group:
    """A module that is a source, in one layer or several.

    Attributes:
        layers: empty outside of the layers.
        excess: the largest over the layers.
        explains: share of the side's squared distance at the end that its new error alone, put into
            the float32 reference, reproduces; below 0: it points elsewhere.
        removed: share of the side's mean |distance| at the end that goes where every other new
            error stays and this one is taken out.
        moves: root mean square of what its new error alone does to the end, over that of the
            side's distance. Rounding of all other modules can hide it from the other two.
    """

    site: str
    layers: tuple[int, ...]
    excess: float
    explains: float
    removed: float
    moves: float = 0.0


@dataclass(frozen=True, slots=True)
class PairEffect:
    """Two groups (by their place in the list) taken out together.

    Attributes:
        interaction: ``removed`` less that of each alone.
    """

    first: int
    second: int
    removed: float
    interaction: float


@dataclass(frozen=True, slots=True)
class SideLocation:
    """One side.

    Attributes:
        name: of the scoring, ``vllm:prefill`` or ``fsdp``.
        dtype: that it computes in.
        distance: mean |logprob - reference|, nats, over the action tokens.
        plain_distance: the same of the plain forward in its dtype; None: none was made.
        held: mean |logprob - the run's own| of this side, nats: whether what was recorded is what
            ran; None where the run has no such scoring.
        groups: sources in the order of the forward pass.
        first: place of the first one that explains anything; None: none does.
        explained, removed: of all groups together, as in :class:`Group`.
        reverted: share of its mean |distance| that goes where the side itself runs again with the
            reference's output in place of the first source's; None: no source, or an engine.
        distances, plain_distances: of each sequence; () where there is no plain forward.
    """

    name: str
    role: Literal["engine", "trainer"]
    dtype: str
    distance: float
    plain_distance: float | None
    held: float | None
    sites: tuple[SiteError, ...]
    groups: tuple[Group, ...] = ()
    pairs: tuple[PairEffect, ...] = ()
    first: int | None = None
    explained: float | None = None
    removed: float | None = None
    reverted: float | None = None
    distances: tuple[float, ...] = ()
    plain_distances: tuple[float, ...] = ()

    @property
    def source(self) -> Group | None:
        """The first source."""
        return None if self.first is None else self.groups[self.first]


@dataclass(frozen=True, slots=True)
class Sequence:
    """A sequence of the run that was recorded.

    Attributes:
        index: in the rollout.
        tokens: from its beginning; what follows was left out.
        why: it was taken.
    """

    index: int
    tokens: int
    why: Literal["worst", "random"]


@dataclass(frozen=True, slots=True)
class Location:
    """What ``mismatch locate`` found.

    Attributes:
        reference: whose weights the float32 reference holds.
        tokens: action tokens whose log-probabilities were compared.
        between: mean |train - rollout| on them, nats; None without an engine.
    """

    model: str
    reference: str
    sequences: tuple[Sequence, ...]
    tokens: int
    layers: int
    between: float | None
    sides: tuple[SideLocation, ...]
    not_tested: tuple[NotTested, ...]
    seconds: float = 0.0
