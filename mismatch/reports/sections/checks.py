"""What was checked before any number is believed, and what could not be tested."""

from __future__ import annotations

from mismatch.reports.formatting import plural, text
from mismatch.reports.section import Column, Section, Table, status_cell
from mismatch.reports.summary import checks, untested
from mismatch.types import Report

LEAD = (
    "Do both sides speak of the same thing? A failed check makes the run broken, whatever the "
    "numbers say."
)
UNSEEN = "What this run could not see. None of it counts as passed."
COLUMNS = (
    Column("check", text),
    Column("result", text),
    Column("found", text),
    Column("fix", text, 1),
)


def of_report(report: Report) -> tuple[Section, ...]:
    """Failed ones first, each with its fix; then what was not tested."""
    shown = checks(report, "failed", "inconclusive", "warning", "passed")
    reasons = tuple(untested(report))
    sections = (_checked(report), Section("untested", "Not tested", UNSEEN, sentences=reasons))
    return tuple(s for s, there in zip(sections, (shown, reasons), strict=True) if there)


def _checked(report: Report) -> Section:
    passed = [check.id for check in checks(report, "passed")]
    summary = f"{plural(len(passed), 'check')} passed: {', '.join(passed)}." if passed else ""
    return Section(
        id="checks",
        title="Checks",
        lead=LEAD,
        warnings=tuple(
            f"{check.id} ({check.status}): {check.detail}"
            + (f"; fix: {check.fix}" if check.fix else "")
            for check in checks(report, "failed", "inconclusive", "warning")
        ),
        sentences=(summary,) if summary else (),
        tables=(
            Table(
                COLUMNS,
                tuple(
                    (check.id, status_cell(check.status), check.detail, check.fix)
                    for check in checks(report, "failed", "inconclusive", "warning", "passed")
                ),
            ),
        ),
        short=summary or "checks: none passed",
    )
