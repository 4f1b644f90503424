"""GRPO's coefficients with PPO's clipped ratio, for one mini-batch. Pure numpy.

The gradient of ``min(ρ A, clip(ρ, 1 - ε, 1 + ε) A)`` is ``ρ A · ∇logprob`` where the first branch
is the smaller, else 0, with ρ = exp(new - old).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mismatch.features.loop.spec import LoopSpec
from mismatch.metrics.importance_weights import (
    BY_ID,
    OVERRIDE,
    Ratios,
    Settings,
    group_advantages,
)
from mismatch.metrics.ppo_passes import ratios
from mismatch.types import Bools, Floats, Ints, Rollout


@dataclass
class PolicyLoss:
    """Coefficients of one mini-batch."""

    plain: Floats
    """[A] advantage times correction over the loss's normaliser; 0 outside."""
    old: Floats | None
    """[A] the log-probabilities that the ratio divides by; None: the override, a ratio of 1."""
    clip: float
    largest: float = 0.0
    """Of the ratios seen."""

    def __call__(self, actions: Ints, new: Floats) -> Floats:
        """c of these tokens, [a], from this pass's log-probabilities [a]."""
        plain = self.plain[actions]
        ratio = np.ones(len(new)) if self.old is None else ratios(self.old[actions], new)
        active = unclipped(ratio, plain, self.clip)
        self.largest = max(self.largest, float(ratio.max(initial=0.0)))
        return np.asarray(np.where(active, plain * ratio, 0.0), np.float64)


def deal(rollout: Rollout, mini_batches: int, seed: Sequence[int]) -> list[Ints]:
    """Return prompts of each mini-batch, in seeded order; none is empty."""
    order = np.random.default_rng(list(seed)).permutation(np.unique(rollout.prompt_index))
    return [part for part in np.array_split(order, mini_batches) if len(part)]


def policy_loss(
    rollout: Rollout, train: Floats, engine: Floats, prompts: Ints, loop: LoopSpec
) -> PolicyLoss:
    """Return the coefficients of the mini-batch of these prompts.

    Args:
        train, engine: [A] log-probabilities of the rollout's policy on both sides.
    """
    sequence = rollout.sequence_of_token[rollout.actions]
    inside = np.isin(rollout.prompt_index, prompts)
    assert rollout.rewards is not None
    advantage = np.where(inside, group_advantages(rollout.rewards, rollout.prompt_index), 0.0)
    plain = per_token(advantage, inside[sequence], sequence, loop.loss)
    of_tokens = Ratios.of(train - engine, sequence, train, advantage[sequence])
    for id in loop.corrections:
        plain = plain * BY_ID[id].weights(of_tokens, Settings())
    return PolicyLoss(plain, None if OVERRIDE in loop.corrections else train, loop.clip)


def per_token(
    advantage: Floats, member: Bools, sequence: Ints, loss: Literal["token", "sequence"]
) -> Floats:
    """Return advantages over the loss's normaliser, [A]; 0 outside the mini-batch.

    A token-level loss divides by the action tokens of the mini-batch, a sequence-level loss by its
    samples and the action tokens of each.

    Args:
        advantage: [N] of every sequence.
        member: [A] whether an action token belongs to the mini-batch.
        sequence: [A] sequence of each action token.
    """
    inside = sequence[member]
    if loss == "token":
        share = np.full(len(inside), 1.0 / len(inside))
    else:
        _, code, length = np.unique(inside, return_inverse=True, return_counts=True)
        share = 1.0 / (len(length) * length[code])
    out = np.zeros(len(sequence))
    out[member] = share * advantage[inside]
    return out


def unclipped(ratio: Floats, advantage: Floats, clip: float) -> Bools:
    """Return where PPO's clipped objective has a gradient, [A]; of the advantage the sign counts.

    >>> unclipped(np.array([1.3, 1.3, 0.7, 0.7]), np.array([1.0, -1.0, 1.0, -1.0]), 0.2)
    array([False,  True,  True, False])
    """
    outside = ((advantage > 0) & (ratio > 1.0 + clip)) | ((advantage < 0) & (ratio < 1.0 - clip))
    return np.asarray(~outside, np.bool_)
