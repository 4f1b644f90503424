"""What the large differences have in common: their texts, prompts, places and direction.

Shares are of k3, whose mean over all tokens is the headline: exp(delta) - 1 - delta of each token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.reports.contrasts import LEAST, comparable, rank_in_response
from mismatch.reports.formatting import (
    count,
    number,
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

MOST = 8  # rows of a table
FEW = 5  # texts and prompts that a sentence speaks of
LONGEST = 60  # characters of a neighbour
MOST_LAYERS = 6  # runs of layers that are named beside a token
GAP = " ⋯ "  # tokens in between were not sampled: a prompt, or a tool's output
GROUP = (
    Column("tokens", count),
    Column("of k3", percent),
    Column("mean |Δ|, nats"),
    Column("lower in training", percent, detail="share of its tokens"),
)
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


def section(report: Report, tokens: pd.DataFrame) -> Section | None:
    """Patterns of the tokens table; None where nothing differs.

    Args:
        tokens: as in tokens.parquet, of either version.
    """
    tokens = comparable(tokens)
    groups = Groups(tokens)
    if tokens.empty or not groups.total > 0.0:
        return None
    parts = [
        ("by-text", "By token text", groups.of_texts(), "token"),
        ("by-prompt", "By prompt", groups.of_prompts(), "prompt"),
        ("by-place", "By place in the response", groups.of_places(), "sampled token"),
    ]
    return Section(
        id="patterns",
        title="Patterns",
        sentences=(
            groups.concentrated(parts[0][2], "text"),
            groups.concentrated(parts[1][2], "prompt"),
        ),
        parts=tuple(
            Section(id, title, tables=(Table((Column(what, text), *GROUP), rows[:MOST]),))
            for id, title, rows, what in parts
        ),
        page_only=True,
        short=groups.concentrated(parts[0][2], "text"),
    )


class Groups:
    """Rows of a table for each group of tokens, those that carry most of k3 first."""

    def __init__(self, tokens: pd.DataFrame) -> None:
        self.tokens = tokens
        self.delta = tokens["delta"].to_numpy(np.float64)
        self.k3 = np.expm1(np.minimum(self.delta, 700.0)) - self.delta
        self.total = float(self.k3.sum())

    def of_texts(self) -> tuple[tuple[Value, ...], ...]:
        names = self.tokens["token"].to_numpy(object)
        return self._rows(names, lambda name: token_text(str(name), 40))

    def of_prompts(self) -> tuple[tuple[Value, ...], ...]:
        """None where the table is of version 1, which does not say whose prompt is whose."""
        if "prompt" not in self.tokens or self.tokens["prompt"].nunique() < 2:
            return ()
        return self._rows(self.tokens["prompt"].to_numpy(), str)

    def of_places(self) -> tuple[tuple[Value, ...], ...]:
        """Places that double: the first token, the next two, the next four …, in their order."""
        doubled = np.log2(rank_in_response(self.tokens) + 1).astype(np.int64)
        return self._rows(doubled, _doubled, ranked=False)

    def _rows(self, keys: Any, label: Any, ranked: bool = True) -> tuple[tuple[Value, ...], ...]:
        import pandas as pd

        which, names = pd.factorize(keys, sort=not ranked)
        size = len(names)
        n = np.bincount(which, minlength=size)
        share = np.bincount(which, self.k3, size) / self.total
        mean = np.bincount(which, np.abs(self.delta), size) / n
        lower = np.bincount(which, self.delta < 0, size) / n
        order = np.argsort(-share, kind="stable") if ranked else np.arange(size)
        return tuple(
            (
                label(names[i]),
                int(n[i]),
                float(share[i]),
                float(mean[i]),
                float(lower[i]) if n[i] >= LEAST else None,
            )
            for i in order[: MOST if ranked else None]
        )

    def concentrated(self, rows: Sequence[tuple[Value, ...]], noun: str) -> str:
        """What the first few groups carry, beside their share of the tokens."""
        few = rows[:FEW]
        if len(few) < FEW:
            return ""
        tokens = sum(int(row[1]) for row in few if isinstance(row[1], int))
        carried = sum(float(row[2]) for row in few if isinstance(row[2], float))
        names = ", ".join(f"“{row[0]}”" if noun == "text" else str(row[0]) for row in few)
        return (
            f"Five {noun}s ({names}), {percent(tokens / len(self.delta))} of the tokens, carry "
            f"{percent(min(carried, 1.0))} of k3."
        )


def _doubled(power: int) -> str:
    first = 1 << int(power)
    return "first" if first == 1 else f"{first:,}–{2 * first - 1:,}"


# ---------------------------------------------------------------- the worst tokens


def worst_tokens(tokens: pd.DataFrame, most: int = 12, reach: int = 16) -> Section:
    """The tokens of largest |delta|, worst first, repetitions merged.

    Args:
        tokens: as :func:`mismatch.reports.contrasts.comparable` gives them.
        reach: tokens of context on either side.
    """
    size = tokens["delta"].abs().to_numpy(dtype=np.float64)
    ranked = np.argsort(-size, kind="stable")
    order = [int(row) for row in ranked[: 50 * most] if size[row] > 0]
    none = "None: " + ("delta is exactly 0 everywhere" if size.size else "nothing was compared")
    rows = merged(tokens, order)[:most]
    return Section(
        id="worst",
        title="Worst tokens",
        lead=LEAD if order else "",
        sentences=("" if order else f"{none}.",),
        tables=(Table(WORST, tuple(_row(tokens, group, reach) for group in rows)),),
        folded=False,
    )


def merged(tokens: pd.DataFrame, order: Iterable[int]) -> list[list[int]]:
    """Rows grouped by prompt, position, token and delta to two digits, in the given order."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    whose = "prompt" if "prompt" in tokens else "sequence"
    for row in order:
        entry = tokens.iloc[row]
        key = (entry[whose], entry["position"], entry["token_id"], f"{entry['delta']:.1e}")
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _row(table: pd.DataFrame, group: list[int], reach: int) -> tuple[Cell | Value, ...]:
    row = group[0]
    entry = table.iloc[row]
    flips = entry["routing_flips"]
    before = _context(table, row - reach, row, row)
    after = _context(table, row + 1, row + 1 + reach, row)
    token = token_text(str(entry["token"]))
    again = [str(table["sequence"].iloc[other]) for other in group[1:]]
    also = f"; also in {', '.join(again[:4])}" + (" …" if len(again) > 4 else "") if again else ""
    return (
        Cell(token, note=f"id {entry['token_id']}"),
        float(entry["delta"]),
        math.exp(min(float(entry["delta"]), 700.0)),
        float(entry["rollout_logprob"]),
        float(entry["train_logprob"]),
        Cell(
            None if _is_missing(flips) else int(flips),
            note=layers_in_words(entry.get("routing_flipped_layers")),
        ),
        Cell(
            f"sequence {entry['sequence']}",
            note=f"position {entry['position']}{also}",
            link=f"s{entry['sequence']}t{entry['position']}",
        ),
        Excerpt(before, token, after),
    )


def layers_in_words(flipped: object) -> str:
    """The layers that chose other experts, in words; cut short where there are many runs of them.

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
        parts.append(visible(str(token)[:LONGEST]))
        previous = position
    if start >= of and len(rows) and rows["position"].iloc[0] != table["position"].iloc[of] + 1:
        parts.insert(0, GAP)
    if stop <= of and len(rows) and rows["position"].iloc[-1] != table["position"].iloc[of] - 1:
        parts.append(GAP)
    return "".join(parts)
