"""On a terminal: the analyses that go beyond the headline, in full or one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mismatch.reports.console import heading, paragraph, print_section
from mismatch.reports.formatting import line
from mismatch.reports.sections import sections
from mismatch.types import Report

if TYPE_CHECKING:
    from rich.console import Console


def print_analyses(report: Report, console: Console) -> None:
    """The analyses that were made, each in full."""
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
        paragraph(console, line(sentence) if style else f"- {line(sentence)}", style=style)


def in_short(report: Report) -> list[str]:
    """What each analysis found, where it was made; no warning is left out."""
    told = sections(report)
    return [
        *(f"! {warning}" for section in told if section.short for warning in section.warnings),
        *(section.short for section in told),
    ]
