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
class GroupError:
    """One parameter group's gradient beside the float32 reference's.

    Attributes:
        norm: 2-norm of the batch's gradient.
        norm_ratio: over the reference's; interval over prompts, as below. None, as the two below,
            where the reference has no gradient here.
        cosine: to the reference's; None too where there is no gradient, which has no direction.
        relative_error: ``|g - ref| / |ref|``.
    """

    group: str
    norm: float
    norm_ratio: Estimate | None
    cosine: Estimate | None
    relative_error: Estimate | None


@dataclass(frozen=True, slots=True)
class GradientRow:
    """One trainer with one loss and one weight, beside the reference.

    Attributes:
        id: ``baseline``, a fix's id, a correction's id, ``ppo-ratio``, ``ppo-override``.
        kind: "baseline", "fix", "correction", "ratio".
        groups: the first is :data:`ALL`.
        bias: size of the mean difference from the reference's gradient over prompts, over the
            reference's size, the sampling noise of that mean taken off; 0 where noise covers it.
        variance: trace of the covariance of the mean gradient over prompts, over the reference's
            squared size: the noise of this batch.
        error_ratio, variance_ratio: relative error and variance over those of the baseline with the
            same loss, paired by prompt; None for the baseline itself and where that has none.
        same_as: "reference" or the id of the row with the same loss whose gradient this is by
            construction; "" where it was taken.
        seconds, peak_bytes: of the backward passes; None where not measured.
    """

    id: str
    kind: str
    loss: Loss
    label: str
    groups: tuple[GroupError, ...]
    bias: Estimate | None
    variance: Estimate | None
    error_ratio: Estimate | None = None
    variance_ratio: Estimate | None = None
    same_as: str = ""
    seconds: float | None = None
    peak_bytes: int | None = None

    @property
    def whole(self) -> GroupError:
        """All parameters together."""
        return self.groups[0]


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """Every row, and what they rest on.

    Attributes:
        reference: name of the float32 pass.
        prompts: P of the batch; ``deciding`` of them have samples of different reward, the others'
            advantages are 0 and so are their gradients.
        sequences, tokens: of these prompts, samples and action tokens.
        advantages: "rewards" (group-normalised), or how they were made where rewards do not differ.
        clip: PPO's ε.
        clipped: share of tokens whose gradient the clip removes in ``ppo-ratio``.
        summary: two or three sentences: what the mismatch does to the gradient and what helps.
        not_tested: one sentence each.
    """

    reference: str
    prompts: int
    deciding: int
    sequences: int
    tokens: int
    advantages: str
    sketch_size: int
    clip: float
    clipped: float | None
    rows: tuple[GradientRow, ...]
    summary: tuple[str, ...]
    not_tested: tuple[str, ...]

    def row(self, id: str, loss: Loss) -> GradientRow | None:
        """One row, or None where it was not measured."""
        return next((row for row in self.rows if row.id == id and row.loss == loss), None)
