"""What a gradient check measures and says; plain data, no torch.

A policy-gradient loss is ``-sum_t c_t · logprob_t`` with a coefficient for every action token: the
advantage of its sequence, over the loss's normaliser, times whatever weight a correction or a PPO
ratio puts on it. All that is compared here is a choice of coefficients and of a trainer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mismatch.types import Estimate

Loss = Literal["token", "sequence"]
LOSSES: tuple[Loss, ...] = ("token", "sequence")
ALL = "all"
REWARDS = "rewards"
PPO_RATIO, PPO_OVERRIDE = "ppo-ratio", "ppo-override"


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients of one trainer (one pass) for one vector of coefficients.

    Attributes:
        name: of the pass, e.g. ``fsdp``, ``reference:fp32``, ``fix:fp32``.
        coefficients: name of the vector, e.g. ``token``, ``sequence:tis-token``.
        groups: G names of parameter groups, e.g. ``attention``, those that the model has.
        squared_norm: [G] of the whole batch's gradient, exact.
        dot: [G] with the reference's gradient for the same loss, exact; None for the reference.
        squared_norm_reference: [G] of that reference; None likewise.
        sketches: [P, G, k] float64, one linear sketch of every prompt's part of the gradient; they
            sum to the batch's. Inner products of sketches estimate those of gradients without bias.
        prompts: [P] prompt index of each.
        seconds, peak_bytes: of the passes that took it (memory: the most of any rank, beyond the
            loaded weights); None where it is the gradient of another pass, see ``same_as``.
        same_as: "pass coefficients" whose gradient this is by construction (equal settings, or
            equal coefficients); "" where it was taken.
    """

    name: str
    coefficients: str
    groups: tuple[str, ...]
    squared_norm: NDArray[np.float64]
    dot: NDArray[np.float64] | None
    squared_norm_reference: NDArray[np.float64] | None
    sketches: NDArray[np.float64]
    prompts: NDArray[np.int64]
    seconds: float | None = None
    peak_bytes: int | None = None
    same_as: str = ""

    @property
    def loss(self) -> Loss:
        """The loss that the coefficients belong to."""
        return "sequence" if self.coefficients.startswith("sequence") else "token"

    @property
    def weight(self) -> str:
        """What else multiplies them: a correction's id, PPO_RATIO, PPO_OVERRIDE; "" for nothing."""
        return self.coefficients.partition(":")[2]


@dataclass(frozen=True, slots=True)
class Trainer:
    """One pass whose gradient is taken.

    Attributes:
        name: of the pass, :attr:`Gradients.name`.
        id: "reference", "baseline", a fix's id, "ppo".
        kind: "reference", "baseline", "fix", or "ratio" (PPO's new pass with injected noise).
        label: in words.
    """

    name: str
    id: str
    kind: str
    label: str


@dataclass(frozen=True, slots=True)
class GradientBatch:
    """What the gradients of a run were taken of; the same for every pass.

    Attributes:
        trainers: the reference first; not all need have come to their end.
        prompts: P prompt indices, those whose samples have different rewards first.
        deciding: how many of them do; the others' coefficients are 0.
        sequences, tokens: of these prompts, samples and action tokens.
        advantages: "rewards", or how they were made: "seeded signs: …".
        clip: PPO's ε.
        clipped: share of the batch's tokens whose gradient the clip removes; None: no two passes.
        ratio_passes: names of the old and the new scoring of PPO's ratio; None likewise.
        failed: pass -> why it has no gradient; "gradients" stands for all.
        not_tested: one sentence each.
    """

    trainers: tuple[Trainer, ...]
    prompts: tuple[int, ...]
    deciding: int
    sequences: int
    tokens: int
    advantages: str
    sketch_size: int
    clip: float
    clipped: float | None
    ratio_passes: tuple[str, str] | None
    failed: dict[str, str] = field(default_factory=dict)
    not_tested: tuple[str, ...] = ()


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
    """One trainer with one loss and one weight, beside the reference."""

    GONE = frozenset({"bias", "variance", "error_ratio", "variance_ratio"})

    id: str
    """``baseline``, a fix's id, a correction's id, ``ppo-ratio``, ``ppo-override``."""
    kind: str
    """"baseline", "fix", "correction", "ratio"."""
    loss: Loss
    label: str
    groups: tuple[GroupGradient, ...]
    """The first is :data:`ALL`."""
    same_as: str = ""
    """The row of the same loss, or "reference", whose gradient this is by construction."""
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

    GONE = frozenset({"summary"})

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
    clip: float
    """PPO's ε."""
    clipped: float | None
    """Share of tokens whose gradient the clip removes in ``ppo-ratio``."""
    rows: tuple[GradientRow, ...]
    not_tested: tuple[str, ...]
    """One sentence each."""

    @property
    def loss(self) -> Loss:
        """The loss that is shown first: the token-level one, where it was taken."""
        return next(loss for loss in LOSSES if any(row.loss == loss for row in self.rows))

    def row(self, id: str, loss: Loss) -> GradientRow | None:
        """Return one row, or None where it was not measured."""
        return next((row for row in self.rows if row.id == id and row.loss == loss), None)
