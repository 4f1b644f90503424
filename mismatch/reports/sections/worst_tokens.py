"""The tokens of largest |delta|, with the text around them."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.reports.formatting import count, number, signed, text, times, token_text, visible
from mismatch.reports.section import Cell, Cells, Column, Excerpt, Section, Table

if TYPE_CHECKING:
    import pandas as pd

MOST, REACH = 12, 16  # rows; tokens of context on either side
LONGEST = 60  # characters of a neighbour
MOST_LAYERS = 6  # runs of layers that are named next to a token
GAP = " ⋯ "  # tokens in between were not sampled: a prompt, or a tool's output
WORST = (
    Column("token", text),
    Column("Δ, nats", signed),
    Column("ratio", times),
    Column("logprob, rollout", number),
    Column("logprob, train", number),
    Column("flipped layers", count),
    Column("where", text),
    Column("in its text", text),
)
LEAD = (
    "↵ is a newline, ⟨…⟩ a character that cannot be seen. The same token at the same place of "
    "several samples of a prompt, off by as much, is one row."
)


def worst_tokens(tokens: pd.DataFrame) -> Section:
    """Return the tokens of largest |delta|, worst first, repetitions merged.

    Args:
        tokens: as :func:`mismatch.reports.tokens_table.comparable` gives them.
    """
    size = tokens["delta"].abs().to_numpy(dtype=np.float64)
    ranked = np.argsort(-size, kind="stable")[: 50 * MOST]
    groups: dict[tuple[Any, ...], list[int]] = {}
    whose = "prompt" if "prompt" in tokens else "sequence"
    for row in ranked[size[ranked] > 0].tolist():
        entry = tokens.iloc[row]
        key = (entry[whose], entry["position"], entry["token_id"], f"{entry['delta']:.1e}")
        groups.setdefault(key, []).append(row)
    none = "None: " + ("delta is exactly 0 everywhere" if size.size else "nothing was compared")
    rows = [_row(tokens, group) for group in list(groups.values())[:MOST]]
    return Section(
        id="worst",
        title="Worst tokens",
        lead=LEAD if rows else "",
        sentences=("" if rows else f"{none}.",),
        tables=(Table(WORST, rows),),
        folded=False,
    )


def _row(table: pd.DataFrame, group: list[int]) -> Cells:
    row = group[0]
    entry = table.iloc[row]
    delta, flips = float(entry["delta"]), entry["routing_flips"]
    token = token_text(str(entry["token"]))
    again = [str(table["sequence"].iloc[other]) for other in group[1:]]
    also = f"; also in {', '.join(again[:4])}" + (" …" if len(again) > 4 else "") if again else ""
    return (
        Cell(token, note=f"id {entry['token_id']}"),
        delta,
        math.exp(min(delta, 700.0)),
        float(entry["rollout_logprob"]),
        float(entry["train_logprob"]),
        Cell(
            int(flips) if isinstance(flips, numbers.Integral) else None,
            note=layers_in_words(entry.get("routing_flipped_layers")),
        ),
        Cell(
            f"sequence {entry['sequence']}",
            note=f"position {entry['position']}{also}",
            link=f"s{entry['sequence']}t{entry['position']}",
        ),
        Excerpt(
            _context(table, row - REACH, row, row),
            token,
            _context(table, row + 1, row + 1 + REACH, row),
        ),
    )


def layers_in_words(flipped: object) -> str:
    """Return the layers that chose other experts, in words; cut short if there are many runs.

    >>> layers_in_words([0, 3, 5, 6, 7]), layers_in_words([4]), layers_in_words([])
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


def _context(table: pd.DataFrame, start: int, stop: int, of: int) -> str:
    """Text of the rows [start, stop) that belong to the same sequence as row ``of``."""
    rows = table.iloc[max(start, 0) : stop]
    rows = rows[rows["sequence"] == table["sequence"].iloc[of]]
    parts, previous = [], None
    for position, token in zip(rows["position"], rows["token"], strict=True):
        if previous is not None and position != previous + 1:
            parts.append(GAP)
        parts.append(visible(str(token)[:LONGEST]))
        previous = position
    if start >= of and len(rows) and rows["position"].iloc[0] != table["position"].iloc[of] + 1:
        parts.insert(0, GAP)
    if stop <= of and len(rows) and rows["position"].iloc[-1] != table["position"].iloc[of] - 1:
        parts.append(GAP)
    return "".join(parts)
