"""The mismatch over the steps of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mismatch.metrics import ess_seq, k3_kl, logprob_abs_diff_mean
from mismatch.types import Floats, Pair

CLIP = 0.2  # PPO's usual clip range


@dataclass(frozen=True)
class Step:
    """One step."""

    step: int
    tokens: int
    abs_diff: float
    """Mean |delta|, nats."""
    k3: float
    """k3 estimate of KL(rollout ‖ train), nats per token."""
    clipped: float
    """Share of tokens that PPO clips before the first update."""
    ess: float
    """Effective share of the sequences."""
    entropy: float | None = None
    """Mean of the trainer's entropy, nats per token."""
    reward: float | None = None


def steps_of(
    pair: Pair, labels: Sequence[str], entropy: Floats | None, rewards: Floats | None
) -> tuple[Step, ...]:
    """Return the numbers of every step, in order.

    Args:
        labels: [N] the step of every sequence, a whole number as text.
        entropy: [A] nats.
        rewards: [N].
    """
    step_of_row = np.asarray([int(label) for label in labels])
    step_of_token = step_of_row[pair.sequence]
    steps = []
    for step in np.unique(step_of_row):
        at = step_of_token == step
        delta = pair.delta[at]
        if not len(delta):
            continue
        _, sequence = np.unique(pair.sequence[at], return_inverse=True)
        mine = step_of_row == step
        steps.append(
            Step(
                int(step),
                len(delta),
                logprob_abs_diff_mean(delta),
                k3_kl(delta),
                float((np.abs(np.expm1(delta)) > CLIP).mean()),
                ess_seq(delta, sequence),
                None if entropy is None else float(entropy[at].mean()),
                None if rewards is None else float(rewards[mine].mean()),
            )
        )
    return tuple(steps)
