"""A report on a terminal: calm, aligned, and the last line is the verdict.

Nothing but text where the output is no terminal: no colour, no boxes, 80 columns.
"""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from mismatch.reports.formatting import badge, line, visible
from mismatch.reports.section import Page, Section, Spread, Table, cell_text
from mismatch.types import Judged

STEPS = 3  # next steps that are printed
WRAP = 28  # characters of a column of text
TONES = {
    "healthy": "green", "warn": "yellow", "critical": "bold red", "strong": "bold", "dim": "dim",
}  # fmt: skip


def print_tail(shown: Page, console: Console) -> None:
    """Print the last words of a page alone."""
    _tail(replace(shown, steps=()), console, None)


def print_page(
    shown: Page, console: Console, directory: Path | str | None = None, details: bool = True
) -> None:
    """Print a page; its last words are ``verdict: WORD – reason``.

    Args:
        directory: where the artefacts lie, None where nothing was saved.
        details: with every section, not only what is read first.
    """
    shown = shown.placed(directory)
    _head(shown, console)
    whole = details or shown.table is None
    for section in shown.sections if whole else shown.asked:
        print_section(section, console)
    if whole or shown.asked:
        say(console, "")
    _tail(shown, console, directory)


def _head(shown: Page, console: Console) -> None:
    """Print what was measured, the numbers that decide, the answers."""
    title = Text(line(shown.title), "bold")
    title.append(f"  {line(shown.facts[0])}")
    console.print(title, highlight=False)
    if rest := " · ".join(map(line, shown.facts[1:])):
        paragraph(console, rest, indent=0, style="dim")
    if shown.table is not None and shown.table.rows:
        print_table(shown.table, console)
    if shown.lead:
        paragraph(console, line(shown.lead), indent=0, style="bold")
    for answer in shown.answers:
        paragraph(console, f"{answer.question}: {line(answer.text).rstrip('.')}")
        for block in answer.settings:
            for text in block.lines:
                say(console, f"    {line(block.title)}: {visible(text)}")
        if answer.flags:
            say(console, f"    {line(answer.flags)}")


def _tail(shown: Page, console: Console, directory: Path | str | None) -> None:
    for step in shown.steps[:STEPS]:
        paragraph(console, f"Next: {line(step)}")
    if directory is not None:
        named = "a name: mismatch explain NAME"
        say(console, f"Everything is in {line(directory)} (open {shown.file}.html; {named})")
    style = TONES[shown.tone]
    verdict = f"verdict: {shown.word.upper()} – {line(shown.reason)}"
    style = style if "bold" in style else f"{style} bold"
    if console.is_terminal:
        paragraph(console, verdict, 0, style)
    else:  # whole, for `tail -1`
        say(console, verdict, style)


def say(console: Console, text: str, style: str = "") -> None:
    """Print one line as it is: no markup in foreign text, no wrapping that breaks a path."""
    console.print(text, style=style, markup=False, highlight=False, emoji=False, soft_wrap=True)


def paragraph(console: Console, text: str, indent: int = 2, style: str = "") -> None:
    """Print wrapped text; a list's mark ("- ") stays left of the following lines."""
    mark = text[:2] if text[:2] in {"- ", "✕ ", "! "} else ""
    wrapped = textwrap.fill(
        text,
        width=console.width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + len(mark)),
        break_long_words=False,
        break_on_hyphens=False,
    )
    say(console, wrapped, style)


def print_section(section: Section, console: Console, details: bool = True) -> None:
    """Title, what it says, its tables; pictures are a page's.

    Args:
        details: with the parts that other renderings fold away.
    """
    if section.page_only:
        return
    say(console, "")
    say(console, line(section.title), "bold")
    _contents(section, console, details)


def print_alone(
    section: Section,
    verdict: Judged,
    console: Console,
    directory: Path | None,
    file: str,
    details: bool,
) -> None:
    """Print what a command measures that makes no whole report; the last line is the verdict.

    Args:
        directory: where its files are; None: it left none.
        file: of them, the one to open where there is no report.
    """
    print_section(section, console, details)
    if directory is not None:
        report = directory / "report.html"
        text = f"\nEverything is in {directory} (open {report.name if report.exists() else file})"
        say(console, text)
    say(console, "")
    say(console, verdict.line, "bold red" if verdict.code else "green")


def _contents(section: Section, console: Console, details: bool) -> None:
    if section.lead:
        paragraph(console, line(section.lead), style="dim")
    for warning in section.warnings:
        paragraph(console, f"! {line(warning)}", style="yellow")
    for sentence in section.sentences:
        paragraph(console, f"- {line(sentence)}")
    for table in section.tables:
        print_table(table, console)
    for block in section.blocks:
        if block.title:
            paragraph(console, line(block.title))
        for text in block.lines:
            say(console, f"      {visible(text)}")
    for note in section.notes:
        paragraph(console, f"- {line(note)}", style="dim")
    for part in section.parts:
        if part.page_only or (part.folded and not details):
            continue
        say(console, f"  {line(part.title)}", "bold")
        _contents(part, console, details)


def print_table(table: Table, console: Console) -> None:
    """Print as many columns as fit, those of priority 0 always; names to be copied do not wrap."""
    columns = [_Texts(each) for each in table.spread()]
    while 1 + sum(c.width + 1 for c in columns) > console.width:
        if not any(c.column.priority for c in columns):
            break
        columns.remove(max(reversed(columns), key=lambda c: c.column.priority))
    kept = [each.column for each in columns]
    titled = any(each.title for each in columns)
    shown = RichTable(
        box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim", show_header=titled
    )
    for each in columns:
        title = each.title
        if each.of is not None and each.of not in kept:  # else it would be unclear whose it is
            title = f"{each.of.narrow or line(each.of.title)}, 95 %"
        shown.add_column(
            title,
            justify="left" if each.column.left else "right",
            no_wrap=not each.wraps,
            overflow="fold",
        )
    for row in range(len(table.rows)):
        shown.add_row(*(Text(each.texts[row], each.styles[row]) for each in columns))
    indented = Padding(shown, (0, 0, 0, 2), expand=False)
    console.print(indented, highlight=False, markup=False)


class _Texts:
    """One column as it is printed."""

    def __init__(self, spread: Spread) -> None:
        column, cells = spread.column, spread.cells
        self.column, self.of = column, spread.of
        self.title = column.narrow or line(column.title)
        self.wraps = column.left and not all(cell.tone == "code" for cell in cells)
        self.texts = [(badge(cell.tone) + cell_text(cell, column)).rstrip() for cell in cells]
        self.styles = [TONES.get(cell.tone, "") for cell in cells]
        width = max(map(len, [*self.title.split("\n"), *self.texts]))
        self.width = min(width, WRAP) if self.wraps else width
