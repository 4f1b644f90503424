"""Made arrays, the cases that a loss function is run on, and their closed forms. Pure numpy.

Positions that the mask excludes hold values that would show if they were used. No ratio lies on an
edge of the clip, and some lie beyond it on either side of a positive and a negative advantage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch.types import Bools, Floats

KINDS = {
    "ppo-token-mean": "PPO's clip, mean over tokens",
    "ppo-sequence-mean": "PPO's clip, mean over sequences of the mean over tokens",
    "gspo": "sequence ratio, mean over sequences of the mean over tokens",
    "cispo": "clipped ratio as a weight without gradient, mean over tokens",
}
PER_SEQUENCE = ("ppo-sequence-mean", "gspo")
CLIP = 0.2
UNUSED = -0.3  # log-ratio where the mask is 0


@dataclass(frozen=True, slots=True)
class Case:
    """One of KINDS, with importance weights or without, in micro-batches whose results add up."""

    kind: str
    weighted: bool
    micro_batches: int

    @property
    def name(self) -> str:
        """Return its name in a table."""
        split = f" in {self.micro_batches}" if self.micro_batches > 1 else ""
        return f"{self.kind}{', weights' if self.weighted else ''}{split}"


CASES = tuple(
    Case(kind, weighted, parts) for kind in KINDS for weighted in (False, True) for parts in (1, 2)
)


@dataclass(frozen=True, slots=True)
class Batch:
    """Four responses, padded on the right.

    Attributes:
        new: [4, 6] log-probabilities of the policy that is trained.
        old: [4, 6] those that the ratio divides by.
        advantages: [4] of each sequence.
        present: [4, 6] positions that a response has.
        mask: [4, 6] positions that the loss counts: present, and no tool's output.
    """

    new: Floats
    old: Floats
    advantages: Floats
    present: Bools
    mask: Bools

    def weights(self, case: Case) -> Floats | None:
        """Return importance weights [4, 6], one per token, or per sequence for GSPO; or None."""
        if not case.weighted:
            return None
        if case.kind == "gspo":
            return np.repeat([[0.5], [2.0], [1.25], [0.75]], 6, axis=1)
        return np.where(self.mask, 0.5 + (np.arange(24).reshape(4, 6) * 3 % 5) / 4.0, 5.0)


def made() -> Batch:
    """Return the batch of every case; 15 positions count, 9 of them in the first two sequences."""
    rows = (
        (0.5, 0.5, UNUSED, 0.05, 0.5, 0.15),  # GSPO clips it: a mean of 0.34, advantage over 0
        (-0.1, 0.05, -0.5, 0.15),
        (0.05, UNUSED, 0.5, -0.5, -0.1),
        (-0.5, -0.5),  # GSPO clips it: advantage under 0
    )
    ratios = np.array([[*row, *[UNUSED] * (6 - len(row))] for row in rows], np.float64)
    present = np.arange(6) < np.array([[len(row)] for row in rows])
    new = np.asarray(-0.1 - 0.15 * (np.arange(24).reshape(4, 6) * 7 % 17), np.float64)
    advantages = np.array([1.2, -0.7, 0.5, -1.5])
    return Batch(new, new - ratios, advantages, present, present & (ratios != UNUSED))


def closed_form(batch: Batch, case: Case) -> tuple[float, Floats]:
    """Return the loss, and its gradient [4, 6] by ``new``; a split changes neither.

    The gradient of -min(r A, clip(r) A) is -r A where that is the smaller, else 0; of CISPO's
    -min(r, 1.2) A logprob it is -min(r, 1.2) A. arXiv 1707.06347, 2507.18071 and 2506.13585.
    """
    mask, advantage = batch.mask.astype(float), batch.advantages[:, None]
    lengths = np.maximum(mask.sum(1, keepdims=True), 1.0)
    log_ratio = batch.new - batch.old
    if case.kind == "gspo":
        log_ratio = np.broadcast_to((log_ratio * mask).sum(1, keepdims=True) / lengths, mask.shape)
    ratio = np.exp(log_ratio)
    if case.kind == "cispo":
        slope = -np.minimum(ratio, 1.0 + CLIP) * advantage
        loss = slope * batch.new
    else:
        clipped = np.clip(ratio, 1.0 - CLIP, 1.0 + CLIP) * advantage
        loss = -np.minimum(ratio * advantage, clipped)
        slope = np.where(ratio * advantage <= clipped, -ratio * advantage, 0.0)
    share = mask / (len(mask) * lengths) if case.kind in PER_SEQUENCE else mask / mask.sum()
    weights = batch.weights(case)
    share = share if weights is None else share * weights
    return float((share * loss).sum()), np.asarray(share * slope)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a loss function gave for a case; None where it failed.

    Attributes:
        expected: the closed form's loss.
        error: largest difference of a gradient, relative to the largest gradient.
        remark: what is seen of a difference, or why the function failed; "" where they agree.
    """

    case: str
    loss: float | None
    expected: float
    error: float | None
    remark: str


TOLERANCE = 1e-5  # relative; float32 rounds at 6e-8


def judged(batch: Batch, case: Case, loss: float, gradient: Floats) -> Outcome:
    """Compare a loss and its gradient [4, 6] by the new log-probabilities with the closed form."""
    expected, slope = closed_form(batch, case)
    size = float(np.abs(slope).max())
    error, remark = float(np.abs(gradient - slope).max()) / size, ""
    scale = float((gradient * slope).sum() / (slope**2).sum())
    if not np.isfinite(error):
        remark = "the gradient is not finite"
    elif np.abs(gradient[~batch.mask]).max() > TOLERANCE * size:
        remark = "positions outside the mask have a gradient"
    elif error > TOLERANCE and np.abs(gradient - scale * slope).max() <= TOLERANCE * size:
        remark = f"every gradient is {scale:.4g} times that of the formula"
    elif error > TOLERANCE:
        remark = "the gradients of single tokens differ"
    elif not abs(loss - expected) <= TOLERANCE * max(abs(expected), size):
        remark = "the loss differs, its gradient does not"
    return Outcome(case.name, loss, expected, error, remark)
