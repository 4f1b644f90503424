"""On a terminal: the analyses that go beyond the headline, in full or one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mismatch.metrics.corrections import NONE
from mismatch.reports import corrections, kernels
from mismatch.reports.console import columns, heading, paragraph, print_section, say
from mismatch.reports.kernels_terminal import print_in_report
from mismatch.reports.sections import sections
from mismatch.reports.text import line
from mismatch.types import Report

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from mismatch.analysis.corrections.types import Corrections


def print_analyses(report: Report, console: Console) -> None:
    """The analyses that were made, each in full."""
    if report.result("kernels") is not None:
        print_in_report(report.result("kernels"), console)
    _corrections(report, console)
    for section in sections(report):
        if section.short:
            print_section(section, console)


def print_in_short(report: Report, console: Console) -> None:
    """One sentence of each."""
    said = [sentence for sentence in in_short(report) if sentence]
    if not said:
        return
    heading(console, "Also measured", "in full: report.html, or mismatch report RUN --details")
    for sentence in said:
        style = "yellow" if sentence.startswith("! ") else ""
        paragraph(console, sentence if style else f"- {sentence}", style=style)


def in_short(report: Report) -> list[str]:
    """What each analysis found, where it was made; no warning is left out."""
    told = sections(report)
    correction = report.result("corrections")
    return [
        *(f"! {warning}" for section in told if section.short for warning in section.warnings),
        *(section.short for section in told),
        kernels.in_short(report.result("kernels")),
        f"corrections: {corrections.headline(correction)}" if correction else "",
    ]


def _corrections(report: Report, console: Console) -> None:
    """Short: what the data favour, beside what no correction does."""
    made = report.result("corrections")
    if made is None:
        return
    heading(console, "Corrections, previewed", "weights in the loss; no delta changes")
    rows = [row for row in corrections.correction_rows(made) if made.named(row.id).same_as is None]
    shown = [row for place, row in enumerate(rows) if place < 3 or row.id == NONE]
    console.print(_correction_table(shown), highlight=False, markup=False)
    paragraph(console, corrections.headline(made))


def print_corrections(made: Corrections, console: Console) -> None:
    """All of it: every correction, what to know, and each framework's setting."""
    from rich.text import Text

    title = Text("Corrections, previewed", "bold")
    title.append(f"  {line(made.rollout)} against {line(made.train)}")
    console.print(title, highlight=False)
    paragraph(console, corrections.LEAD, indent=0)
    say(console, "")
    rows = corrections.correction_rows(made)
    console.print(_correction_table(rows), highlight=False, markup=False)
    say(console, "")
    paragraph(console, corrections.headline(made), indent=0, style="bold")
    for remark in corrections.remarks(made):
        paragraph(console, f"- {remark}")
    heading(console, "What each does")
    for row in rows:
        if row.setting:
            paragraph(console, f"- {row.label}: {row.setting}; weights {row.weights}")
    recipes = corrections.setting_recipes(made)
    if recipes:
        heading(console, "How to switch it on", corrections.setting_title(made))
    for recipe in recipes:
        remark = f" ({recipe.remark})" if recipe.remark else ""
        paragraph(console, f"- {recipe.framework}{remark}; {recipe.source}")
        for text in recipe.lines:
            say(console, f"      {text}")


def _correction_table(rows: list[corrections.CorrectionRow]) -> Table:
    table = columns(
        ("", False, 0), ("rank", True, 0), ("error", True, 0), ("kept", True, 0),
        ("ESS", True, 0), ("bias, 95 % interval", True, 0), ("cosine", True, 0),
    )  # fmt: skip
    for row in rows:
        table.add_row(
            f"  {row.label}", row.rank, row.error, row.kept, row.ess, row.interval, row.cosine
        )
    return table
