"""The report as a comment on a pull request: verdict first, details folded away."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

from mismatch.reports.formatting import MARKS, badge, line, visible
from mismatch.reports.section import Answer, Block, Cell, Column, Page, Section, Table, cell_text
from mismatch.reports.sections import page
from mismatch.types import Report

# What Markdown, its HTML and its mentions would act upon.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$])")


def to_markdown(
    report: Report,
    framework: str | None = None,
    details: bool = False,
    directory: Path | None = None,
) -> str:
    """GitHub-flavoured Markdown; foreign text is escaped, so that it stays text.

    Args:
        framework: whose names get a separate table.
        details: with every section, folded away.
        directory: of the run, for commands.
    """
    return show_page(page(report, framework=framework).placed(directory), details)


def show_page(shown: Page, details: bool = True) -> str:
    """Verdict, answers, the numbers that decide, what to do next."""
    facts = " · ".join(plain(fact) for fact in shown.facts)
    parts = [
        f"### {MARKS[shown.tone]} {plain(shown.word.upper())}: {plain(shown.lead or shown.reason)}",
        "\n".join(_answer(answer) for answer in shown.answers),
        show_table(shown.table) if shown.table else "",
        "\n".join(f"- Next: {plain(step)}" for step in shown.steps),
        *map(show_section, shown.sections if details or not shown.table else shown.asked),
        f"{plain(shown.title)} · {facts} · {plain(shown.reason)}" if shown.lead else facts,
        f"<sub>{_code(shown.command)}</sub>" if shown.command else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _answer(answer: Answer) -> str:
    flags = f" {_code(answer.flags)}" if answer.flags else ""
    settings = [
        f"  - {plain(block.title)}: {'; '.join(map(_code, block.lines))}"
        + (f" ({plain(block.note)})" if block.note else "")
        for block in answer.settings
    ]
    return "\n".join([f"- **{answer.question}**: {plain(answer.text)}{flags}", *settings])


def plain(text: object) -> str:
    """Foreign text on one line, with every character that Markdown acts upon disarmed.

    >>> plain("a|b\\n<img>")
    'a\\\\|b \\\\<img\\\\>'
    """
    escaped = _SPECIAL.sub(r"\\\1", line(text))
    return escaped.replace("@", "@\u200b")  # a mention would notify people


def _code(text: str) -> str:
    return "`" + line(text).replace("`", "'") + "`"


def table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table; a title that ends with ":" is aligned to the right."""
    names = list(titles)
    body = ["| " + " | ".join(row) + " |" for row in rows]
    if not body:
        return ""
    head = "| " + " | ".join(name.rstrip(":") for name in names) + " |"
    rule = "| " + " | ".join("---:" if name.endswith(":") else "---" for name in names) + " |"
    return "\n".join([head, rule, *body])


def show_section(section: Section) -> str:
    """Return a section, folded away where it says so."""
    if section.page_only:
        return ""
    body = _contents(section)
    if section.folded:
        title = escape(line(section.title))  # raw HTML: no Markdown in it
        return body and f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"
    return f"**{plain(section.title)}**\n\n{body}"


def _contents(section: Section) -> str:
    parts = [
        plain(section.lead),
        "\n".join(f"**! {plain(warning)}**" for warning in section.warnings),
        "\n".join(f"- {plain(sentence)}" for sentence in section.sentences),
        *(show_table(item) for item in section.tables),
        *(_block(block) for block in section.blocks),
        "\n".join(f"- {plain(note)}" for note in section.notes),
        *(show_section(part) for part in section.parts),
    ]
    return "\n\n".join(part for part in parts if part)


def _block(block: Block) -> str:
    lines = "\n".join(visible(text) for text in block.lines)
    return f"{plain(block.title)}\n\n```\n{lines}\n```" if lines else plain(block.title)


def show_table(item: Table) -> str:
    """Return all columns; an estimate's interval has a separate column."""
    columns = item.spread()
    titles = [plain(each.column.title) + ("" if each.column.left else ":") for each in columns]
    shown = [[_cell(cell, each.column) for cell in each.cells] for each in columns]
    return table(titles, zip(*shown, strict=True))


def _cell(cell: Cell, column: Column) -> str:
    value = cell_text(cell, column)
    shown = _code(value) if cell.tone == "code" and value else plain(badge(cell.tone) + value)
    return f"{shown} ({plain(cell.note)})" if cell.note else shown
