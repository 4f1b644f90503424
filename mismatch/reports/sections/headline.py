"""The numbers of the verdict beside their levels, and what a framework calls them."""

from __future__ import annotations

from mismatch.reports.formatting import number, text
from mismatch.reports.framework_values import Elsewhere
from mismatch.reports.section import Cell, Column, Section, Table, Value, status_cell
from mismatch.reports.summary import (
    Row,
    cautions,
    headline,
    in_plain_words,
    judged_rows,
    most_telling,
)
from mismatch.types import Report

LEAD = "delta = train − rollout, nats; 95 % intervals by prompt."
SCORES = " Neither side sampled these tokens: the KL formulas are scores here."
COLUMNS = (
    Column("metric", text),
    Column("value", interval=1),
    Column("healthy", number),
    Column("unfit", number),
    Column("level", text),
)
NAMES = (
    Column("metric", text),
    Column("ours", priority=1),
    Column("name there", text),
    Column("there", detail="where its convention differs"),
)


def of_names(report: Report, names: Elsewhere | None) -> Section | None:
    """The judged metrics beside their levels; None where nothing was judged.

    Args:
        names: a framework's names are a table of their own.
    """
    rows = judged_rows(report)
    if not rows:
        return None
    shown = most_telling(report)
    return Section(
        id="headline",
        title="How far apart",
        lead=LEAD + ("" if headline(report).sampled_by_left else SCORES),
        sentences=(in_plain_words(report),),
        tables=(table(shown),),
        parts=(
            Section(
                "judged",
                f"All {len(rows)} judged metrics, and where their levels come from",
                tables=(table(rows) if len(shown) < len(rows) else Table(COLUMNS, ()),),
                sentences=tuple(
                    f"{row.words.label}: {row.judgement.source}" for row in rows if row.judgement
                ),
                notes=tuple(cautions(rows)),
            ),
            *names_there(report, names),
        ),
        folded=False,
    )


def table(rows: list[Row]) -> Table:
    """Metrics beside their levels; shares in percent."""
    return Table(COLUMNS, tuple(map(_row, rows)))


def _row(row: Row) -> tuple[Cell | Value, ...]:
    judgement = row.judgement
    return (
        row.words.label,
        row.cell,
        Cell(judgement.healthy if judgement else None, format=row.healthy),
        Cell(judgement.unfit if judgement else None, format=row.unfit),
        status_cell(judgement.status) if judgement else "",
    )


def names_there(report: Report, names: Elsewhere | None) -> tuple[Section, ...]:
    """The metrics under a framework's names, where one was asked for."""
    if names is None or names.framework is None:
        return ()
    rows = names.rows(report)
    table = Table(
        NAMES,
        tuple(
            (
                row.words.label,
                Cell(row.estimate.value, format=row.write),
                Cell(other.name, "code"),
                Cell(other.value, format=row.write),
            )
            for row, other in rows
        ),
    )
    remarks: dict[str, list[str]] = {}
    for _, other in rows:
        if other.remark:
            remarks.setdefault(other.remark, []).append(other.name)
    return (
        Section(
            id="names",
            title=f"In {names.called}",
            lead="" if rows else "None of these metrics is known to have a name there.",
            tables=(table,) if rows else (),
            notes=tuple(f"{', '.join(concerned)}: {text}" for text, concerned in remarks.items()),
            folded=False,
        ),
    )
