"""An audit of kernels on a terminal: 80 columns, and the last line is the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mismatch.experiments.kernels.types import AuditReport
from mismatch.reports import kernels
from mismatch.reports.console import columns, heading, paragraph, say
from mismatch.reports.kernels_rows import Part, View

if TYPE_CHECKING:
    from rich.console import Console

MOST = 4  # gradients with a column of their own
STYLES = {"healthy": "green", "warn": "yellow", "critical": "bold red", "none": "dim"}


def print_kernels(
    report: AuditReport, console: Console, out: Path | None = None, details: bool = False
) -> None:
    """Print the audit.

    Args:
        out: where its files are.
        details: errors per dtype and costs too.

    Raises:
        MismatchError: nothing was audited.
    """
    shown = kernels.view(report, pictures=False)
    assert shown is not None
    say(console, "")
    say(console, f"{shown.model}  kernels on {shown.device}", "bold")
    say(console, shown.shape, "dim")
    for part in shown.parts:
        _table(part, console, details)
        if details:
            _errors(part, console)
            _costs(part, console)
    _harm(shown, console)
    if shown.not_tested:
        heading(console, "Not tested")
        for reason in shown.not_tested:
            paragraph(console, f"- {reason}", style="dim")
    if out is not None:
        say(console, "")
        say(
            console, f"Everything is in {out} (open {'report' if _in_run(out) else 'kernels'}.html)"
        )
    say(console, "")
    say(console, shown.verdict.line, STYLES[shown.tone])


def print_in_report(report: AuditReport, console: Console) -> None:
    """The section of a run's report."""
    shown = kernels.view(report, pictures=False)
    assert shown is not None
    heading(console, kernels.TITLE, f"{shown.verdict.status}; in full: report.html")
    for sentence in shown.sentences:
        paragraph(console, f"- {sentence}")


def _in_run(out: Path) -> bool:
    return (out / "report.html").exists()


def _table(part: Part, console: Console, details: bool) -> None:
    from rich.text import Text

    if part.lines:
        heading(console, part.title, kernels.LEGEND)
        titles = [(kernels.WORDS[name][1], False, 4) for name in part.columns]
        table = columns(("", False, 1), ("", False, 0), *titles)
        table.columns[0].no_wrap, table.columns[1].no_wrap = True, False
        table.columns[1].overflow = "fold"
        for row in part.lines:
            sign, name = Text(row.sign, STYLES[row.tone]), row.short + (" *" if row.chosen else "")
            marks = (Text(mark.sign, STYLES[mark.tone]) for mark in row.marks)
            table.add_row(sign, Text(name), *marks)
        console.print(table, highlight=False, markup=False)
        if any(row.chosen for row in part.lines):
            paragraph(console, "* what the trainer takes by itself", style="dim")
    else:
        heading(console, part.title)
    for row in part.lines:
        refused = f": {row.reason}" if row.verdict == "unusable" and row.reason else ""
        if row.faults or refused:
            paragraph(console, f"{row.name} is {row.verdict}{refused}", style=STYLES[row.tone])
        for fault in row.faults if details else row.causes:
            paragraph(console, f"✕ {fault}", indent=4)
        if row.follows and not details:
            paragraph(console, f"also wrong: {', '.join(row.follows)}", indent=4)
        for remark in row.remarks if details else ():
            paragraph(console, f"- {row.short}, {remark}", indent=4, style="dim")
    told = [other for other in part.others if details or other.tone == "critical"]
    for other in told:
        paragraph(console, f"{other.sign} {other.name}: {other.reason}", style=STYLES[other.tone])
    absent = [other.name for other in part.others if other not in told]
    if absent:
        said = f"– not usable here: {', '.join(absent)} (why: --details)"
        paragraph(console, said, style="dim")


def _errors(part: Part, console: Console) -> None:
    if not part.errors:
        return
    heading(console, f"{part.title}, errors", "relative, against float64; floor: rounding alone")
    narrow = len(part.gradients) > MOST
    names = ("largest gradient", "of") if narrow else part.gradients
    table = columns(
        ("", False, 0), ("dtype", False, 0), ("output", True, 0),
        *((name, True, 0) for name in names), ("floor", True, 0),
    )  # fmt: skip
    table.columns[0].overflow = "fold"
    for row in part.errors:
        values = row.largest if narrow else [value for _, value in row.gradients]
        table.add_row(f"  {row.name}", row.dtype, row.forward, *values, row.floor)
    console.print(table, highlight=False, markup=False)


def _costs(part: Part, console: Console) -> None:
    if not part.costs:
        return
    heading(console, f"{part.title}, costs", "one layer, forward and backward")
    table = columns(
        ("", False, 0), ("tokens", True, 0), ("time", True, 0), ("to the best", True, 0),
        ("memory", True, 0), ("to the best", True, 0),
    )  # fmt: skip
    table.columns[0].overflow = "fold"
    for row in part.costs:
        table.add_row(f"  {row.name}", row.tokens, row.seconds, row.slower, row.memory, row.more)
    console.print(table, highlight=False, markup=False)
    for row in part.costs:
        if row.note:
            paragraph(console, f"- {row.name}, {row.tokens} tokens: {row.note}", style="dim")


def _harm(shown: View, console: Console) -> None:
    if not shown.harm:
        return
    tokens = shown.harm[0].tokens
    heading(console, "On the model", f"{tokens} tokens, against its float32 reference")
    table = columns(
        ("", False, 0), ("mean |delta|", True, 0), ("k3", True, 0), ("gradient off", True, 0),
        ("cosine", True, 0), ("sinks off", True, 0),
    )  # fmt: skip
    table.columns[0].overflow = "fold"
    for row in shown.harm:
        table.add_row(f"  {row.name}", row.mean, row.k3, row.gradient, row.cosine, row.sinks)
    console.print(table, highlight=False, markup=False)
