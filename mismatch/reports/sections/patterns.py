"""What the large differences have in common: texts, prompts, places, kinds of token, direction.

Shares are of k3, whose mean over all tokens is the headline: exp(delta) - 1 - delta of each token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.reports.contrasts import LEAST, comparable, rank_in_response
from mismatch.reports.formatting import (
    bound,
    capital,
    count,
    line,
    number,
    percent,
    plural,
    signed,
    text,
    times,
    token_text,
    visible,
)
from mismatch.reports.section import Cell, Cells, Column, Excerpt, Section, Table, Value
from mismatch.reports.summary import headline
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
    texts, prompts = groups.of_texts(), groups.of_prompts()
    parts = [
        ("by-text", "By token text", texts, "token"),
        ("by-prompt", "By prompt", prompts, "prompt"),
        ("by-place", "By place in the response", groups.of_places(), "sampled token"),
    ]
    sentences = [groups.concentrated(texts, "text"), groups.concentrated(prompts, "prompt")]
    return Section(
        "patterns",
        "Patterns",
        sentences=sentences,
        parts=[
            Section(id, title, tables=[Table((Column(what, text), *GROUP), rows[:MOST])])
            for id, title, rows, what in parts
        ],
        page_only=True,
        short=sentences[0],
    )


class Groups:
    """Rows of a table for each group of tokens, those that carry most of k3 first."""

    def __init__(self, tokens: pd.DataFrame) -> None:
        self.tokens = tokens
        self.delta = tokens["delta"].to_numpy(np.float64)
        self.k3 = np.expm1(np.minimum(self.delta, 700.0)) - self.delta
        self.total = float(self.k3.sum())

    def of_texts(self) -> list[tuple[Value, ...]]:
        names = self.tokens["token"].to_numpy(object)
        return self._rows(names, lambda name: token_text(str(name), 40))

    def of_prompts(self) -> list[tuple[Value, ...]]:
        """None where the table is of version 1, which does not say whose prompt is whose."""
        if "prompt" not in self.tokens or self.tokens["prompt"].nunique() < 2:
            return []
        return self._rows(self.tokens["prompt"].to_numpy(), str)

    def of_places(self) -> list[tuple[Value, ...]]:
        """Places that double: the first token, the next two, the next four …, in their order."""
        doubled = np.log2(rank_in_response(self.tokens) + 1).astype(np.int64)
        return self._rows(doubled, _doubled, ranked=False)

    def _rows(self, keys: Any, label: Any, ranked: bool = True) -> list[tuple[Value, ...]]:
        import pandas as pd

        which, names = pd.factorize(keys, sort=not ranked)
        n = np.bincount(which, minlength=len(names))
        share = np.bincount(which, self.k3, len(names)) / self.total
        mean = np.bincount(which, np.abs(self.delta), len(names)) / n
        lower = np.bincount(which, self.delta < 0, len(names)) / n
        order = np.argsort(-share, kind="stable")[:MOST] if ranked else np.arange(len(names))
        return [
            (
                label(names[i]),
                int(n[i]),
                float(share[i]),
                float(mean[i]),
                float(lower[i]) if n[i] >= LEAST else None,
            )
            for i in order
        ]

    def concentrated(self, rows: Sequence[tuple[Any, ...]], noun: str) -> str:
        """What the first few groups carry, beside their share of the tokens."""
        few = rows[:FEW]
        if len(few) < FEW:
            return ""
        tokens, carried = sum(row[1] for row in few), sum(row[2] for row in few)
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


def _row(table: pd.DataFrame, group: list[int], reach: int) -> Cells:
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


# ---------------------------------------------------------------- groups that the report holds

Breakdown = dict[str, list[Any]]
Group = tuple[str, float, float | None, float | None, int]  # columns without the last, a bar
GROUPS_LEAD = (
    "Groups of tokens. “Mean delta” is signed: away from 0 it is a systematic difference, not "
    f"noise. The share is of the whole k3. Groups of fewer than {LEAST} tokens are blank."
)
GROUPS = (
    Column("tokens", text),
    Column("mean |delta|", number),
    Column("mean delta", number),
    Column("share of k3", percent),
    Column("count", count),
    Column("of the largest", percent, detail="mean |delta|"),
)


def breakdowns(report: Report) -> Section | None:
    """Where and when the two sides differ; tables with one bucket only are left out."""
    tables = headline(report).breakdowns
    parts = [
        _group(tables[name], title, remark, label, folded=name.endswith("position"))
        for name, title, remark, label in TABLES
        if name in tables and len(tables[name]["count"]) > 1 and "k3_share" in tables[name]
    ]
    blocks = tables.get("by_block", {"size": []})
    parts += [_block(blocks, row) for row in range(len(blocks["size"]))]
    parts = sorted((part for part in parts if part.holds), key=lambda part: part.folded)
    if not parts:
        return None
    return Section(
        "where",
        "Groups of tokens",
        GROUPS_LEAD,
        short=carriers(report),
        parts=parts,
        page_only=True,
    )


def carriers(report: Report) -> str:
    """How much of the KL its largest tokens carry; "" where that is not known."""
    shares = headline(report).breakdowns.get("top_tokens", {}).get("k3_share", [])
    if not shares or None in shares:
        return ""
    return (
        f"The token of the largest k3 term carries {percent(shares[0])} of k3; the "
        f"{plural(len(shares), 'token')} of the largest: {percent(min(sum(shares), 1.0))}."
    )


def _span(table: Breakdown, row: int) -> str:
    return f"{count(table['start'][row])} to {count(table['end'][row] - 1)}"


def _value(table: Breakdown, row: int) -> str:
    low, high = table["low"][row], table["high"][row]
    return f"{bound(low)} and above" if high is None else f"{bound(low)} to {bound(high)}"


def _of(column: str) -> Callable[[Breakdown, int], str]:
    return lambda table, row: line(table[column][row])


def _length(table: Breakdown, row: int) -> str:
    return f"{_span(table, row)} ({plural(table['sequences'][row], 'sequence')})"


def _cached(table: Breakdown, row: int) -> str:
    mean = table["mean_cached"][row]
    return f"{table['turns'][row]}" + (f" ({count(round(mean))} tokens)" if mean else "")


TABLES = (
    ("by_turn", "Turn", "of the assistant", _of("turn")),
    ("by_edge", "First and last token", "of a turn", _of("edge")),
    ("by_cache", "Prefix cache", "turns whose context was read from it, or computed", _cached),
    ("by_token_class", "Kind of token", "by its text", _of("token_class")),
    ("by_probability", "Probability", "that the rollout side gave", _value),
    ("by_entropy", "Entropy", "of the train side, nats", _value),
    ("by_length", "Length of the response", "tokens sampled", _length),
    ("by_position", "Place in the response", "tokens from its start", _span),
    ("by_absolute_position", "Place in the sequence", "prompt included", _span),
)
BLOCKS = {
    "KV block": "tokens whose forward opens a block of the KV cache",
    "prefill chunk": "tokens whose forward opens a chunk of the prefill",
    "beyond sliding window": "tokens with more context than the window holds",
}


def _group(
    table: Breakdown, title: str, remark: str, label: Callable[[Breakdown, int], str], folded: bool
) -> Section:
    names = "mean_abs_delta", "mean_delta", "k3_share", "count"
    values = enumerate(zip(*(table[name] for name in names), strict=True))
    rows = [(label(table, i), mean, signed, share, n) for i, (mean, signed, share, n) in values]
    return _part(title, remark, rows, folded)


def _block(table: Breakdown, row: int) -> Section:
    name, size = table["boundary"][row], table["size"][row]
    rows: list[Group] = [
        (label, table[column][row], None, None, table[f"{column}_count"][row])
        for label, column in (("there", "at"), ("all others", "elsewhere"))
    ]
    return _part(f"{capital(name)}, {count(size)}", BLOCKS.get(name, ""), rows)


def _part(title: str, remark: str, rows: list[Group], folded: bool = False) -> Section:
    """Of the groups that are large enough; nothing where there are not two of them."""
    seen = [row for row in rows if row[4] >= LEAST]
    largest = max((row[1] for row in seen), default=0.0) or 1.0
    shown = [
        (*row, Cell(row[1] / largest, "bar"))
        if row in seen
        else (row[0], *[None] * 3, row[4], None)
        for row in rows
    ]
    table = Table(GROUPS, shown if len(seen) > 1 else ())
    return Section(f"where-{title}", title, remark, tables=[table], folded=folded)
