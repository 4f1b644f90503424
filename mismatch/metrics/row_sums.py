"""The mismatch over the steps of a training run, from sums over rows as they are read."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np

from mismatch.metrics import ess_seq
from mismatch.metrics.token import exp_minus_linear
from mismatch.types import Bools, Floats, Ints

CLIP = 0.2  # PPO's usual clip range
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
    prompt: Any = None
    """What the samples of one prompt have in common; None: a separate prompt."""
    reward: float | None = None
    finish_reason: str = "unknown"
    attributes: dict[str, str] = field(default_factory=dict)
    number: int = 0
    """Of the sequence in the dump."""
    place: str = ""
    """Part of the dump, and number there: known before the parts are put together."""

    @property
    def key(self) -> str:
        """What tells its prompt from others."""
        return f"alone {self.place}" if self.prompt is None else f"shared {self.prompt}"

    def drawn(self, prompts: float, rows: float) -> bool:
        """Whether it is among these shares of all prompts, and of their rows."""
        wanted = ((self.key, prompts), (f"row {self.place}", rows))
        return all(share == 1.0 or _draw(text) < share for text, share in wanted)


def _draw(text: str) -> float:
    """Return a number in [0, 1), the same for the same text in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big") / 2**56


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
    sequences: int = 0


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

    def merge(self, other: _Rows) -> None:
        """Add the sums of other rows."""
        for name in ("tokens", "abs_diff", "k3", "clipped", "entropy", "reward", "log_ratios"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def step(self, number: int) -> Step:
        """Return their means; NaN, where a row lacks a value, is None."""
        n, rows = self.tokens, len(self.log_ratios)
        means = self.abs_diff / n, self.k3 / n, self.clipped / n
        ess = ess_seq(np.asarray(self.log_ratios), np.arange(rows))
        held = (self.entropy / n, self.reward / rows)
        entropy, reward = (None if np.isnan(value) else value for value in held)
        return Step(number, n, *means, ess, entropy, reward, rows)


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

    def add(self, row: Row) -> None:
        """Count a row; its values that are not finite are left out of the sums."""
        self.rows += 1
        self.tokens += len(row.logprobs)
        finite = self._finite(row.logprobs, "rollout")
        if row.train_logprobs is None:
            self.one_sided += 1
            return
        finite &= self._finite(row.train_logprobs, "trainer")
        if not finite.any():
            return
        with np.errstate(over="ignore"):
            delta = (row.train_logprobs - row.logprobs)[finite]
            k3 = float(exp_minus_linear(delta).sum())
            clipped = int((np.abs(np.expm1(delta)) > CLIP).sum())
        size, total = float(np.abs(delta).sum()), float(delta.sum())
        entropy = np.nan if row.entropy is None else float(row.entropy[finite].sum())
        for rows in (self.whole, self.by_step[row.attributes.get("step", "")]):
            rows.tokens += len(delta)
            rows.abs_diff += size
            rows.k3 += k3
            rows.clipped += clipped
            rows.entropy += entropy
            rows.reward += np.nan if row.reward is None else row.reward
            rows.log_ratios.append(total)

    def merge(self, other: Sums) -> None:
        """Add the sums of the rows that follow."""
        self.rows += other.rows
        self.tokens += other.tokens
        self.one_sided += other.one_sided
        self.whole.merge(other.whole)
        for name, rows in other.by_step.items():
            self.by_step[name].merge(rows)
        self.not_finite += other.not_finite
        self.bad_rows += other.bad_rows

    def _finite(self, values: Floats, side: str) -> Bools:
        finite = np.isfinite(values)
        for what, test in NOT_FINITE if not finite.all() else ():
            count = int(test(values).sum())
            self.not_finite[side, what] += count
            self.bad_rows[side, what] += count > 0
        return finite

    def steps(self) -> tuple[Step, ...]:
        """Return the numbers of every step, in order; none where a row names no step."""
        names = () if "" in self.by_step else sorted(self.by_step, key=int)
        return tuple(self.by_step[name].step(int(name)) for name in names)
