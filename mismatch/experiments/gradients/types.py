"""What a gradient check measures and says; plain data, no torch.

A policy-gradient loss is ``-sum_t c_t · logprob_t`` with a coefficient for every action token: the
advantage of its sequence, over the number of tokens of the batch. Trainers are compared, with the
same coefficients on the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mismatch.types import Estimate

Loss = Literal["token", "sequence"]
ALL = "all"
REWARDS = "rewards"


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradient of one trainer (one pass)."""

    name: str
    """Of the pass, e.g. ``fsdp``, ``reference:fp32``, ``fix:fp32``."""
    groups: tuple[str, ...]
    """G names of parameter groups, e.g. ``attention``, those that the model has."""
    squared_norm: NDArray[np.float64]
    """[G] of the whole batch's gradient, exact."""
    dot: NDArray[np.float64] | None
    """[G] with the reference's gradient, exact; None for the reference."""
    squared_norm_reference: NDArray[np.float64] | None
    """[G] of that reference; None likewise."""
    sketches: NDArray[np.float64]
    """[P, G, k] one linear sketch of every prompt's part of the gradient; they sum to the batch's.
    Inner products of sketches estimate those of gradients without bias."""
    prompts: NDArray[np.int64]
    """[P] prompt index of each."""
    seconds: float | None = None
    """Of the passes that took it; None where it is the gradient of another pass."""
    peak_bytes: int | None = None
    """The most of any rank, beyond the loaded weights; None likewise."""
    same_as: str = ""
    """Name of the pass of equal settings whose gradient this is; "" where it was taken."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """One pass whose gradient is taken."""

    name: str
    """Of the pass, :attr:`Gradients.name`."""
    id: str
    """"reference", "baseline", or a fix's id."""
    kind: str
    """"reference", "baseline" or "fix"."""
    label: str
    """In words."""


@dataclass(frozen=True, slots=True)
class GradientBatch:
    """What the gradients of a run were taken of; the same for every pass."""

    GONE = frozenset({"clip", "clipped", "ratio_passes"})  # see mismatch/codec.py

    trainers: tuple[Trainer, ...]
    """The reference first; not all need have come to their end."""
    prompts: tuple[int, ...]
    """P prompt indices, those whose samples have different rewards first."""
    deciding: int
    """How many of them do; the others' coefficients are 0."""
    sequences: int
    """Samples of these prompts."""
    tokens: int
    """Their action tokens."""
    advantages: str
    """"rewards", or how they were made: "seeded signs: …"."""
    sketch_size: int
    failed: dict[str, str] = field(default_factory=dict)
    """Pass -> why it has no gradient; "gradients" stands for all."""
    not_tested: tuple[str, ...] = ()
    """One sentence each."""


@dataclass(frozen=True, slots=True)
class GroupGradient:
    """One parameter group's gradient beside the float32 reference's."""

    GONE = frozenset({"relative_error"})  # see mismatch/codec.py

    group: str
    norm: float
    """2-norm of the batch's gradient."""
    norm_ratio: Estimate | None
    """Over the reference's, with its interval over prompts; None where the reference has none."""
    cosine: Estimate | None
    """To the reference's; None where one of the two is 0, which has no direction."""

    @property
    def silent(self) -> bool:
        """Whether there is no gradient where the reference has one."""
        return self.norm == 0.0 and self.norm_ratio is not None


@dataclass(frozen=True, slots=True)
class GradientRow:
    """One trainer beside the reference."""

    GONE = frozenset({"bias", "variance", "error_ratio", "variance_ratio", "loss"})

    id: str
    """``baseline`` or a fix's id."""
    kind: str
    """"baseline" or "fix"."""
    label: str
    groups: tuple[GroupGradient, ...]
    """The first is :data:`ALL`."""
    same_as: str = ""
    """The row, or "reference", whose gradient this is by construction."""
    seconds: float | None = None
    """Of the backward passes; None where not measured."""
    peak_bytes: int | None = None

    @property
    def whole(self) -> GroupGradient:
        """All parameters together."""
        return self.groups[0]


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """Every row, and what they rest on."""

    GONE = frozenset({"summary", "clip", "clipped"})

    reference: str
    """Name of the float32 pass."""
    prompts: int
    deciding: int
    """How many prompts have samples of different reward; the others have no gradient."""
    sequences: int
    """Samples of these prompts."""
    tokens: int
    """Their action tokens."""
    advantages: str
    """"rewards" (group-normalised), or how they were made where rewards do not differ."""
    sketch_size: int
    rows: tuple[GradientRow, ...]
    not_tested: tuple[str, ...]
    """One sentence each."""

    def row(self, id: str) -> GradientRow | None:
        """Return one row, or None where it was not measured."""
        return next((row for row in self.rows if row.id == id), None)
