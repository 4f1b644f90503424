"""On a terminal: the fixes that were tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mismatch.reports import fixes
from mismatch.reports.console import columns, heading, paragraph
from mismatch.reports.text import line
from mismatch.types import Report

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

STYLES = {"healthy": "green", "warn": "yellow", "critical": "bold red"}


def print_fixes(report: Report, console: Console) -> None:
    """What each did to the numbers, what follows, and what could not be measured."""
    made = report.result("fixes")
    if made is None:
        return
    heading(console, fixes.TITLE, "each applied for real; nothing is corrected by weights")
    rows = fixes.measured_rows(made)
    if rows:
        console.print(_values(rows), highlight=False, markup=False)
        console.print(_changes(rows), highlight=False, markup=False)
    for sentence in fixes.sentences(report):
        paragraph(console, f"- {sentence}")
    for advice in fixes.advice(made):
        paragraph(console, f"- To use {advice.id}: {advice.command}")
    if made.best_together is not None:
        paragraph(console, "- How verl, TRL and others set one: mismatch fixes ID")
    for loss in fixes.loss_rows(report):
        kept = f"keeps {loss.kept} of the tokens, effective size {loss.ess}; "
        paragraph(console, f"- {loss.id} ({loss.label}): {kept}{loss.remark}")
    for row in fixes.other_rows(made):
        paragraph(console, f"- {row.id}: {row.result}: {row.reason}", style="dim")
    for reason in (*made.left_out, made.method):
        if reason:
            paragraph(console, f"- {line(reason)}", style="dim")


def _values(rows: list[fixes.FixRow]) -> Table:
    """Before as the first row: it is the same for all of them."""
    table = columns(
        ("", False, 0), ("k3", True, 0), ("mean |delta|", True, 0), ("99.9 %", True, 0),
        ("experts", True, 0), ("took", True, 0), ("verdict", True, 0),
    )  # fmt: skip
    first = rows[0]
    table.add_row(
        "  without", first.k3.before, first.mean.before, first.tail.before, first.routes.before
    )
    for row in rows:
        table.add_row(
            _stacked(row.id), row.k3.after, row.mean.after, row.tail.after, row.routes.after,
            row.seconds, row.verdict,
        )  # fmt: skip
    return table


def _changes(rows: list[fixes.FixRow]) -> Table:
    from rich.text import Text

    table = columns(
        ("", False, 0), ("change of k3", True, 0), ("95 % interval", True, 0),
        ("p", True, 0), ("", False, 0),
    )  # fmt: skip
    for row in rows:
        result = Text(f"{row.mark} {row.result}", STYLES.get(row.tone, "dim"))
        table.add_row(_stacked(row.id), row.change, row.interval, row.p, result)
    return table


def _stacked(name: str) -> str:
    """A combination, one fix per line: there are no spaces to break it at."""
    return "  " + "\n  +".join(fixes.labels(name))
