"""Tokens by place, turn, kind, probability and entropy: the groups that the report holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mismatch.reports.formatting import bound, capital, count, line, number, percent, plural, text
from mismatch.reports.section import Cell, Column, Section, Table
from mismatch.reports.sections.tokens import LEAST
from mismatch.reports.summary import headline
from mismatch.types import Report

Breakdown = dict[str, list[Any]]
Group = tuple[Cell, float, float | None, float | None, int]  # columns without the last, a bar
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


def section(report: Report) -> Section | None:
    """Return where and when the two sides differ, without tables that have a single bucket."""
    tables = headline(report).breakdowns
    parts = [
        _group(tables[name], title, remark, label, LINKS.get(name), name.endswith("position"))
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
    """Return how much of the KL its largest tokens carry; "" where that is not known."""
    shares = headline(report).breakdowns.get("top_tokens", {}).get("k3_share", [])
    if not shares or None in shares:
        return ""
    return (
        f"The worst token makes {percent(shares[0])} of k3, the worst {len(shares)} make "
        f"{percent(min(sum(shares), 1.0))}."
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
# What shows a group's tokens in the explorer: the controls that explorer.js sets by a link.
LINKS: dict[str, Callable[[Breakdown, int], str]] = {
    "by_turn": lambda table, row: f"turn={table['turn'][row]}",
    "by_token_class": lambda table, row: f"kind={table['token_class'][row]}",
    "by_position": lambda table, row: f"from={table['start'][row] + 1}&to={table['end'][row]}",
}
BLOCKS = {
    "KV block": "tokens whose forward opens a block of the KV cache",
    "prefill chunk": "tokens whose forward opens a chunk of the prefill",
    "beyond sliding window": "tokens with more context than the window holds",
}


def _group(
    table: Breakdown,
    title: str,
    remark: str,
    label: Callable[[Breakdown, int], str],
    link: Callable[[Breakdown, int], str] | None,
    folded: bool,
) -> Section:
    names = "mean_abs_delta", "mean_delta", "k3_share", "count"
    values = enumerate(zip(*(table[name] for name in names), strict=True))
    rows = [
        (Cell(label(table, i), link=f"tokens&{link(table, i)}" if link else ""), *group)
        for i, group in values
    ]
    return _part(title, remark, rows, folded)


def _block(table: Breakdown, row: int) -> Section:
    name, size = table["boundary"][row], table["size"][row]
    rows: list[Group] = [
        (Cell(label), table[column][row], None, None, table[f"{column}_count"][row])
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
