"""The tokens that the two sides disagree about most, in their context; and where the rest sits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mismatch.reports import quantities
from mismatch.reports.text import token_text, visible

if TYPE_CHECKING:
    import pandas as pd

MOST_LAYERS = 6  # runs of layers that are named beside a token
GAP = " ⋯ "  # tokens in between were not sampled: a prompt, or a tool's output


@dataclass(frozen=True, slots=True)
class WorstToken:
    """One token, everything as text; ``before`` and ``after`` are safe to show (see text.py)."""

    sequence: str
    position: str
    token: str
    token_id: str
    rollout: str
    train: str
    delta: str
    factor: str
    flips: str
    layers: str
    before: str
    after: str


def comparable(tokens: pd.DataFrame) -> pd.DataFrame:
    """The rows whose delta is a number, in order of sequence and position.

    Where a side gave no logprob (a failed check says so) there is nothing to draw.
    """
    finite = np.isfinite(tokens["delta"].to_numpy(dtype=np.float64))
    rows: pd.DataFrame = tokens[finite]
    return rows.sort_values(["sequence", "position"], kind="stable", ignore_index=True)


def rank_in_response(tokens: pd.DataFrame) -> np.ndarray:
    """Place of each token among its sequence's sampled tokens, from 0, [A]."""
    return tokens.groupby("sequence").cumcount().to_numpy(dtype=np.int64)


def worst_tokens(tokens: pd.DataFrame, most: int = 20, reach: int = 16) -> list[WorstToken]:
    """The tokens of largest |delta|, worst first.

    Args:
        tokens: as :func:`comparable` gives them.
        reach: tokens of context on either side.
    """
    size = tokens["delta"].abs().to_numpy(dtype=np.float64)
    order = np.argsort(-size, kind="stable")[:most]
    return [_worst(tokens, int(row), reach) for row in order if size[row] > 0]


def _worst(table: pd.DataFrame, row: int, reach: int) -> WorstToken:
    entry = table.iloc[row]
    delta, flips = float(entry["delta"]), entry["routing_flips"]
    return WorstToken(
        sequence=str(entry["sequence"]),
        position=str(entry["position"]),
        token=token_text(str(entry["token"])),
        token_id=str(entry["token_id"]),
        rollout=quantities.number(math.exp(entry["rollout_logprob"])),
        train=quantities.number(math.exp(entry["train_logprob"])),
        delta=("+" if delta > 0 else "") + quantities.number(delta),
        factor=_factor(abs(delta)),
        flips=quantities.MISSING if _is_missing(flips) else str(int(flips)),
        layers=_layers(entry.get("routing_flipped_layers")),
        before=_context(table, row - reach, row, row),
        after=_context(table, row + 1, row + 1 + reach, row),
    )


def _factor(size: float) -> str:
    """By how much a probability is off: percent up to a factor of 2."""
    off = math.expm1(min(size, 700.0))
    return quantities.percent(off) if off < 1 else quantities.times(off + 1)


def _layers(flipped: object) -> str:
    """The layers that chose other experts, in words; cut short where there are many.

    >>> _layers("0, 3, 5-7"), _layers("4"), _layers("")
    ('layers 0, 3, 5–7', 'layer 4', '')
    """
    if _is_missing(flipped) or not flipped:  # runs of earlier versions do not name them
        return ""
    parts = str(flipped).replace("-", "–").split(", ")
    more = " …" if len(parts) > MOST_LAYERS else ""
    noun = "layer" if len(parts) == 1 and parts[0].isdigit() else "layers"
    return f"{noun} {', '.join(parts[:MOST_LAYERS])}{more}"


def _is_missing(value: object) -> bool:
    import pandas as pd

    return value is None or value is pd.NA or value != value


def _context(table: pd.DataFrame, start: int, stop: int, of: int) -> str:
    """Text of the rows [start, stop) that belong to the same sequence as row ``of``."""
    rows = table.iloc[max(start, 0) : stop]
    rows = rows[rows["sequence"] == table["sequence"].iloc[of]]
    parts, previous = [], None
    for position, token in zip(rows["position"], rows["token"], strict=True):
        if previous is not None and position != previous + 1:
            parts.append(GAP)
        parts.append(visible(str(token)))
        previous = position
    if start >= of and len(rows) and rows["position"].iloc[0] != table["position"].iloc[of] + 1:
        parts.insert(0, GAP)
    if stop <= of and len(rows) and rows["position"].iloc[-1] != table["position"].iloc[of] - 1:
        parts.append(GAP)
    return "".join(parts)


def places(tokens: pd.DataFrame) -> list[str]:
    """Where the mismatch sits, one sentence each, the strongest contrast first.

    Every contrast is a ratio of two means of |delta|; groups under 20 tokens say nothing.
    """
    if tokens.empty:
        return ["Unknown: the two sides could not be compared token by token."]
    size = tokens["delta"].abs().to_numpy(dtype=np.float64)
    if not size.any():
        return ["Nowhere: delta is exactly 0 for every token."]
    contrasts = [_unlikely(tokens, size), _late(tokens, size), _flipped(tokens, size)]
    ranked = sorted(
        (item for item in contrasts if item is not None),
        key=lambda item: -abs(math.log(item[0])) if item[0] > 0 else 0.0,
    )
    return [_concentration(size), *(sentence for _, sentence in ranked)]


def _concentration(size: np.ndarray) -> str:
    worst = max(1, len(size) // 100)
    share = np.sort(size)[-worst:].sum() / size.sum()
    return f"The worst 1 % of the tokens carry {quantities.percent(share)} of all |delta|."


def _contrast(size: np.ndarray, left: np.ndarray, right: np.ndarray) -> float | None:
    if min(left.sum(), right.sum()) < 20 or size[right].mean() == 0:
        return None
    return float(size[left].mean() / size[right].mean())


def _unlikely(tokens: pd.DataFrame, size: np.ndarray) -> tuple[float, str] | None:
    probability = np.exp(tokens["rollout_logprob"].to_numpy(dtype=np.float64))
    ratio = _contrast(size, probability < 0.1, probability >= 0.9)
    if ratio is None:
        return None
    factor = quantities.times(ratio)
    tail = "the usual tail" if ratio >= 1.5 else "unusual: unlikely tokens should be off by more"
    return (
        ratio,
        f"Unlikely tokens (p < 0.1) are off {factor} as far as sure ones (p ≥ 0.9): {tail}.",
    )


def _late(tokens: pd.DataFrame, size: np.ndarray) -> tuple[float, str] | None:
    offset = rank_in_response(tokens)
    third = (int(offset.max()) + 1) / 3
    ratio = _contrast(size, offset >= 2 * third, offset < third)
    if ratio is None:
        return None
    if 0.67 < ratio < 1.5:
        return ratio, "Early and late tokens of the responses are off alike."
    return ratio, (
        f"Late tokens of the responses (last third of the positions) are off "
        f"{quantities.times(ratio)} as far as early ones."
    )


def _flipped(tokens: pd.DataFrame, size: np.ndarray) -> tuple[float, str] | None:
    flips = tokens["routing_flips"]
    if flips.isna().all():
        return None
    count = flips.fillna(0).to_numpy(dtype=np.int64)
    ratio = _contrast(size, count > 0, count == 0)
    if ratio is None:
        return None
    share = quantities.percent(float((count > 0).mean()))
    return ratio, (
        f"Tokens routed to other experts in some layer ({share}) are off "
        f"{quantities.times(ratio)} as far as the others."
    )
