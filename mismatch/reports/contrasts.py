"""Groups of tokens against each other: what pictures show, in sentences of their data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mismatch.reports.formatting import percent, times
from mismatch.types import Bools, Floats, Ints

if TYPE_CHECKING:
    import pandas as pd

LEAST = 20  # tokens of a group, below which it says nothing
ALIKE = (0.67, 1.5)  # ratios of two means of |delta| that make no contrast
ONE_SIDED = 0.75  # share of the far tokens on one side of 0


@dataclass(frozen=True, slots=True)
class Contrast:
    """Mean |delta| of a group of tokens over that of another."""

    ratio: float
    sentence: str

    @property
    def strength(self) -> float:
        return abs(math.log(self.ratio)) if self.ratio > 0 else 0.0


def comparable(tokens: pd.DataFrame) -> pd.DataFrame:
    """The rows whose delta is a number, in order of sequence and position.

    Where a side gave no logprob (a failed check says so) there is nothing to draw.
    """
    finite = np.isfinite(tokens["delta"].to_numpy(dtype=np.float64))
    rows: pd.DataFrame = tokens[finite]
    return rows.sort_values(["sequence", "position"], kind="stable", ignore_index=True)


def rank_in_response(tokens: pd.DataFrame) -> Ints:
    """Place of each token among its sequence's sampled tokens, from 0, [A]."""
    return np.asarray(tokens.groupby("sequence").cumcount(), dtype=np.int64)


def unlikely(tokens: pd.DataFrame) -> Contrast | None:
    """Tokens that the engine gave p < 0.1 against those of p >= 0.9.

    Rounding, which moves logits alike everywhere, moves the log-probability of a sure token least.
    """
    probability = np.exp(tokens["rollout_logprob"].to_numpy(dtype=np.float64))
    ratio = _ratio(tokens, probability < 0.1, probability >= 0.9)
    if ratio is None:
        return None
    if ratio >= ALIKE[1]:
        sentence = (
            f"Unlikely tokens (p < 0.1) have {times(ratio)} the error of confident ones "
            "(p ≥ 0.9), as rounding does."
        )
    elif ratio > ALIKE[0]:
        sentence = (
            "Unlikely (p < 0.1) and confident (p ≥ 0.9) tokens have the same error; rounding would "
            "move the unlikely ones more."
        )
    else:
        sentence = (
            f"Unusual: confident tokens (p ≥ 0.9) have {times(1 / ratio)} the error of unlikely "
            "ones (p < 0.1). Rounding does the opposite: suspect a kernel, a mask or weights."
        )
    return Contrast(ratio, sentence)


def late(tokens: pd.DataFrame) -> Contrast | None:
    """The last third of the positions in a response against the first."""
    offset = rank_in_response(tokens)
    third = (int(offset.max()) + 1) / 3
    ratio = _ratio(tokens, offset >= 2 * third, offset < third)
    if ratio is None:
        return None
    grows = "Grows" if ratio >= ALIKE[1] else "No growth"
    sentence = f"{grows} with position: the last third has {times(ratio)} the error of the first."
    return Contrast(ratio, sentence)


def flipped(tokens: pd.DataFrame) -> Contrast | None:
    """Tokens routed to other experts in some layer against the rest."""
    flips = tokens["routing_flips"]
    if flips.isna().all():
        return None
    count = flips.fillna(0).to_numpy(dtype=np.int64)
    ratio = _ratio(tokens, count > 0, count == 0)
    if ratio is None:
        return None
    share = percent(float((count > 0).mean()))
    return Contrast(
        ratio,
        f"{share} of tokens have a routing flip in at least one layer; their error is "
        f"{times(ratio)} that of the rest.",
    )


def concentration(size: Floats) -> str:
    """How much of all |delta|, [A], its largest hundredth carries."""
    worst = max(1, len(size) // 100)
    share = np.sort(size)[-worst:].sum() / size.sum()
    return f"The worst 1 % of tokens carry {percent(float(share))} of all |delta|."


def spread(tokens: pd.DataFrame) -> str:
    """How many tokens are off by over 2×, and on which side they lie."""
    delta = tokens["delta"].to_numpy(dtype=np.float64)
    far = delta[np.abs(delta) > math.log(2)]
    if len(far) == 0:
        return f"No token of {len(delta):,} is off by over 2×"
    sentence = f"{percent(len(far) / len(delta))} of {len(delta):,} tokens are off by over 2×"
    if len(far) < LEAST:
        return sentence
    lower = float((far < 0).mean())
    side = "less" if lower >= 0.5 else "more"
    share = percent(max(lower, 1.0 - lower))
    reading = "one-sided" if max(lower, 1.0 - lower) >= ONE_SIDED else "both ways, as noise is"
    return f"{sentence}; {share} of these are {side} likely in training: {reading}"


def off_diagonal(tokens: pd.DataFrame) -> str:
    """How many tokens' probabilities differ by over 0.05."""
    sides = [
        np.exp(tokens[f"{side}_logprob"].to_numpy(np.float64)) for side in ("rollout", "train")
    ]
    far = percent(float((np.abs(sides[0] - sides[1]) > 0.05).mean()))
    return f"{far} of tokens differ by over 0.05 in probability"


def _ratio(tokens: pd.DataFrame, left: Bools, right: Bools) -> float | None:
    """Mean |delta| of one group over another's; None where one is too small or is exactly 0."""
    size = tokens["delta"].abs().to_numpy(dtype=np.float64)
    if min(left.sum(), right.sum()) < LEAST or size[right].mean() == 0:
        return None
    return float(size[left].mean() / size[right].mean())
