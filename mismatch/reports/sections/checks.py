"""What was checked before any number is believed, and what could not be tested."""

from __future__ import annotations

from mismatch.reports.formatting import plural, text
from mismatch.reports.section import Column, Section, Table, status_cell
from mismatch.reports.summary import checks, untested
from mismatch.types import Check, Report

COLUMNS = (
    Column("check", text),
    Column("result", text),
    Column("found", text),
    Column("fix", text, 1),
)


def of_report(report: Report) -> tuple[Section, ...]:
    """Failed ones with their fix, passed ones folded; then what was not tested."""
    wrong = checks(report, "failed", "inconclusive", "warning")
    passed = checks(report, "passed")
    reasons = tuple(untested(report))
    sections = (
        _part("checks", "Checks", wrong, folded=False),
        _part("passed", f"{plural(len(passed), 'check')} passed", passed, folded=True),
        Section("untested", "Not tested", sentences=reasons, folded=False),
    )
    there = wrong, passed, reasons
    return tuple(section for section, any_ in zip(sections, there, strict=True) if any_)


def _part(id: str, title: str, shown: list[Check], folded: bool) -> Section:
    rows = tuple((each.id, status_cell(each.status), each.detail, each.fix) for each in shown)
    columns = COLUMNS[:-1] if folded else COLUMNS
    table = Table(columns, tuple(row[: len(columns)] for row in rows))
    short = ", ".join(each.id for each in shown) if folded else ""
    return Section(id, title, tables=(table,), folded=folded, short=short)
