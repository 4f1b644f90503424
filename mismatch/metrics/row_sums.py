"""The mismatch over the steps of a training run, from sums over rows as they are read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np

from mismatch.metrics.token import TRUNCATION, exp_minus_linear
from mismatch.types import Bools, Floats, Ints

CLIP = np.log1p([-0.2, 0.2])  # PPO's usual clip range, of log-ratios
NOT_FINITE = (("NaN or null", np.isnan), ("-inf", np.isneginf), ("+inf", np.isposinf))


@dataclass
class Row:
    """One recorded sequence."""

    token_ids: Ints
    sampled: Bools
    """Per token: whether the policy sampled it."""
    logprobs: Floats
    """The sampler's, of the sampled tokens, nats; NaN where the file holds no number."""
    train_logprobs: Floats | None = None
    """The trainer's, likewise; None: the dump holds one side only."""
    entropy: Floats | None = None
    """Of the trainer's distribution at the sampled tokens, nats."""
    ratios: Floats | None = None
    """Importance ratios of the sampled tokens, as the framework recorded them."""
    turns: Ints | None = None
    """Per token: its turn, as recorded."""
    old: Floats | None = None
    """The trainer's earlier pass over the sampled tokens, which PPO's ratio may be anchored to."""
    versions: Floats | None = None
    """Of the weights that sampled each token; None: the attribute ``weight_version`` says it."""
    prompt: Any = None
    """What the samples of one prompt have in common; None: a separate prompt."""
    reward: float | None = None
    finish_reason: str = "unknown"
    attributes: dict[str, str] = field(default_factory=dict)
    number: int = 0
    """Of the sequence in the dump."""
    masked: bool = False
    """The framework leaves it out of the loss."""
    place: str = ""
    """Part of the dump, and number there: known before the parts are put together."""

    @property
    def key(self) -> str:
        """What tells its prompt from others."""
        return f"alone {self.place}" if self.prompt is None else f"shared {self.prompt}"

    def owned(self) -> Row:
        """Copy arrays that are views of a larger one, which they would keep in memory."""
        for name, values in vars(self).items():
            if isinstance(values, np.ndarray) and values.base is not None:
                setattr(self, name, values.copy())
        return self

    def drawn(self, prompts: float, rows: float) -> bool:
        """Whether it is among these shares of all prompts, and of their rows."""
        kept = prompts == 1.0 or _draw(self.key) < prompts
        return kept and (rows == 1.0 or _draw(f"row {self.place}") < rows)


def _draw(text: str) -> float:
    """Return a number in [0, 1), the same for the same text in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big") / 2**56


@dataclass(frozen=True)
class Place:
    """Where a token is in a dump."""

    row: int
    """Of the sequence in the dump, from 0."""
    token: int
    """Of the sampled tokens of the row, from 0."""
    step: str = ""
    rank: str = ""
    sample: str = ""

    def __str__(self) -> str:
        named = ("step", self.step), ("rank", self.rank), ("sample", self.sample)
        of = [f"{name} {at}" for name, at in named if at]
        return ", ".join([*of, f"row {self.row}, sampled token {self.token} (from 0)"])


@dataclass(frozen=True)
class Step:
    """One step; its means are NaN where no token has a finite value on both sides."""

    step: int
    tokens: int
    """With a finite value on both sides."""
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
    sequences: int = 0


def effective_size(log_ratios: Floats) -> float:
    """Return ``ess_seq`` of log-ratios [N] of sequences, also where no weight is a float.

    NaN where every weight is cut: then they are equal, whatever the ratios are.

    >>> effective_size(np.array([-900.0, -2000.0]))
    0.5
    """
    cut = np.minimum(log_ratios, np.log(TRUNCATION))
    if cut.min() == np.log(TRUNCATION):
        return np.nan
    weight = np.exp(cut - cut.max())
    return float(weight.mean() ** 2 / (weight * weight).mean())


@dataclass
class _Rows:
    """Sums over the tokens of some rows."""

    tokens: int = 0
    abs_diff: float = 0.0
    k3: float = 0.0
    clipped: int = 0
    entropy: float = 0.0
    reward: float = 0.0
    log_ratios: list[float] = field(default_factory=list)
    """Of every row."""

    def add(self, found: Sequence[float], entropy: float, reward: float) -> None:
        """Add the sums over the tokens of one row."""
        tokens, size, k3, clipped, log_ratio = found
        self.tokens += int(tokens)
        self.abs_diff += size
        self.k3 += k3
        self.clipped += int(clipped)
        self.entropy += entropy
        self.reward += reward
        self.log_ratios.append(log_ratio)

    def merge(self, other: _Rows) -> None:
        """Add the sums of other rows."""
        for name in ("tokens", "abs_diff", "k3", "clipped", "entropy", "reward", "log_ratios"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def step(self, number: int) -> Step:
        """Return their means; NaN, where a row lacks a value, is None."""
        n, rows = self.tokens, len(self.log_ratios)
        if not n:
            return Step(number, 0, np.nan, np.nan, np.nan, np.nan)
        means = self.abs_diff / n, self.k3 / n, self.clipped / n
        ess = effective_size(np.asarray(self.log_ratios))
        held = (self.entropy / n, self.reward / rows)
        entropy, reward = (None if np.isnan(value) else value for value in held)
        return Step(number, n, *means, ess, entropy, reward, rows)


def place_of(row: Row, token: int) -> Place:
    """Return where a sampled token of a row is."""
    of = row.attributes
    return Place(row.number, token, *(of.get(name, "") for name in ("step", "rank", "sample_id")))


@dataclass
class Sums:
    """What is summed over all rows of a dump, so that one of any size takes little memory."""

    rows: int = 0
    tokens: int = 0
    """That were sampled."""
    one_sided: int = 0
    """Rows without the trainer's log-probabilities."""
    whole: _Rows = field(default_factory=_Rows)
    by_step: defaultdict[str, _Rows] = field(default_factory=partial(defaultdict, _Rows))
    """Step, or "" for rows that name none -> its sums."""
    not_finite: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(side, what) -> tokens without a finite value."""
    bad_rows: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The same -> rows that hold them."""
    first: dict[tuple[str, str], Place] = field(default_factory=dict)
    """The same -> the first of these tokens."""
    worst: tuple[float, Place] | None = None
    """The largest |delta|, nats, and its token."""

    def add(self, rows: Sequence[Row]) -> None:
        """Count rows; their values that are not finite are left out of the sums."""
        self.rows += len(rows)
        self.tokens += sum(len(row.logprobs) for row in rows)
        both = [(row, row.train_logprobs) for row in rows if row.train_logprobs is not None]
        self.one_sided += len(rows) - len(both)
        for row in rows if len(both) < len(rows) else ():
            if row.train_logprobs is None:
                self._count(row, row.logprobs, "rollout")
        both = [(row, train) for row, train in both if len(train)]
        if not both:
            return
        starts = np.cumsum([0, *(len(train) for _, train in both[:-1])])
        with np.errstate(over="ignore", invalid="ignore"):
            delta = np.concatenate([train for _, train in both])
            delta -= np.concatenate([row.logprobs for row, _ in both])
            finite = np.isfinite(delta)
            if not finite.all():
                for row, train in both:
                    self._count(row, row.logprobs, "rollout")
                    self._count(row, train, "trainer")
                delta[~finite] = 0.0
            far = int(np.abs(delta).argmax())
            at = int(np.searchsorted(starts, far, "right")) - 1
            self._note(abs(float(delta[far])), place_of(both[at][0], far - int(starts[at])))
            clipped = (delta < CLIP[0]) | (delta > CLIP[1])
            terms = finite, np.abs(delta), exp_minus_linear(delta), clipped, delta
        of_rows = [np.add.reduceat(term, starts, dtype=np.float64).tolist() for term in terms]
        for (row, train), start, *found in zip(both, starts.tolist(), *of_rows, strict=True):
            self.by_step[row.attributes.get("step", "")]  # also one without a finite value
            if found[0]:
                entropy = np.nan
                if row.entropy is not None:
                    entropy = float(row.entropy[finite[start : start + len(train)]].sum())
                reward = np.nan if row.reward is None else row.reward
                self.whole.add(found, entropy, reward)
                self.by_step[row.attributes.get("step", "")].add(found, entropy, reward)

    def merge(self, other: Sums) -> None:
        """Add the sums of the rows that follow."""
        for what, place in other.first.items():
            self.first.setdefault(what, replace(place, row=place.row + self.rows))
        if other.worst is not None:
            size, place = other.worst
            self._note(size, replace(place, row=place.row + self.rows))
        self.rows += other.rows
        self.tokens += other.tokens
        self.one_sided += other.one_sided
        self.whole.merge(other.whole)
        for name, rows in other.by_step.items():
            self.by_step[name].merge(rows)
        self.not_finite += other.not_finite
        self.bad_rows += other.bad_rows

    def _note(self, size: float, place: Place) -> None:
        if self.worst is None or size > self.worst[0]:
            self.worst = size, place

    def _count(self, row: Row, values: Floats, side: str) -> None:
        """Count values of a row that are not finite."""
        for what, test in NOT_FINITE:
            bad = test(values)
            count = int(bad.sum())
            self.not_finite[side, what] += count
            self.bad_rows[side, what] += count > 0
            if count:
                self.first.setdefault((side, what), place_of(row, int(bad.argmax())))

    def unnumbered(self) -> str:
        """Say which values are no numbers, and where the first is."""
        return "; ".join(
            f"{side}: {what} ({count} tokens, the first at {self.first[side, what]})"
            for (side, what), count in self.not_finite.items()
            if count
        )

    def steps(self) -> tuple[Step, ...]:
        """Return the numbers of every step, in order; none where a row names no step."""
        names = () if "" in self.by_step else sorted(self.by_step, key=int)
        return tuple(self.by_step[name].step(int(name)) for name in names)
