"""The report as a comment on a pull request: verdict first, details folded away."""

from __future__ import annotations

import re
from collections.abc import Iterable

from mismatch.reports import normal, sides, summary
from mismatch.reports.text import line
from mismatch.reports.words import MARKS
from mismatch.types import Report

# What Markdown, its HTML and its mentions would act upon.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$])")


def to_markdown(report: Report) -> str:
    """GitHub-flavoured Markdown; foreign text is escaped, so that it stays text."""
    comparison = summary.headline(report)
    status = report.verdict.status
    parts = [
        f"### {MARKS[status]} {status.upper()}: {plain(report.verdict.reason)}",
        f"**{plain(summary.model_name(report))}** · {plain(comparison.rollout)} against "
        f"{plain(comparison.train)} · {summary.size(report)} · levels for "
        f"{plain(report.verdict.levels)}",
        plain(summary.in_plain_words(report)),
        _headline_table(report),
        *(f"- {plain(sentence)}" for sentence in normal.sentences(report)),
        "**Next**\n\n" + "\n".join(f"- {plain(step)}" for step in summary.next_steps(report)),
        _folded(_checks_title(report), _checks_table(report)),
        _folded("Experts chosen", _routing_table(report)),
        _folded("How much of this is noise", _noise_table(report)),
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


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table; a title that ends with ":" is aligned to the right."""
    names = list(titles)
    body = ["| " + " | ".join(row) + " |" for row in rows]
    if not body:
        return ""
    head = "| " + " | ".join(name.rstrip(":") for name in names) + " |"
    rule = "| " + " | ".join("---:" if name.endswith(":") else "---" for name in names) + " |"
    return "\n".join([head, rule, *body])


def _headline_table(report: Report) -> str:
    rows = []
    for row in summary.judged_rows(report) + summary.other_rows(report):
        status = f"{MARKS[row.status]} {row.status}" if row.status else ""
        remark = "; ".join([status, *row.notes] if status else row.notes)
        name = f"{plain(row.words.label)} ({_code(row.metric)})"
        rows.append(
            [name, row.value, row.interval, row.healthy, plain(row.critical), plain(remark)]
        )
    return _table(["", "value:", "95 % interval:", "healthy:", "critical:", ""], rows)


def _routing_table(report: Report) -> str:
    rows = [
        [plain(row.words.label), row.value, row.interval] for row in summary.routing_rows(report)
    ]
    return _table(["", "value:", "95 % interval:"], rows)


def _noise_table(report: Report) -> str:
    rows = [
        [plain(row.words.label), row.mean, row.largest, row.share, plain(row.words.meaning)]
        for row in summary.noise_rows(report)
    ]
    return _table(["", "mean \\|delta\\|:", "largest:", "of headline:", ""], rows)


def _ran_table(report: Report) -> str:
    comparison = summary.headline(report)
    rows = [[aspect, plain(left), plain(right)] for aspect, left, right in sides.what_ran(report)]
    return _table(["", plain(comparison.rollout), plain(comparison.train)], rows)


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
    return _table(["check", "result", "found", "fix"], rows)


def _folded(title: str, body: str) -> str:
    if not body:
        return ""
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"
