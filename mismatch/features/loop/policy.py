"""GRPO's coefficients with PPO's clipped ratio, for one mini-batch. Pure numpy.

The gradient of ``min(ρ A, clip(ρ, 1 - ε, 1 + ε) A)`` is ``ρ A · ∇logprob`` where the first branch
is the smaller, else 0, with ρ = exp(new - old).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mismatch.features.loop.spec import LoopSpec
from mismatch.metrics.importance_weights import (
    BY_ID,
    OVERRIDE,
    Ratios,
    Settings,
    group_advantages,
    per_token,
)
from mismatch.metrics.ppo_passes import ratios, unclipped
from mismatch.types import Floats, Ints, Rollout


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
