"""The coefficient of every action token in the policy gradient, and estimates over prompts.

The loss is ``-sum_t c_t · logprob_t``, with everything in c a constant to autograd:

    token-level loss       c = A_i / (action tokens of the batch)
    sequence-level loss    c = A_i / (samples of the batch · action tokens of sample i)

A_i is GRPO's advantage of sample i, (r - mean) / (std + 1e-6) within its prompt (Shao et al. 2024,
arXiv 2402.03300, whose loss is the sequence-level one; the token-level one is DAPO's, arXiv
2503.14476). A gradient check takes the token-level loss; the training loop takes either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.experiments.gradients.types import REWARDS, Loss
from mismatch.metrics.importance_weights import group_advantages
from mismatch.metrics.ppo_passes import CLIP
from mismatch.types import Bools, Floats, Ints, Rollout

ROUNDING = 1e-15  # of a cosine: a gap to 1 of less is none


@dataclass(frozen=True, slots=True)
class Sketched:
    """Two gradients over prompts, as inner products of their parts.

    Attributes:
        own: [P, P] of a; ``reference``: of b; ``apart``: of a - b; ``longer``: of a - b with a + b.
            The last two are taken of the sketches' differences: nothing cancels when a is nearly b.
    """

    own: Floats
    reference: Floats
    apart: Floats
    longer: Floats

    @classmethod
    def of(cls, own: Floats, reference: Floats) -> Sketched:
        """From sketches [P, k], or of several groups [P, G, k], which then count together."""
        a, b = own.reshape(len(own), -1), reference.reshape(len(reference), -1)
        apart = a - b
        longer = apart @ (a + b).T
        return cls(a @ a.T, b @ b.T, apart @ apart.T, (longer + longer.T) / 2.0)

    @property
    def prompts(self) -> int:
        return len(self.own)

    @property
    def weights(self) -> Floats:
        """[1 + P, P]: all prompts, then all but each."""
        return np.concatenate([np.ones((1, self.prompts)), 1.0 - np.eye(self.prompts)])

    def log_norm(self, weights: Floats) -> Floats:
        """log of |a| / |b|, [R]."""
        with np.errstate(all="ignore"):
            logs = np.log(_size(self.own, weights)) - np.log(_size(self.reference, weights))
        return np.asarray(0.5 * logs, np.float64)

    def gap(self, weights: Floats) -> Floats:
        """1 - cosine of a and b, [R]; accurate where that is tiny. NaN where one is 0."""
        a, b = (np.sqrt(_size(sums, weights)) for sums in (self.own, self.reference))
        with np.errstate(all="ignore"):
            stretch = _form(self.longer, weights) / (a + b)  # |a| - |b|
            gap = (_size(self.apart, weights) - stretch**2) / (2.0 * a * b)
        gap[(a == 0.0) | (b == 0.0)] = np.nan
        return np.where(gap < ROUNDING, 0.0, np.minimum(gap, 2.0))


def _form(table: Floats, weights: Floats) -> Floats:
    """w' table w of every row of weights, [R]."""
    return np.asarray(np.einsum("rp,pq,rq->r", weights, table, weights), np.float64)


def _size(table: Floats, weights: Floats) -> Floats:
    """The same of a table of squares: rounding must not make it negative."""
    return np.asarray(np.maximum(_form(table, weights), 0.0), np.float64)


def fisher(gap: Floats) -> Floats:
    """Fisher's z of a cosine, from its gap to 1."""
    with np.errstate(all="ignore"):
        return np.asarray(0.5 * (np.log(2.0 - gap) - np.log(gap)), np.float64)


def cosine_of(z: float) -> float:
    """Back from :func:`fisher`."""
    return math.tanh(z)


def exp(value: float) -> float:
    """Back from a logarithm; an end beyond all numbers stays one."""
    return math.exp(min(value, 700.0))


@dataclass(frozen=True, slots=True)
class Batch:
    """The prompts whose gradient is taken, with the advantages of all samples.

    Attributes:
        prompts: [P] prompt indices.
        deciding: how many of them have samples whose advantages differ.
        advantage: [N] of every sequence of the rollout, 0 outside the batch.
        member: [A] whether an action token belongs to the batch.
        source: "rewards", or how the advantages were made.
    """

    prompts: Ints
    deciding: int
    advantage: Floats
    member: Bools
    source: str


def choose_batch(rollout: Rollout, prompts: int, seed: int) -> Batch:
    """At most ``prompts`` prompts, in seeded order, those with samples of different reward first.

    The others have advantages of 0 and no gradient, as they would in training. Where no prompt
    decides (no rewards, or all samples of each alike), advantages are signs: half of a prompt's
    samples +1, the others -1, in seeded order, less their mean.

    Raises:
        EmptyComparison: no action token.
        MismatchError: fewer than one prompt asked for.
    """
    if rollout.n_actions == 0:
        raise EmptyComparison("gradients: the rollout has no action token")
    if prompts < 1:
        raise MismatchError(f"--gradient-prompts {prompts} is no batch", "give 1 or more")
    advantage, source = _advantages(rollout, seed)
    order = np.random.default_rng(seed).permutation(np.unique(rollout.prompt_index))
    decides = np.isin(order, rollout.prompt_index[advantage != 0.0])
    chosen = order[np.argsort(~decides, kind="stable")][:prompts]
    inside = np.isin(rollout.prompt_index, chosen)
    sequence = rollout.sequence_of_token[rollout.actions]
    return Batch(
        prompts=chosen.astype(np.int64),
        deciding=int(min(decides.sum(), len(chosen))),
        advantage=np.where(inside, advantage, 0.0),
        member=inside[sequence],
        source=source,
    )


def _advantages(rollout: Rollout, seed: int) -> tuple[Floats, str]:
    if rollout.rewards is not None:
        advantage = group_advantages(rollout.rewards, rollout.prompt_index)
        if advantage.any():
            return advantage, REWARDS
    why = "no rewards" if rollout.rewards is None else "all samples of each prompt have one reward"
    return _signs(rollout.prompt_index, seed), f"seeded signs: {why}"


def _signs(prompt: Ints, seed: int) -> Floats:
    """±1 for every sequence, balanced and centred within its prompt; alone: +1 or -1."""
    signs = np.zeros(len(prompt))
    for index in np.unique(prompt):
        rows = np.flatnonzero(prompt == index)
        drawn = np.random.default_rng([seed, int(index)])
        half = np.where(np.arange(len(rows)) % 2 == 0, 1.0, -1.0) * drawn.choice([1.0, -1.0])
        signs[rows] = drawn.permutation(half - half.mean() if len(rows) > 1 else half)
    return signs


def normalised(batch: Batch, sequence: Ints, loss: Loss) -> Floats:
    """Advantages over the loss's normaliser, [A]; 0 outside the batch.

    Args:
        sequence: [A] sequence of each action token.
    """
    inside = sequence[batch.member]
    if loss == "token":
        share = np.full(len(inside), 1.0 / len(inside))
    else:
        _, code, length = np.unique(inside, return_inverse=True, return_counts=True)
        share = 1.0 / (len(length) * length[code])
    out = np.zeros(len(sequence))
    out[batch.member] = share * batch.advantage[inside]
    return out


def unclipped(ratio: Floats, advantage: Floats, clip: float = CLIP) -> Bools:
    """Where PPO's clipped objective has a gradient, [A]; of the advantage the sign counts.

    >>> unclipped(np.array([1.3, 1.3, 0.7, 0.7]), np.array([1.0, -1.0, 1.0, -1.0]))
    array([False,  True,  True, False])
    """
    outside = ((advantage > 0) & (ratio > 1.0 + clip)) | ((advantage < 0) & (ratio < 1.0 - clip))
    return np.asarray(~outside, np.bool_)
