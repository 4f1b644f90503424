"""Importance ratios that a framework recorded, against exp(trainer - rollout) of the two columns.

They are the same numbers where the ratio's anchor is the rollout. Else the framework weighed its
loss by other log-probabilities than those in the dump, which says what it corrects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mismatch.metrics.framework_names import anchors
from mismatch.metrics.row_sums import Place, Row, Step, place_of
from mismatch.types import Floats

NEAR = 0.01  # nats between two logarithms of one ratio: bf16 rounds a ratio by up to 0.004
TELLING = 0.03  # nats from 0: a ratio nearer to 1 is near every kind's
LEAST = 32  # of these tokens
NEARLY_ALL = 0.999
CLIP = 0.2  # PPO's usual clip range
IDLE = 1e-3  # share of clipped tokens, up to which a clip does nothing
LEAST_STEPS = 5
GROWS = 4.0  # times the first steps' k3: mean |delta| has doubled
BOUND = 1e-3  # relative, between ratios that were cut at one bound
# Kind -> what its ratios are: "token", or the nearest of those that nearly all tokens fit.
KINDS = {
    "token": "exp(trainer - rollout) of each token",
    "sequence": "exp(trainer - rollout) of the whole sequence",
    "mean": "exp(trainer - rollout) of the sequence, its mean over tokens",
    "inverse": "exp(rollout - trainer), the inverse of what weighs a loss",
    "one": "1, however far apart the sides are: their anchor is the trainer's own pass, so they "
           "correct no mismatch",
}  # fmt: skip
RIGHT = ("token", "sequence", "mean")


@dataclass
class Ratios:
    """Counts of recorded ratios, over all rows."""

    tokens: int = 0
    telling: int = 0
    """Tokens where the kinds differ."""
    fit: Counter[str] = field(default_factory=Counter)
    """Kind -> telling tokens that fit it, or were set to 0 or cut at a bound."""
    apart: Counter[str] = field(default_factory=Counter)
    """Kind -> sum of these tokens' distances from it, each at most 1 nat, in micronats."""
    zeros: int = 0
    cut: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    """Of ratios below and above exp(trainer - rollout): the least, the largest, how many."""
    worst: tuple[float, Place] | None = None
    """The largest distance of a logarithm, nats, and its token."""
    of_old: bool = False
    """They are exp(trainer - old) of a third column, and not recorded as ratios."""
    clipped: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Step -> tokens with a ratio, and those of them that PPO clips."""

    def add(self, row: Row) -> None:
        """Count the ratios of a row."""
        if row.ratios is None or row.train_logprobs is None:
            return
        delta = row.train_logprobs - row.logprobs
        held = np.isfinite(delta) & np.isfinite(row.ratios) & (row.ratios >= 0)
        ratio, delta, at = row.ratios[held], delta[held], np.flatnonzero(held)
        self.tokens += len(ratio)
        step = row.attributes.get("step", "")
        clipped = int(((ratio > 0) & (np.abs(ratio - 1) > CLIP)).sum())
        self._clip(step, len(ratio), clipped)
        self.zeros += int((ratio == 0).sum())
        at, ratio, delta = at[ratio > 0], ratio[ratio > 0], delta[ratio > 0]
        if not len(ratio):
            return
        said = np.log(ratio)
        telling = np.maximum(np.abs(said), np.abs(delta)) > TELLING
        ones = np.ones(len(delta))
        kinds = {"token": delta, "sequence": delta.sum() * ones, "mean": delta.mean() * ones,
                 "inverse": -delta, "one": 0 * ones}  # fmt: skip
        self.telling += int(telling.sum())
        for kind, expected in kinds.items():
            apart = np.abs(said - expected)[telling]
            self.fit[kind] += int((apart < NEAR).sum())
            self.apart[kind] += round(1e6 * float(np.minimum(apart, 1.0).sum()))
        off = np.abs(said - delta)
        self._cut("below", ratio[telling & (said < delta - NEAR)])
        self._cut("above", ratio[telling & (said > delta + NEAR)])
        far = int(off.argmax())
        if off[far] > NEAR and (self.worst is None or off[far] > self.worst[0]):
            self.worst = float(off[far]), place_of(row, int(at[far]))

    def _clip(self, step: str, tokens: int, clipped: int) -> None:
        of = self.clipped.get(step, (0, 0))
        self.clipped[step] = of[0] + tokens, of[1] + clipped

    def _cut(self, side: str, ratio: Floats) -> None:
        if len(ratio):
            low, high, count = self.cut.get(side, (np.inf, -np.inf, 0))
            self.cut[side] = (
                min(low, float(ratio.min())),
                max(high, float(ratio.max())),
                count + len(ratio),
            )

    def merge(self, other: Ratios, rows: int) -> None:
        """Add the counts of the rows that follow; ``rows``: of those before."""
        self.tokens += other.tokens
        self.telling += other.telling
        self.fit += other.fit
        self.apart.update(other.apart)
        self.zeros += other.zeros
        self.of_old |= other.of_old
        for step, counts in other.clipped.items():
            self._clip(step, *counts)
        for side, (low, high, count) in other.cut.items():
            mine = self.cut.get(side, (np.inf, -np.inf, 0))
            self.cut[side] = min(low, mine[0]), max(high, mine[1]), count + mine[2]
        if other.worst is not None and (self.worst is None or other.worst[0] > self.worst[0]):
            size, place = other.worst
            self.worst = size, replace(place, row=place.row + rows)

    def bounds(self) -> list[str]:
        """Return at which values the ratios were cut, where all that differ have that one."""
        words = {"below": "cut to at most", "above": "raised to at least"}
        return [
            f"{words[side]} {high:.3g} at {count:,} tokens"
            for side, (low, high, count) in sorted(self.cut.items())
            if high - low <= BOUND * high
        ]

    def kind(self) -> str:
        """Return a key of ``KINDS``, "near" where all ratios are too near 1, or "other"."""
        if self.telling < LEAST:
            return "near"
        bounded = sum(n for low, high, n in self.cut.values() if high - low <= BOUND * high)
        fitting = []
        for kind in KINDS:
            fit = self.fit.get(kind, 0)  # a report read again holds no zeros
            fit += bounded if kind == "token" and fit else 0
            if fit >= NEARLY_ALL * self.telling:
                fitting.append(kind)
        if fitting[:1] == ["token"]:
            return "token"
        return min(fitting, key=lambda kind: self.apart.get(kind, 0), default="other")

    def sentence(self) -> str:
        """Say what the ratios are; "" where the dump holds none."""
        if not self.tokens:
            return ""
        text, kind = f"{self.tokens:,} recorded importance ratios", self.kind()
        if self.of_old:
            text = f"{self.tokens:,} ratios exp(trainer - old) of the third column"
            if kind == "other":
                return f"{text} are of an earlier pass of the trainer"
        if kind == "near":
            return f"{text} are too near 1 to tell what they are of"
        zeros = [f"set to 0 at {self.zeros:,} tokens"] if self.zeros else []
        if kind != "other":
            more = self.bounds() if kind == "token" else []
            return "; ".join([f"{text} are {KINDS[kind]}", *more, *zeros])
        assert self.worst is not None
        off = sum(count for _, _, count in self.cut.values())
        return "; ".join([
            f"{text} disagree with exp(trainer - rollout) at {off:,} tokens, most at "
            f"{self.worst[1]}: {self.worst[0]:.3g} nats", *self.bounds(), *zeros,
        ])  # fmt: skip

    def agree(self) -> bool:
        """Return whether the ratios are of the two columns, as far as can be told."""
        return self.of_old or self.kind() in ("near", *RIGHT)

    def anchor(self, form: str) -> str:
        """Say which policy PPO's ratio is anchored to, by the ratios, else by the framework."""
        kind = self.kind() if self.tokens else "near"
        if kind in RIGHT:
            return "the sampler: the mismatch is in it, and clipping acts on it"
        if kind == "one":
            return "the trainer's own pass: it is 1, and no mismatch is in it"
        if kind == "other" and (self.of_old or not self.bounds()):
            return "log-probabilities that the trainer recomputed: clipping acts on what an "\
                "update changes, and no mismatch is in it"  # fmt: skip
        unsaid = "a policy that this dump does not name (importance_ratio or old_logprobs would)"
        return anchors().get(form, unsaid)

    def idle(self, steps: Sequence[Step]) -> str:
        """Say that PPO's clip does nothing while the sampler's KL grows; "" where it does."""
        share = [n and cut / n for n, cut in self.clipped.values()]
        held = [step for step in steps if step.tokens]
        if len(held) < LEAST_STEPS or not share or max(share) > IDLE:
            return ""
        part = max(1, len(held) // 5)
        before, after = (
            float(np.median([s.k3 for s in some])) for some in (held[:part], held[-part:])
        )
        if not after > GROWS * before:
            return ""
        would = float(np.median([step.clipped for step in held[-part:]]))
        return (
            f"idle clip: PPO clips {max(share):.2%} of the recorded ratios at most, while k3 "
            f"grows from {before:.3g} to {after:.3g}; exp(trainer - rollout) would be "
            f"clipped at {would:.2%} of the tokens in the last steps"
        )
