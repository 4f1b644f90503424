"""On a terminal: a new run against an old one; the verdict is the last line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mismatch.experiments.regression.types import Against
from mismatch.reports import against
from mismatch.reports.console import columns, heading, paragraph, say
from mismatch.reports.formatting import line

if TYPE_CHECKING:
    from rich.console import Console

MOST_CHANGES = 16
STYLES = {"healthy": "green", "warn": "yellow", "critical": "bold red", "none": "dim", "": "dim"}


def print_against(made: Against, console: Console, out: Path | None = None) -> None:
    """Print all of it."""
    from rich.text import Text

    title = Text(line(made.new.model), "bold")
    title.append(f"  {line(made.new.run)} (new) against {line(made.old.run)} (old)")
    say(console, "")
    console.print(title, highlight=False)
    for name, one in (("old", made.old), ("new", made.new)):
        paragraph(console, f"{name}: {against.side(one)}", style="dim")
    heading(console, "What moved", "new - old, with 95 % intervals by prompt")
    table = columns(
        ("", False, 0), ("old", True, 0), ("new", True, 0), ("change", True, 0),
        ("95 % interval", True, 0), ("p", True, 0),
    )  # fmt: skip
    for row in against.lines(made):
        table.add_row(
            Text(f"  {row.label}", STYLES[row.tone]), row.old, row.new, row.change, row.interval,
            row.p,
        )  # fmt: skip
    console.print(table, highlight=False, markup=False)
    for row in against.lines(made):
        if row.result:
            paragraph(console, f"- {row.label}: {row.result} {row.mark}", style=STYLES[row.tone])
    for sentence in against.sentences(made):
        paragraph(console, f"- {sentence}")
    _changed(made, console)
    paragraph(console, made.method, style="dim")
    if out is not None:
        say(console, "")
        say(console, f"Everything is in {line(out)} (open against.html)")
    say(console, "")
    say(console, against.verdict_line(made), STYLES[against.status(made)])


def _changed(made: Against, console: Console) -> None:
    heading(console, "What changed", "said by the runs themselves")
    found = against.changes(made)
    if not found:
        paragraph(console, "nothing of what both runs say of themselves")
    for one in found[:MOST_CHANGES]:
        paragraph(console, f"- {one.where}: {one.name}: {one.old} → {one.new}")
    if len(found) > MOST_CHANGES:
        paragraph(console, f"- and {len(found) - MOST_CHANGES} more: --out DIR writes all of them")
