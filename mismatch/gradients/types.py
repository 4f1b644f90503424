"""What a gradient check measures and says; plain data, no torch.

A policy-gradient loss is ``-sum_t c_t · logprob_t`` with a coefficient for every action token: the
advantage of its sequence, over the loss's normaliser, times whatever weight a correction or a PPO
ratio puts on it. All that is compared here is a choice of coefficients and of a trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mismatch.types import Estimate

Loss = Literal["token", "sequence"]
LOSSES: tuple[Loss, ...] = ("token", "sequence")
GROUPS = ("attention", "sinks", "router", "experts", "mlp", "embeddings", "norms", "head", "other")
ALL = "all"


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients of one trainer (one pass) for one vector of coefficients.

    Attributes:
        name: of the pass, e.g. ``fsdp``, ``reference:fp32``, ``fix:fp32``.
        coefficients: name of the vector, e.g. ``token``, ``sequence:tis-token``.
        groups: G names of parameter groups, those of :data:`GROUPS` that the model has.
        squared_norm: [G] of the whole batch's gradient, exact.
        dot: [G] with the reference's gradient for the same loss, exact; None for the reference.
        squared_norm_reference: [G] of that reference; None likewise.
        sketches: [P, G, k] float64, one linear sketch of every prompt's part of the gradient; they
            sum to the batch's. Inner products of sketches estimate those of gradients without bias.
        prompts: [P] prompt index of each.
    """

    name: str
    coefficients: str
    groups: tuple[str, ...]
    squared_norm: NDArray[np.float64]
    dot: NDArray[np.float64] | None
    squared_norm_reference: NDArray[np.float64] | None
    sketches: NDArray[np.float64]
    prompts: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GroupError:
    """One parameter group's gradient beside the float32 reference's.

    Attributes:
        norm: 2-norm of the batch's gradient.
        norm_ratio: over the reference's.
        cosine: to the reference's; interval over prompts.
        relative_error: ``|g - ref| / |ref|``; interval over prompts.
    """

    group: str
    norm: float
    norm_ratio: float | None
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
        seconds, peak_bytes: of the backward passes; None where not measured.
    """

    id: str
    kind: str
    loss: Loss
    label: str
    groups: tuple[GroupError, ...]
    bias: Estimate | None
    variance: Estimate | None
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
        advantages: "rewards" (group-normalised), or how they were made where rewards do not differ.
        clip: PPO's ε.
        clipped: share of tokens whose gradient the clip removes in ``ppo-ratio``.
        summary: two or three sentences: what the mismatch does to the gradient and what helps.
        not_tested: one sentence each.
    """

    reference: str
    prompts: int
    deciding: int
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
        return next((one for one in self.rows if one.id == id and one.loss == loss), None)
