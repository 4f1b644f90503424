"""The report as a comment on a pull request: verdict first, details folded away."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from mismatch.reports import (
    normal,
    sides,
    summary,
)
from mismatch.reports.elsewhere import Elsewhere
from mismatch.reports.formatting import badge
from mismatch.reports.section import Block, Cell, Column, Section, Table, cell_interval, cell_text
from mismatch.reports.sections import sections
from mismatch.reports.text import line, visible
from mismatch.reports.words import MARKS
from mismatch.types import Report

# What Markdown, its HTML and its mentions would act upon.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$])")


def to_markdown(report: Report, elsewhere: Elsewhere | None = None) -> str:
    """GitHub-flavoured Markdown; foreign text is escaped, so that it stays text.

    Args:
        elsewhere: a framework's names, for a column of their own.
    """
    comparison = summary.headline(report)
    status = report.verdict.status
    shown = {section.id: show_section(section) for section in sections(report)}
    parts = [
        f"### {MARKS[status]} {status.upper()}: {plain(report.verdict.reason)}",
        f"**{plain(summary.model_name(report))}** · {plain(comparison.rollout)} against "
        f"{plain(comparison.train)} · {summary.size(report)} · levels for "
        f"{plain(report.verdict.levels)}",
        plain(summary.in_plain_words(report)),
        _headline_table(report, elsewhere),
        *(f"- {plain(sentence)}" for sentence in normal.sentences(report)),
        "**Next**\n\n" + "\n".join(f"- {plain(step)}" for step in summary.next_steps(report)),
        _folded(_checks_title(report), _checks_table(report)),
        shown.pop("routing", ""),
        shown.pop("beside", ""),
        _folded("How much of this is noise", _noise_table(report)),
        shown.pop("engines", ""),
        shown.pop("budget", ""),
        shown.pop("two_passes", ""),
        shown.pop("forecast", ""),
        shown.pop("kernels", ""),
        shown.pop("exact", ""),
        shown.pop("fixes", ""),
        shown.pop("corrections", ""),
        *shown.values(),
        _folded("What really ran", _ran_table(report)),
        _folded("Not tested", "\n".join(f"- {plain(item)}" for item in summary.untested(report))),
    ]
    if summary.command(report):
        parts.append(f"<sub>{_code(summary.command(report))}</sub>")
    return "\n\n".join(part for part in parts if part) + "\n"


def plain(text: object) -> str:
    """Foreign text on one line, with every character that Markdown acts upon disarmed.

    >>> plain("a|b\\n<img>")
    'a\\\\|b \\\\<img\\\\>'
    """
    escaped = _SPECIAL.sub(r"\\\1", line(text))
    return escaped.replace("@", "@\u200b")  # a mention would notify people


def _code(text: str) -> str:
    return "`" + text.replace("`", "'") + "`"


def table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table; a title that ends with ":" is aligned to the right."""
    names = list(titles)
    body = ["| " + " | ".join(row) + " |" for row in rows]
    if not body:
        return ""
    head = "| " + " | ".join(name.rstrip(":") for name in names) + " |"
    rule = "| " + " | ".join("---:" if name.endswith(":") else "---" for name in names) + " |"
    return "\n".join([head, rule, *body])


def show_section(section: Section) -> str:
    """A section, folded away where it says so."""
    if section.page_only:
        return ""
    body = _contents(section)
    if section.folded:
        return _folded(escape(line(section.title)), body)  # raw HTML: no Markdown in it
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
    """All columns; an estimate's interval stands in a column of its own."""
    titles = []
    for column in item.columns:
        right = "" if column.left else ":"
        titles.append(plain(column.title) + right)
        if column.interval is not None:
            titles.append("95 % interval:")
    rows = [
        [
            text
            for cell, column in zip(row, item.columns, strict=True)
            for text in _cell(cell, column)
        ]
        for row in item.cells()
    ]
    return table(titles, rows)


def _cell(cell: Cell, column: Column) -> Iterable[str]:
    value = cell_text(cell, column)
    shown = _code(value) if cell.tone == "code" and value else plain(badge(cell.tone) + value)
    yield f"{shown} ({plain(cell.note)})" if cell.note else shown
    if column.interval is not None:
        yield plain(cell_interval(cell, column))


def _headline_table(report: Report, elsewhere: Elsewhere | None) -> str:
    rows = []
    named = [] if elsewhere is None else [plain(elsewhere.title)]
    for row in summary.judged_rows(report) + summary.other_rows(report):
        status = f"{MARKS[row.status]} {row.status}" if row.status else ""
        remark = "; ".join([status, *row.notes] if status else row.notes)
        name = f"{plain(row.words.label)} ({_code(row.metric)})"
        others = [] if elsewhere is None else [_names(elsewhere, row.metric)]
        levels = [row.healthy, plain(row.critical)]
        rows.append([name, row.value, row.interval, *levels, *others, plain(remark)])
    return table(["", "value:", "95 % interval:", "healthy:", "critical:", *named, ""], rows)


def _names(elsewhere: Elsewhere, metric: str) -> str:
    """A framework's names of a metric, each with its value there and how it differs."""
    return "; ".join(
        _code(other.name)
        + (f" = {other.value}" if other.value else "")
        + (f" ({plain(other.remark)})" if other.remark else "")
        for other in elsewhere.of(metric)
    )


def _noise_table(report: Report) -> str:
    rows = [
        [plain(row.words.label), row.mean, row.largest, row.share, plain(row.words.meaning)]
        for row in summary.noise_rows(report)
    ]
    return table(["", "mean \\|delta\\|:", "largest:", "of headline:", ""], rows)


def _ran_table(report: Report) -> str:
    comparison = summary.headline(report)
    rows = [[aspect, plain(left), plain(right)] for aspect, left, right in sides.what_ran(report)]
    return table(["", plain(comparison.rollout), plain(comparison.train)], rows)


def _checks_title(report: Report) -> str:
    counts = {
        status: len(summary.checks(report, status)) for status in ("failed", "warning", "passed")
    }
    words = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return f"Checks: {words}" if words else "Checks"


def _checks_table(report: Report) -> str:
    marks = {"failed": "✕ failed", "warning": "! warning", "passed": "✓ passed"}
    rows = [
        [plain(check.id), marks[check.status], plain(check.detail), plain(check.fix)]
        for check in summary.checks(report, "failed", "warning", "passed")
    ]
    return table(["check", "result", "found", "fix"], rows)


def _folded(title: str, body: str) -> str:
    if not body:
        return ""
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"
