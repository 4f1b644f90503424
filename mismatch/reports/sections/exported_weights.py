"""A folder of exported weights beside the checkpoint that it shall replace."""

from __future__ import annotations

from mismatch.experiments.sync.exported import ExportReport, Row
from mismatch.reports.formatting import Tone, text
from mismatch.reports.section import Cell, Column, Section, Table
from mismatch.types import Report

MOST = 12  # rows on a screen
COLUMNS = (
    Column("tensor", text),
    Column("difference", text),
    Column("checkpoint", text),
    Column("exported", text),
)


def section(result: ExportReport, report: Report | None = None) -> Section:
    """The first rows that differ, worst first."""
    more = len(result.rows) - MOST
    return Section(
        id="exported-weights",
        title="Exported weights",
        lead=f"{result.folder} beside {result.compared} tensors of {result.model}.",
        tables=(Table(COLUMNS, tuple(_row(row) for row in result.rows[:MOST])),),
        notes=(f"and {more} more: --json has all of them" if more > 0 else "",),
        short=result.line,
    )


def _row(row: Row) -> tuple[Cell | str, ...]:
    tone: Tone = "warn" if row.difference == "dtype" else "critical"
    return (
        Cell(row.name, "code"),
        Cell(row.detail or row.difference, tone),
        _shape(row.expected),
        _shape(row.exported),
    )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "–" if shape is None else " × ".join(map(str, shape))
