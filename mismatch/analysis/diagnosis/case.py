"""What a detector of causes reads: two sides of the same tokens, and the place of each token."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from mismatch.analysis.cause_results import Side
from mismatch.keys import FLOAT32, REFERENCE, Key
from mismatch.metrics.inference import jackknife_error, student
from mismatch.types import Bools, Estimate, Floats, Ints, Rollout, Scoring

FEW_PROMPTS = 8
NOTABLE = 5e-3  # nats of mean |delta|, where no pass says what rounding costs


@dataclass(frozen=True, slots=True)
class Repair:
    """Log-probabilities with what a cause explains taken out, [A] each.

    Attributes:
        kept: tokens that still have a partner; None: all.
        exact: nothing of the cause is left; a fitted curve leaves its misfit behind.
    """

    left: Floats
    right: Floats
    kept: Bools | None = None
    exact: bool = True


@dataclass(frozen=True)
class Case:
    """Two scorings of one rollout, perhaps with what an earlier cause explains taken out.

    Attributes:
        others: scoring name -> scoring, of the other passes of the run.
        left, right: [A] log-probabilities, repaired where an earlier cause has been explained.
        kept: [A] tokens that still count; a repair may leave some without a partner.
    """

    rollout: Rollout
    engine: Scoring
    trainer: Scoring
    others: dict[str, Scoring] = field(default_factory=dict)
    left: Floats = field(default_factory=lambda: np.zeros(0))
    right: Floats = field(default_factory=lambda: np.zeros(0))
    kept: Bools = field(default_factory=lambda: np.zeros(0, bool))

    @classmethod
    def of(
        cls, rollout: Rollout, engine: Scoring, trainer: Scoring, others: dict[str, Scoring]
    ) -> Case:
        """Return the case as the run left it."""
        left = engine.logprobs.astype(np.float64)
        right = trainer.logprobs.astype(np.float64)
        return cls(rollout, engine, trainer, others, left, right, np.ones(len(left), bool))

    def repaired(self, left: Floats, right: Floats, kept: Bools | None = None) -> Case:
        """Return the same tokens after what a cause explains was taken out."""
        return replace(
            self, left=left, right=right, kept=self.kept if kept is None else self.kept & kept
        )

    def by_float32(self, side: Side) -> Repair:
        """Return the side at fault replaced by float32: what remains is the other's rounding."""
        assert self.reference is not None
        if side == "engine":
            return Repair(self.reference, self.right)
        return Repair(self.left, self.reference)

    def moved(self, side: Side, part: Floats, exact: bool = True) -> Repair:
        """Return the side at fault moved by what explains delta: the other keeps its rounding."""
        if side == "engine":
            return Repair(self.left + part, self.right, exact=exact)
        return Repair(self.left, self.right - part, exact=exact)

    @property
    def float32_name(self) -> str:
        """The engine's scoring of the same tokens, started in float32."""
        return Key.of(self.engine.key.side, precision=FLOAT32)

    @property
    def prefill(self) -> Scoring | None:
        """The engine's scoring of the same tokens in one go."""
        return self.others.get(Key.of(self.engine.key.side, "prefill"))

    @cached_property
    def delta(self) -> Floats:
        """[A] train - rollout, of this case."""
        return self.right - self.left

    @cached_property
    def sequence(self) -> Ints:
        """[A] sequence of each action token."""
        return np.asarray(self.rollout.sequence_of_token[self.rollout.actions], np.int64)

    @cached_property
    def prompt(self) -> Ints:
        """[A] prompt of each action token, numbered from 0 without gaps."""
        prompts = self.rollout.distinct_prompts[self.sequence]
        return np.asarray(np.unique(prompts, return_inverse=True)[1], np.int64)

    @cached_property
    def n_prompts(self) -> int:
        return int(self.prompt.max()) + 1

    @cached_property
    def position(self) -> Ints:
        """[A] place in the sequence, prompt included, from 0."""
        return np.asarray(self.rollout.actions - self.rollout.offsets[self.sequence], np.int64)

    @cached_property
    def index(self) -> Ints:
        """[A] place among the sequence's own action tokens, from 0."""
        starts = np.flatnonzero(np.diff(self.sequence, prepend=-1))
        lengths = np.diff(starts, append=len(self.sequence))
        return np.arange(len(self.sequence)) - np.repeat(starts, lengths)

    @cached_property
    def turn(self) -> Ints:
        """[A] turn of each action token, from 1."""
        return self.rollout.turn[self.rollout.actions]

    @cached_property
    def entropy(self) -> Floats | None:
        """[A] of the trainer's distribution; None where it gives none."""
        values = self.trainer.entropy
        return None if values is None or not np.isfinite(values).all() else values

    @cached_property
    def rows(self) -> list[slice]:
        """The action tokens of each sequence that has some."""
        starts = np.flatnonzero(np.diff(self.sequence, prepend=-1))
        ends = np.append(starts[1:], len(self.sequence))
        return [slice(int(a), int(b)) for a, b in zip(starts, ends, strict=True)]

    @cached_property
    def reference(self) -> Floats | None:
        """[A] log-probabilities of the float32 reference; None where the run made none."""
        other = self.others.get(REFERENCE)
        return None if other is None else other.logprobs.astype(np.float64)

    def beyond_rounding(self, where: Bools) -> bool:
        """Whether the sides differ in these tokens by more than the better one's own rounding.

        Two roundings of the same size differ by 1.4 times one of them. Without float32 the
        yardstick is absolute.
        """
        where = where & self.kept
        gap = float(np.abs(self.delta[where]).mean()) if where.any() else 0.0
        if self.reference is None:
            return gap > NOTABLE
        legs = (self.left - self.reference, self.right - self.reference)
        return gap > 1.6 * min(float(np.abs(leg[where]).mean()) for leg in legs)

    def by_prompt(self, values: Floats) -> Floats:
        """Return sums over the tokens of each prompt that still count, [P]."""
        weights = values[self.kept].astype(np.float64)
        sums: Floats = np.bincount(self.prompt[self.kept], weights, self.n_prompts).astype(float)
        return sums

    def share(self, residual: Floats, whole: Floats | None = None) -> Estimate:
        """Return how much of mean |delta| goes when ``residual`` [A] is left instead of delta.

        1 - sum |residual| / sum |delta|, its 95 % interval by jackknife over prompts.
        """
        whole = self.delta if whole is None else whole
        return self._one_minus(self.by_prompt(np.abs(residual)), self.by_prompt(np.abs(whole)))

    def gone(self, repair: Repair) -> Estimate:
        """Return how much of mean |delta| a repair takes away, of the tokens that it keeps."""
        if repair.kept is None:  # else a new case counts its prompts again
            return self.share(repair.right - repair.left)
        repaired = self.repaired(repair.left, repair.right, repair.kept)
        return repaired.share(repaired.delta, self.delta)

    def ratio(self, above: Floats, below: Floats) -> Estimate:
        """Return the ratio of two sums over tokens, its 95 % interval by jackknife over prompts."""
        less = self._one_minus(self.by_prompt(above), self.by_prompt(below))
        low = None if less.high is None else 1 - less.high
        high = None if less.low is None else 1 - less.low
        return replace(less, value=1 - less.value, low=low, high=high)

    def mean(self, values: Floats) -> Estimate:
        """Mean over tokens, its 95 % interval by jackknife over prompts."""
        return self.ratio(values, np.ones(len(values)))

    def _one_minus(self, above: Floats, below: Floats) -> Estimate:
        total_above, total_below = float(above.sum()), float(below.sum())
        present = np.bincount(self.prompt[self.kept], minlength=self.n_prompts) > 0
        n_prompts = int(present.sum())
        value = 1 - total_above / total_below if total_below > 0 else 0.0
        low = high = None
        if n_prompts >= 2 and total_below > 0:
            rest = total_below - below[present]
            if (rest > 0).all():
                without = 1 - (total_above - above[present]) / rest
                arm = student(n_prompts - 1) * jackknife_error(without)
                low, high = value - arm, value + arm
        flags = ("few-prompts",) if n_prompts < FEW_PROMPTS else ()
        n_sequences = len(np.unique(self.sequence[self.kept]))
        return Estimate(value, low, high, int(self.kept.sum()), n_sequences, n_prompts, flags)


def correlation(case: Case) -> float:
    """Of the two sides' log-probabilities, over the tokens that count; 0 where one is constant."""
    left, right = (np.clip(side[case.kept], -12.0, 0.0) for side in (case.left, case.right))
    if len(left) < 2 or not left.std() or not right.std():
        return 0.0
    return float(np.corrcoef(left, right)[0, 1])


def above(estimate: Estimate, bound: float) -> bool:
    """Whether the whole 95 % interval lies above a bound; False where there is no interval."""
    return estimate.low is not None and estimate.low > bound


def below(estimate: Estimate, bound: float) -> bool:
    """Whether the whole 95 % interval lies below a bound; False where there is no interval."""
    return estimate.high is not None and estimate.high < bound
