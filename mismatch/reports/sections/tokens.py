"""Which tokens the two sides disagree about: where they sit, and the worst in their context."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mismatch.reports import figures
from mismatch.reports.contrasts import concentration, flipped, late, unlikely
from mismatch.reports.formatting import (
    count,
    percent,
    signed,
    text,
    times,
    token_text,
    visible,
)
from mismatch.reports.section import Cell, Column, Excerpt, Section, Table, Value
from mismatch.types import Report

if TYPE_CHECKING:
    import pandas as pd

MOST_LAYERS = 6  # runs of layers that are named beside a token
GAP = " ⋯ "  # tokens in between were not sampled: a prompt, or a tool's output
LEAD = (
    "The {n} tokens of largest |delta|, in the text around them. Control characters are spelled "
    "out: ↵ is a newline, ⟨…⟩ a code point that cannot be seen. “Rerouted” counts the layers that "
    "chose other experts, and names them."
)
COLUMNS = (
    Column("token", text),
    Column("delta", signed),
    Column("off by", text),
    Column("p rollout"),
    Column("p train"),
    Column("rerouted", count),
    Column("where", text),
    Column("in its text", text),
)


def of_tokens(report: Report, tokens: pd.DataFrame) -> Section:
    """Contrasts between groups of tokens, their pictures, and the worst tokens.

    Args:
        tokens: one row per action token, as in tokens.parquet: sequence, position, token_id,
            token, rollout_logprob, train_logprob, delta, entropy, turn, routing_flips.
    """
    tokens = figures.comparable(tokens)
    return Section(
        id="tokens",
        title="Where does it sit?",
        sentences=tuple(places(tokens)),
        figures=figures.of_tokens(tokens),
        parts=(worst_tokens(tokens),),
        page_only=True,
    )


def worst_tokens(tokens: pd.DataFrame, most: int = 20, reach: int = 16) -> Section:
    """The tokens of largest |delta|, worst first.

    Args:
        tokens: as :func:`mismatch.reports.figures.comparable` gives them.
        reach: tokens of context on either side.
    """
    size = tokens["delta"].abs().to_numpy(dtype=np.float64)
    order = [int(row) for row in np.argsort(-size, kind="stable")[:most] if size[row] > 0]
    none = "None: " + ("delta is exactly 0 everywhere" if size.size else "nothing was compared")
    return Section(
        id="worst",
        title="Worst tokens",
        lead=LEAD.format(n=len(order)) if order else "",
        sentences=("" if order else f"{none}.",),
        tables=(Table(COLUMNS, tuple(_row(tokens, row, reach) for row in order)),),
        folded=False,
    )


def _row(table: pd.DataFrame, row: int, reach: int) -> tuple[Cell | Value, ...]:
    entry = table.iloc[row]
    delta, flips = float(entry["delta"]), entry["routing_flips"]
    token = token_text(str(entry["token"]))
    before = _context(table, row - reach, row, row)
    after = _context(table, row + 1, row + 1 + reach, row)
    return (
        Cell(token, note=f"id {entry['token_id']}"),
        delta,
        _factor(abs(delta)),
        math.exp(entry["rollout_logprob"]),
        math.exp(entry["train_logprob"]),
        Cell(
            None if _is_missing(flips) else int(flips),
            note=_layers(entry.get("routing_flipped_layers")),
        ),
        Cell(f"sequence {entry['sequence']}", note=f"position {entry['position']}"),
        Excerpt(before, token, after),
    )


def _factor(size: float) -> str:
    """By how much a probability is off: percent up to a factor of 2."""
    off = math.expm1(min(size, 700.0))
    return percent(off) if off < 1 else times(off + 1)


def _layers(flipped: object) -> str:
    """The layers that chose other experts, in words; cut short where there are many runs of them.

    >>> _layers([0, 3, 5, 6, 7]), _layers([4]), _layers([])
    ('layers 0, 3, 5–7', 'layer 4', '')
    """
    if not isinstance(flipped, Sequence | np.ndarray) or len(flipped) == 0:
        return ""  # null without routes; runs of earlier versions do not name them
    layers = np.asarray(flipped)
    runs = np.split(layers, np.flatnonzero(np.diff(layers) > 1) + 1)
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    more = " …" if len(parts) > MOST_LAYERS else ""
    noun = "layer" if len(layers) == 1 else "layers"
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
    found = (unlikely(tokens), late(tokens), flipped(tokens))
    ranked = sorted((each for each in found if each is not None), key=lambda each: -each.strength)
    return [concentration(size), *(contrast.sentence for contrast in ranked)]
