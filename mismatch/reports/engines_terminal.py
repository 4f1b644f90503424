"""On a terminal: two engines and the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mismatch.reports import engines
from mismatch.reports.console import columns, heading, paragraph
from mismatch.reports.text import line
from mismatch.types import Report

if TYPE_CHECKING:
    from rich.console import Console


def print_engines(report: Report, console: Console) -> None:
    """The edges, who stands apart, and what was not measured."""
    made = report.result("engines")
    if made is None:
        return
    heading(console, engines.TITLE, "each scored what the other sampled; mean |delta| in nats")
    table = columns(
        ("left / right", False, 0), ("tokens of", False, 0), ("mean", True, 0),
        ("95 % interval", True, 0), ("k3", True, 0), ("experts", True, 0),
    )  # fmt: skip
    rows = engines.edge_rows(made)
    for row in rows:
        if not row.reason:
            mark = "*" if row.how == engines.KINDS["decode"] else " "
            table.add_row(
                f"{mark} {row.pair}", row.tokens, row.mean, row.interval, row.k3, row.experts
            )
    console.print(table, highlight=False, markup=False)
    paragraph(console, "* left as it sampled; else both scored given tokens", style="dim")
    for missing in made.not_tested:
        paragraph(console, f"- not tested: {line(missing)}", style="dim")
    for sentence in engines.sentences(made, report):
        paragraph(console, f"- {sentence}")
