"""The one place where numbers become text, and where foreign text is made safe."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mismatch.reports.quantities import MISSING, bound, count, number, percent, plural, times
from mismatch.reports.text import line, token_text, visible
from mismatch.reports.words import MARKS
from mismatch.types import Estimate

if TYPE_CHECKING:
    from mismatch.reports.section import Cell, Column

__all__ = [
    "MISSING", "Format", "badge", "bound", "cell_interval", "cell_text", "count", "interval",
    "line", "number", "percent", "plural", "small_percent", "text", "times", "token_text",
    "visible",
]  # fmt: skip

Format = Callable[..., str]


def text(value: object) -> str:
    """A string as it stands in a column of text."""
    return line(value)


def small_percent(share: float | None) -> str:
    """A share; far below what any run could show there is no number.

    >>> small_percent(3e-7), small_percent(0.25)
    ('< 0.001 %', '25 %')
    """
    return "< 0.001 %" if share is not None and 0.0 < share < 1e-5 else percent(share)


def interval(estimate: Any, write: Format = number, to: str = " … ") -> str:
    """The 95 % interval of an estimate; "–" where it has none.

    >>> interval(Estimate(0.1, 0.05, 0.2, 64, 8, 4))
    '0.0500 … 0.200'
    """
    if not isinstance(estimate, Estimate) or estimate.low is None or estimate.high is None:
        return MISSING
    return f"{write(estimate.low)}{to}{write(estimate.high)}"


def cell_text(cell: Cell, column: Column) -> str:
    """The value of a cell as text: strings as they are, numbers by the cell's or column's format;
    "–" where there is none.
    """
    value: Any = cell.value.value if isinstance(cell.value, Estimate) else cell.value
    if value is None:
        return MISSING
    if isinstance(value, str):
        return line(value)
    return (cell.format or column.format)(value)


def cell_interval(cell: Cell, column: Column) -> str:
    """The 95 % interval of a cell; "" where its value is a text, "–" where it has none."""
    write = cell.format or column.format
    return "" if isinstance(cell.value, str) else interval(cell.value, write)


def badge(tone: str) -> str:
    """The mark that stands before a status, so that it is seen without colour."""
    return f"{MARKS[tone]} " if tone in MARKS else ""
