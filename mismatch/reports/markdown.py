"""The report as a comment on a pull request: verdict first, details folded away."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from mismatch.analysis.corrections.recipes import Recipe
from mismatch.reports import (
    fixes,
    routing,
    summary,
)
from mismatch.reports.elsewhere import Elsewhere
from mismatch.reports.formatting import badge
from mismatch.reports.section import (
    Block,
    Cell,
    Column,
    Page,
    Section,
    Table,
    cell_interval,
    cell_text,
)
from mismatch.reports.sections import page
from mismatch.reports.text import line, visible
from mismatch.reports.words import MARKS
from mismatch.types import Report

# What Markdown, its HTML and its mentions would act upon.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$])")


def to_markdown(report: Report, elsewhere: Elsewhere | None = None) -> str:
    """GitHub-flavoured Markdown; foreign text is escaped, so that it stays text.

    Args:
        elsewhere: a framework's names, for a table of their own.
    """
    legacy = [_folded("Experts chosen", _routing_table(report)), _fixes(report)]
    return show_page(page(report, names=elsewhere), legacy)


def show_page(shown: Page, legacy: list[str] | None = None) -> str:
    """The verdict first, then every section."""
    facts = " · ".join(plain(fact) for fact in shown.facts)
    steps = "\n".join(f"- {plain(step)}" for step in shown.steps)
    parts = [
        f"### {MARKS[shown.tone]} {plain(shown.word.upper())}: {plain(shown.reason)}",
        f"**{plain(shown.title)}** · {facts}",
        plain(shown.lead),
        f"**Next**\n\n{steps}" if steps else "",
        *(show_section(section) for section in shown.sections),
        *(legacy or []),
        f"<sub>{_code(shown.command)}</sub>" if shown.command else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


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


def _routing_table(report: Report) -> str:
    rows = [
        [plain(row.words.label), row.value, row.interval] for row in summary.routing_rows(report)
    ]
    said = [f"- {plain(sentence)}" for sentence in routing.sentences(summary.headline(report))]
    made = table(["", "value:", "95 % interval:"], rows)
    return "\n".join(said) + "\n\n" + made if said else made


def _fixes(report: Report) -> str:
    """What follows stands open, the tables are folded away."""
    made = report.result("fixes")
    if made is None:
        return ""
    said = "\n".join(f"- {plain(text)}" for text in fixes.sentences(report))
    titles = ["fix", "k3:", "mean \\|delta\\|:", "99.9 % of \\|delta\\|:", "other experts:",
              "change of k3:", "p:", "result", "took:", "verdict"]  # fmt: skip
    rows = [
        [_code(row.id), row.k3.both, row.mean.both, row.tail.both, row.routes.both,
         f"{row.change} ({row.interval})", plain(row.p), f"{row.mark} {row.result}",
         " ".join((row.seconds, row.memory)).strip(), row.verdict]
        for row in fixes.measured_rows(made)
    ]  # fmt: skip
    losses = [
        [_code(row.id), plain(row.label), row.kept, row.ess, row.bias, plain(row.remark)]
        for row in fixes.loss_rows(report)
    ]
    notes = [f"- {_code(row.id)}: {row.result}: {plain(row.reason)}" for row in
             fixes.other_rows(made)]  # fmt: skip
    notes += [f"- {plain(reason)}" for reason in (*made.left_out, made.method) if reason]
    parts = [plain(fixes.LEAD), table(titles, rows), _advice(report)]
    parts.append(table(["fix of the loss", "", "kept:", "size:", "residual bias:", ""], losses))
    parts.append("\n".join(notes))
    folded = _folded("Every fix, as measured", "\n\n".join(part for part in parts if part))
    return f"**{fixes.TITLE}**\n\n{said}\n\n{folded}"


def _advice(report: Report) -> str:
    parts = []
    for one in fixes.advice(report.result("fixes")) if report.result("fixes") else ():
        parts.append(f"To use {_code(one.id)}: {_code(one.command)}")
        parts += [_recipe(recipe) for _, known in one.recipes for recipe in known]
    return "\n\n".join(parts)


def _recipe(recipe: Recipe) -> str:
    remark = "; ".join(part for part in (recipe.remark, recipe.source) if part)
    block = "\n\n```\n" + "\n".join(recipe.lines) + "\n```" if recipe.lines else ""
    return f"{plain(recipe.framework)}: {plain(remark)}{block}"


def _folded(title: str, body: str) -> str:
    if not body:
        return ""
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"
