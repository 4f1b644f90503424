"""The report on a terminal: calm, aligned, and the last line is the verdict.

Nothing but text where the output is no terminal: no colour, no boxes, 80 columns.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mismatch.reports import normal, quantities, sides, summary
from mismatch.reports.analyses import print_analyses, print_in_short
from mismatch.reports.console import columns, heading, paragraph, print_section, say
from mismatch.reports.sections import sections
from mismatch.reports.text import line
from mismatch.reports.words import MARKS
from mismatch.types import Report

if TYPE_CHECKING:
    from rich.console import Console

    from mismatch.reports.elsewhere import Elsewhere

STYLES = {"healthy": "green", "warn": "yellow", "critical": "bold red", "": "dim"}


def print_report(
    report: Report,
    console: Console,
    run_dir: Path | str | None = None,
    elsewhere: Elsewhere | None = None,
    details: bool = True,
) -> None:
    """Print the report; the last line is ``verdict: STATUS – reason``.

    Args:
        console: where to; its width and colours are respected.
        run_dir: where the artefacts lie, None where nothing was saved.
        elsewhere: a framework's names, for a table of their own.
        details: the analyses beyond the headline in full, not one line each.
    """
    _title(report, console)
    _metrics(report, console)
    _names(report, console, elsewhere)
    _normal(report, console)
    _noise(report, console)
    for section in sections(report):
        if not section.short:
            print_section(section, console, details)
    (print_analyses if details else print_in_short)(report, console)
    _what_ran(report, console)
    _checks(report, console)
    _next(report, console)
    if run_dir is not None:
        say(console, "")
        say(console, f"Everything is in {line(run_dir)} (open report.html)")
    say(console, "")
    status = report.verdict.status
    say(console, summary.verdict_line(report), STYLES[status] + (" bold" * (status != "critical")))


def _title(report: Report, console: Console) -> None:
    from rich.text import Text

    comparison = summary.headline(report)
    say(console, "")
    title = Text(summary.model_name(report), "bold")
    title.append(f"  {line(comparison.rollout)} against {line(comparison.train)}")
    console.print(title, highlight=False)
    remark = f"{summary.size(report)}; levels for {line(report.verdict.levels)}"
    say(console, remark, "dim")
    say(console, "")
    paragraph(console, summary.in_plain_words(report), indent=0)


def _metrics(report: Report, console: Console) -> None:
    from rich.text import Text

    rows, others = summary.judged_rows(report), summary.other_rows(report)
    if not rows and not others:
        return
    heading(console, "How far apart", "delta = train - rollout, in nats; 95 % intervals by prompt")
    table = columns(
        ("", False, 0), ("value", True, 0), ("95 % interval", True, 0),
        ("healthy", True, 0), ("critical", True, 0), ("", False, 0),
    )  # fmt: skip
    for row in [*rows, *others]:
        mark = f"{MARKS[row.status]} {row.status}" if row.status else ""
        table.add_row(
            Text(f"  {row.words.label}", "" if row.judgement else "dim"),
            row.value, row.interval, row.healthy, row.critical,
            Text(mark, STYLES[row.status]),
        )  # fmt: skip
    console.print(table, highlight=False, markup=False)
    for caution in summary.cautions(rows):
        paragraph(console, f"! {caution}", style="yellow")


def _names(report: Report, console: Console, elsewhere: Elsewhere | None) -> None:
    """A framework's own names beside ours; the remarks below, each once."""
    if elsewhere is None:
        return
    rows = elsewhere.rows(report)
    heading(console, f"In {elsewhere.called}", "value there, where its convention differs")
    if not rows:
        paragraph(console, "none of these metrics is known to have a name there")
        return
    table = columns(("", False, 0), ("ours", True, 0), ("name there", False, 0), ("", True, 0))
    for row, other in rows:
        table.add_row(f"  {row.metric}", row.value, other.name, other.value)
    console.print(table, highlight=False, markup=False)
    remarks: dict[str, list[str]] = {}
    for _, other in rows:
        if other.remark:
            remarks.setdefault(other.remark, []).append(other.name)
    for remark, concerned in remarks.items():
        paragraph(console, f"- {', '.join(concerned)}: {remark}", style="dim")


def _normal(report: Report, console: Console) -> None:
    from rich.text import Text

    said = normal.sentences(report)
    if not said:
        return
    heading(console, "Is this normal?", f"measured elsewhere on {line(report.verdict.levels)}")
    table = columns(("", True, 11), ("", False, 40))
    table.columns[1].no_wrap = False
    for ladder in normal.ladders(report)[:1]:
        for rung in ladder.rungs:
            style = "bold" if rung.ours else "dim"
            table.add_row(Text(rung.value, style), Text(_rung(rung), style))
        table.show_header = False
        console.print(table, highlight=False)
    for sentence in said:
        paragraph(console, sentence)


def _rung(rung: normal.Rung) -> str:
    return f"{rung.who} ({rung.source})" if rung.source else rung.who


def _noise(report: Report, console: Console) -> None:
    rows = summary.noise_rows(report)
    if not rows:
        return
    heading(console, "How much of this is noise", "passes that should agree with each other")
    table = columns(
        ("", False, 26), ("mean |delta|", True, 7), ("largest", True, 7), ("of headline", True, 7)
    )
    for row in rows:
        table.add_row(f"  {row.words.label}", row.mean, row.largest, row.share)
    console.print(table, highlight=False, markup=False)
    paragraph(console, "The parts are no shares: mean |delta| does not add up.", style="dim")


def _what_ran(report: Report, console: Console) -> None:
    from rich.table import Table

    comparison = summary.headline(report)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for title in ("What ran", line(comparison.rollout), line(comparison.train)):
        table.add_column(title)
    for aspect, left, right in sides.what_ran(report):
        table.add_row(f"  {aspect}", left, right)
    say(console, "")
    console.print(table, highlight=False, markup=False)


def _checks(report: Report, console: Console) -> None:
    if summary.checks(report, "failed", "warning", "passed"):
        heading(console, "Checks", "do both sides speak of the same thing?")
    for check in summary.checks(report, "failed", "warning"):
        mark, style = ("✕", "bold red") if check.status == "failed" else ("!", "yellow")
        paragraph(console, f"{mark} {line(check.id)}: {line(check.detail)}", style=style)
        if check.fix:
            paragraph(console, f"fix: {line(check.fix)}", indent=4)
    passed = summary.checks(report, "passed")
    if passed:
        names = ", ".join(line(check.id) for check in passed)
        paragraph(console, f"{quantities.count(len(passed))} passed: {names}")
    reasons = summary.untested(report)
    if reasons:
        heading(console, "Not tested")
    for reason in reasons:
        paragraph(console, f"- {reason}", style="dim")


def _next(report: Report, console: Console) -> None:
    heading(console, "Next")
    for step in summary.next_steps(report):
        paragraph(console, f"- {step}")
