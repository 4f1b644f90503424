"""Cells of a section's tables, by the titles of their columns."""

from __future__ import annotations

from typing import Any

from mismatch.reports.section import Table


def values(table: Table) -> list[dict[str, Any]]:
    """One dict a row: title -> value of its cell."""
    titles = [column.title for column in table.columns]
    return [dict(zip(titles, (c.value for c in row), strict=True)) for row in table.cells()]
