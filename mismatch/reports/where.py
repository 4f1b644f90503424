"""Where and when the two sides differ: the breakdowns as rows that every rendering can show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mismatch.reports import quantities
from mismatch.reports.summary import headline
from mismatch.reports.text import line
from mismatch.types import Report

Table = dict[str, list[Any]]


@dataclass(frozen=True, slots=True)
class Bucket:
    """One group of tokens, as text.

    Attributes:
        bar: its mean |delta| over the largest of its table, for a bar.
    """

    label: str
    mean: str
    signed: str
    share: str
    count: str
    bar: float


@dataclass(frozen=True, slots=True)
class Group:
    """One table with its words; ``folded`` where it has too many rows to be read at once."""

    title: str
    remark: str
    buckets: tuple[Bucket, ...]
    folded: bool = False


def groups(report: Report) -> list[Group]:
    """The tables that say something: those with one bucket only are left out."""
    tables = headline(report).breakdowns
    made = [
        _group(tables[name], title, remark, label, folded=name.endswith("position"))
        for name, title, remark, label in TABLES
        if name in tables and len(tables[name]["count"]) > 1 and "k3_share" in tables[name]
    ]
    if "by_block" in tables:
        made += [_block(tables["by_block"], row) for row in range(len(tables["by_block"]["size"]))]
    return made


def carriers(report: Report) -> str:
    """How much of the KL its largest tokens carry; "" where that is not known."""
    shares = headline(report).breakdowns.get("top_tokens", {}).get("k3_share", [])
    if not shares or None in shares:
        return ""
    first, all_of_them = quantities.percent(shares[0]), quantities.percent(min(sum(shares), 1.0))
    most = quantities.plural(len(shares), "token")
    return (
        f"The token of the largest k3 term carries {first} of k3; the {most} of the largest: "
        f"{all_of_them}."
    )


def _span(table: Table, row: int) -> str:
    return f"{table['start'][row]:,} to {table['end'][row] - 1:,}"


def _value(table: Table, row: int) -> str:
    low, high = table["low"][row], table["high"][row]
    if high is None:
        return f"{quantities.bound(low)} and above"
    return f"{quantities.bound(low)} to {quantities.bound(high)}"


def _of(column: str) -> Callable[[Table, int], str]:
    return lambda table, row: line(table[column][row])


def _length(table: Table, row: int) -> str:
    return f"{_span(table, row)} ({quantities.plural(table['sequences'][row], 'sequence')})"


TABLES = (
    ("by_turn", "Turn", "of the assistant", _of("turn")),
    ("by_edge", "First and last token", "of a turn", _of("edge")),
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
    table: Table, title: str, remark: str, label: Callable[[Table, int], str], folded: bool
) -> Group:
    largest = max(table["mean_abs_delta"]) or 1.0
    buckets = tuple(
        Bucket(
            label(table, row),
            quantities.number(table["mean_abs_delta"][row]),
            quantities.number(table["mean_delta"][row]),
            quantities.percent(table["k3_share"][row]),
            quantities.count(table["count"][row]),
            table["mean_abs_delta"][row] / largest,
        )
        for row in range(len(table["count"]))
    )
    return Group(title, remark, buckets, folded)


def _block(table: Table, row: int) -> Group:
    name, size = table["boundary"][row], table["size"][row]
    largest = max(table["at"][row], table["elsewhere"][row]) or 1.0
    buckets = tuple(
        Bucket(
            label,
            quantities.number(table[column][row]),
            quantities.MISSING,
            quantities.MISSING,
            quantities.count(table[f"{column}_count"][row]),
            table[column][row] / largest,
        )
        for label, column in (("there", "at"), ("all others", "elsewhere"))
    )
    return Group(f"{name[0].upper()}{name[1:]}, {size:,}", BLOCKS.get(name, ""), buckets)
