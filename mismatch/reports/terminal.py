"""A report on a terminal: calm, aligned, and the last line is the verdict.

Nothing but text where the output is no terminal: no colour, no boxes, 80 columns.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mismatch.reports.console import TONES, heading, paragraph, print_section, say
from mismatch.reports.formatting import line
from mismatch.reports.section import Page, Section
from mismatch.reports.sections import page
from mismatch.types import Report

if TYPE_CHECKING:
    from rich.console import Console

    from mismatch.reports.elsewhere import Elsewhere


def print_report(
    report: Report,
    console: Console,
    run_dir: Path | str | None = None,
    elsewhere: Elsewhere | None = None,
    details: bool = True,
) -> None:
    """Print a report of a run.

    Args:
        console: where to; its width and colours are respected.
        run_dir: where the artefacts lie, None where nothing was saved.
        elsewhere: a framework's names, for a table of their own.
        details: every section in full, not one line of those that have one.
    """
    print_page(page(report, names=elsewhere), console, run_dir, details)


def print_page(
    shown: Page, console: Console, place: Path | str | None = None, details: bool = True
) -> None:
    """Print a page; the last line is ``verdict: WORD – reason``."""
    _head(shown, console)
    _body(shown, console, details)
    _tail(shown, console, place)


def _head(shown: Page, console: Console) -> None:
    from rich.text import Text

    say(console, "")
    title = Text(line(shown.title), "bold")
    title.append(f"  {line(shown.facts[0])}")
    console.print(title, highlight=False)
    for fact in shown.facts[1:]:
        paragraph(console, line(fact), indent=0, style="dim")
    if shown.lead:
        say(console, "")
        paragraph(console, line(shown.lead), indent=0)


def _body(shown: Page, console: Console, details: bool) -> None:
    for section in shown.sections:
        if details or not section.short:
            print_section(section, console, details)
    lines = [] if details else in_short(shown.sections)
    if not lines:
        return
    heading(console, "In short", f"in full: {shown.file}.html, or mismatch report RUN --details")
    for text in lines:
        style = "yellow" if text.startswith("! ") else ""
        paragraph(console, line(text) if style else f"- {line(text)}", style=style)


def in_short(sections: tuple[Section, ...]) -> list[str]:
    """One line of each section that has one; no warning of theirs is left out."""
    short = [section for section in sections if section.short]
    warnings = [f"! {warning}" for section in short for warning in section.warnings]
    return [*warnings, *(section.short for section in short)]


def _tail(shown: Page, console: Console, place: Path | str | None) -> None:
    if shown.steps:
        heading(console, "Next")
    for step in shown.steps:
        paragraph(console, f"- {line(step)}")
    if place is not None:
        say(console, "")
        say(console, f"Everything is in {line(place)} (open {shown.file}.html)")
    say(console, "")
    style = TONES[shown.tone]
    verdict = f"verdict: {shown.word.upper()} – {line(shown.reason)}"
    say(console, verdict, style if "bold" in style else f"{style} bold")
