"""The numbers of the verdict beside their levels, and what a framework calls them."""

from __future__ import annotations

from mismatch.reports import figures
from mismatch.reports.elsewhere import Elsewhere
from mismatch.reports.formatting import text
from mismatch.reports.section import Cell, Column, Figure, Section, Table, Value, status_cell
from mismatch.reports.sections.normal import published
from mismatch.reports.summary import Row, cautions, headline, judged_rows, other_rows
from mismatch.types import Report

LEAD = (
    "delta = train - rollout, the log-probability of the same token, in nats. Intervals resample "
    "whole prompts."
)
SCORES = " Neither side sampled these tokens: the KL formulas are scores here."
COLUMNS = (
    Column("metric", text),
    Column("name", text, 9),
    Column("value", interval=1),
    Column("healthy"),
    Column("unfit"),
    Column("level", text),
)
NAMES = (
    Column("metric", text),
    Column("ours", priority=1),
    Column("name there", text),
    Column("there", detail="where its convention differs"),
)


def of_names(report: Report, names: Elsewhere | None) -> Section | None:
    """Judged metrics first; None where nothing was compared.

    Args:
        names: a framework's names are a table of their own.
    """
    judged = judged_rows(report)
    rows = [*judged, *other_rows(report)]
    if not rows:
        return None
    return Section(
        id="headline",
        title="How far apart",
        lead=LEAD + ("" if headline(report).sampled_by_left else SCORES),
        warnings=tuple(cautions(rows)),
        tables=(Table(COLUMNS, tuple(_row(row) for row in rows)),),
        figures=_scales(report, judged),
        parts=(*_names(report, names), *_sources(judged)),
        folded=False,
    )


def _row(row: Row) -> tuple[Cell | Value, ...]:
    judgement = row.judgement
    return (
        Cell(row.words.label, "" if judgement else "dim", note=row.words.meaning),
        Cell(row.metric, "code"),
        row.cell,
        Cell(judgement.healthy if judgement else None, format=row.healthy),
        Cell(judgement.unfit if judgement else None, format=row.unfit),
        status_cell(judgement.status) if judgement else "",
    )


def _scales(report: Report, rows: list[Row]) -> tuple[Figure, ...]:
    drawn = [
        (row, [each.value for each in published(report, row.metric)])
        for row in rows
        if row.distance(1.0) is not None
    ]
    if not drawn:
        return ()
    return (
        Figure(
            "scales",
            "Beside the levels",
            "Each metric's distance from perfect agreement, in units of its healthy bound. Dot: "
            "this run; line: its 95 % interval; diamond: measured elsewhere; arrow: off the scale. "
            "The zones are healthy, tolerable and unfit.",
            lambda: figures.scales(drawn),
        ),
    )


def _names(report: Report, names: Elsewhere | None) -> tuple[Section, ...]:
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


def _sources(rows: list[Row]) -> tuple[Section, ...]:
    said = tuple(f"{row.words.label}: {row.judgement.source}" for row in rows if row.judgement)
    title = "Where the levels come from"
    return (Section("levels", title, sentences=said, page_only=True),) if said else ()
