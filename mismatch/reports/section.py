"""The model of a report: what every renderer knows, and all that it knows.

Cells hold numbers; :mod:`mismatch.reports.formatting` turns them into text, the same text in every
rendering. Strings may be foreign (names, errors, tokens): renderers make them safe.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from mismatch.frameworks import Recipe
from mismatch.reports.formatting import (
    MISSING,
    NUMBERS,
    TONES,
    Format,
    alike,
    interval,
    line,
    number,
    text,
)
from mismatch.reports.formatting import Tone as Tone
from mismatch.types import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Value = str | int | float | Estimate | None


@dataclass(frozen=True, slots=True)
class Cell:
    """One value of a table.

    >>> Cell(Estimate(0.1, 0.05, 0.2, 64, 8, 4), note="few prompts").value.value
    0.1

    Attributes:
        value: None where nothing was measured.
        tone: "healthy", "warn" and "critical" are badges, "bar" draws a share, "code" is a name
            that a user types.
        note: small print next to it; a terminal leaves it out.
        format: of this value, where it is not the column's.
        link: anchor in the same page.
        explained: page of the documentation, as mismatch.reports.documentation names it.
    """

    value: Value
    tone: Tone = ""
    note: str = ""
    format: Format | None = None
    link: str = ""
    explained: str = ""


Cells = tuple[Cell | Value, ...]
Lines = Sequence[str]


@dataclass(frozen=True, slots=True)
class Column:
    """How the values of one column are written.

    Attributes:
        format: turns a number into text; ``text`` for strings, which are aligned to the left.
        priority: a terminal drops columns of high priority numbers first; 0 always stays.
        interval: priority of the estimates' 95 % intervals; None: they are not shown.
        detail: small print under the title, on a page.
        narrow: a title for a terminal, in lines of a few characters; "": the title.
        of: what a row's item holds here: the name of an attribute, or a function of the item.
        tone: of the values that ``of`` gives.
    """

    title: str
    format: Format = number
    priority: int = 0
    interval: int | None = None
    detail: str = ""
    narrow: str = ""
    of: str | Callable[[Any], Cell | Value] = ""
    tone: Tone = ""

    @property
    def left(self) -> bool:
        return self.format is text

    def cell(self, item: Any) -> Cell:
        """Return the cell of the item that a row shows."""
        value = attrgetter(self.of)(item) if isinstance(self.of, str) else self.of(item)
        return value if isinstance(value, Cell) else Cell(value, self.tone)


@dataclass(frozen=True, slots=True)
class Table:
    """Columns and rows; a bare value in a row stands for a cell of it."""

    columns: tuple[Column, ...]
    rows: Sequence[Cells]

    @classmethod
    def of(cls, columns: tuple[Column, ...], items: Iterable[Any]) -> Table:
        """Return a row for each item, as the columns' ``of`` say."""
        return cls(columns, tuple(tuple(column.cell(it) for column in columns) for it in items))

    def __post_init__(self) -> None:
        """Make cells of bare values; write the plain numbers of a column alike.

        Raises:
            ValueError: a row has not as many cells as there are columns.
        """
        rows = [[c if isinstance(c, Cell) else Cell(c) for c in row] for row in self.rows]
        for row in rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{len(row)} cells for {len(self.columns)} columns")
        columns = list(self.columns)
        for at, column in enumerate(self.columns):
            numbers = [each for row in rows for each in _numbers(row[at], column)]
            if not numbers:
                continue
            styles: dict[Format, Format] = {each: alike(numbers, each) for each in NUMBERS}
            columns[at] = replace(column, format=styles.get(column.format, column.format))
            for row in rows:
                if (own := row[at].format) is not None:
                    row[at] = replace(row[at], format=styles.get(own, own))
        object.__setattr__(self, "columns", tuple(columns))
        object.__setattr__(self, "rows", tuple(map(tuple, rows)))

    def cells(self) -> list[list[Cell]]:
        """Return every row as cells."""
        return [[cell for cell in row if isinstance(cell, Cell)] for row in self.rows]

    def spread(self) -> list[Spread]:
        """Each column with its cells, and after it the intervals of its estimates as a column."""
        shown: list[Spread] = []
        for column, *cells in zip(self.columns, *self.cells(), strict=True):
            shown.append(Spread(column, cells))
            if column.interval is not None:
                ends = [Cell(cell_interval(cell, column)) for cell in cells]
                shown.append(
                    Spread(Column("95 % interval", priority=column.interval), ends, column)
                )
        return shown


@dataclass(frozen=True, slots=True)
class Spread:
    """A column with its cells; ``of``: the column whose intervals it holds."""

    column: Column
    cells: Sequence[Cell]
    of: Column | None = None


def _numbers(cell: Cell, column: Column) -> list[float]:
    """Return what a cell shows as plain numbers, the ends of its interval too."""
    value = cell.value
    if (cell.format or column.format) not in NUMBERS:
        return []
    if isinstance(value, Estimate):
        ends = () if column.interval is None else (value.low, value.high)
        return [value.value, *(end for end in ends if end is not None)]
    return [value] if isinstance(value, int | float) else []


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture of a page; drawn only there.

    Attributes:
        name: unique in the page; anchor and prefix of ids.
        paint: draws, and says what is to be seen, for screen readers; "": as the title says.
        size: width and height, inches.
        link: anchor in the same page: the tokens that it is about.
    """

    name: str
    title: str
    caption: str
    paint: Callable[[Axes], str]
    size: tuple[float, float] = (6.0, 2.5)
    link: str = ""

    def draw(self) -> str:
        """Return the ``<svg>`` element."""
        from mismatch.reports.svg import drawing, to_svg

        with drawing(*self.size) as (figure, axes):
            return to_svg(figure, self.name, self.paint(axes) or self.title)


@dataclass(frozen=True, slots=True)
class Block:
    """Lines to be copied as they are: a configuration, a command.

    Attributes:
        note: what to know before they are copied.
    """

    title: str
    lines: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Widget:
    """A part of a page that its reader works with: ``templates/<name>.html``, ``.js`` and ``.css``.

    Attributes:
        data: what the script draws: text without angle brackets, in ``<script id="<name>-data">``.
        still: what stands in its place without scripts, and on paper.
    """

    name: str
    data: str
    still: Sequence[Table] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report.

    Attributes:
        id: its anchor; for an analysis also its key in report.json.
        lead: what this is, before any number.
        warnings: what has to be known before the numbers are believed.
        sentences: what the numbers say.
        notes: small print after the tables.
        parts: sections inside it, with titles.
        widget: of a page; its script is the page's.
        folded: a page shows only title and ``short`` of a part until it is opened, Markdown too.
        page_only: too wide or too long for a terminal and for Markdown.
        short: what it says, in one sentence.
        first: it is among what is read first, under its title.
    """

    id: str
    title: str
    lead: str = ""
    warnings: Lines = ()
    sentences: Lines = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    blocks: Sequence[Block] = ()
    notes: Lines = ()
    parts: Sequence[Section] = ()
    widget: Widget | None = None
    folded: bool = True
    page_only: bool = False
    short: str = ""
    first: bool = False

    def __post_init__(self) -> None:
        """Leave out what is empty: a sentence "", a table without rows, a part of only those."""
        kept: dict[str, Iterable[Any]] = {
            name: filter(None, getattr(self, name))
            for name in ("warnings", "sentences", "figures", "blocks", "notes")
        }
        kept["tables"] = (table for table in self.tables if table.rows)
        kept["parts"] = (part for part in self.parts if part.holds)
        for name, items in kept.items():
            object.__setattr__(self, name, tuple(items))

    @property
    def holds(self) -> bool:
        """Whether there is anything below the lead."""
        shown = (self.warnings, self.sentences, self.tables, self.figures, self.blocks, self.notes)
        return any(shown) or bool(self.parts) or self.widget is not None


RUN = "RUN"  # in a step or a command: where the run's directory goes


@dataclass(frozen=True, slots=True)
class Answer:
    """What a reader asks first, and the answer.

    Attributes:
        question: a word or two.
        flags: to be copied: what makes a check with the fix.
        settings: the same for each framework; its name is the title.
        explained: as a cell's.
    """

    question: str
    text: str
    flags: str = ""
    settings: tuple[Block, ...] = ()
    explained: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """A whole report: what is read first, then its chapters.

    Attributes:
        kind: of the report.
        word: the verdict.
        tone: how it looks.
        reason: of the verdict.
        title: what was measured, a model.
        facts: which sides, how much, by which levels; a line each.
        sections: chapters, whose parts are the sections.
        lead: what is wrong, or that nothing is, in one sentence.
        answers: what has to be seen without scrolling, in this order.
        table: the numbers that decide; a terminal and a comment show no others.
        asked: sections that a flag asked for; shown with the table.
        steps: what to do next, most urgent first.
        file: its name as a page; the numbers are in the file of that name that ends in .json.
        command: that made it; "" where it is not known.
        made: when, in plain form; "" where it is not known.
    """

    kind: str
    word: str
    tone: Tone
    reason: str
    title: str
    facts: tuple[str, ...]
    sections: tuple[Section, ...]
    lead: str = ""
    answers: tuple[Answer, ...] = ()
    table: Table | None = None
    asked: tuple[Section, ...] = ()
    steps: tuple[str, ...] = ()
    file: str = "report"
    command: str = ""
    made: str = ""

    def placed(self, directory: object) -> Page:
        """Return the page with the run's directory in its commands; None: it is not known."""
        if directory is None:
            return self

        def place(text: str) -> str:
            return re.sub(rf"(?<= ){RUN}\b", lambda _: shlex.quote(str(directory)), text)

        answers = tuple(replace(each, flags=place(each.flags)) for each in self.answers)
        return replace(self, answers=answers, steps=tuple(map(place, self.steps)))


def named(rows: Iterable[Cells]) -> Table:
    """Return names next to what they stand for, without titles."""
    shown = tuple(rows)
    return Table((Column("", text),) * len(shown[0] if shown else ()), shown)


def not_tested(reasons: Iterable[object]) -> tuple[str, ...]:
    """Return notes of what an analysis could not see."""
    return tuple(f"Not tested: {line(reason)}" for reason in reasons)


def status_cell(status: str) -> Cell:
    """Return a status as a badge."""
    return Cell(status, TONES[status])


def cell_text(cell: Cell, column: Column) -> str:
    """Return the value of a cell as text: strings as is, numbers by the cell's or column's format;
    "–" where there is none.
    """
    value: Any = cell.value.value if isinstance(cell.value, Estimate) else cell.value
    if value is None:
        return MISSING
    if isinstance(value, str):
        return line(value)
    return (cell.format or column.format)(value)


def cell_interval(cell: Cell, column: Column) -> str:
    """Return the 95 % interval of a cell; "" where its value is a text, "–" where it has none."""
    write = cell.format or column.format
    return "" if isinstance(cell.value, str) else interval(cell.value, write)


def recipe_block(recipe: Recipe, proof: str = "") -> Block:
    """Show one framework's setting, with what to know about it."""
    about = "; ".join(filter(None, (proof, recipe.remark, recipe.source)))
    return Block(f"{recipe.framework}: {about}", recipe.lines)
