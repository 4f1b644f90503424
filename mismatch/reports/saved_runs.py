"""Pages of several saved runs: side by side, and one metric over time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING

import numpy as np

from mismatch.experiments.regression.run_comparison import DECIDING
from mismatch.experiments.regression.types import ABSENT
from mismatch.metrics import METRICS
from mismatch.pipeline.saved_runs import History, Point
from mismatch.pipeline.side_by_side import Line, Move, Side, SideBySide
from mismatch.reports.formatting import (
    TONES,
    Format,
    alike,
    bound,
    chance,
    line,
    number,
    plural,
    points,
    signed,
    text,
)
from mismatch.reports.metric_labels import words_for
from mismatch.reports.section import (
    Cell,
    Cells,
    Column,
    Figure,
    Page,
    Section,
    Table,
    Tone,
    status_cell,
)
from mismatch.reports.sections.regression import WORDS
from mismatch.reports.summary import Row
from mismatch.reports.svg import ACCENT, FAINT, INK, SECOND, segments
from mismatch.types import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAD = (
    "Each run compares its own engine with its own trainer. Every other run is held against the "
    "first: ! is significantly worse than it, ✓ significantly better."
)
BASIS = {
    "paired": "same tokens, paired",
    "prompts": "tokens of their own, by prompt",
    "intervals": "by the two intervals",
}
METHOD = (
    "k3, mean |delta| and routing flips decide: a permutation test within prompts, adjusted "
    "for all runs and metrics (Holm), at 5 %; without p, and for all other metrics, a change is "
    "marked where its own 95 % interval leaves 0 out, not adjusted."
)
NEWEST = 12  # runs of a history that a terminal shows
TONE_OF: dict[str | None, Tone] = {
    "worse": "warn", "mixed": "warn", "undecided": "warn", "better": "healthy",
}  # fmt: skip


# ---------------------------------------------------------------- side by side


def beside_page(result: SideBySide) -> Page:
    """A column a run; the first is what the others are held against."""
    first, *others = result.runs
    outcomes = [outcome for outcome in result.outcomes if outcome]
    worse = sum(TONE_OF[outcome] == "warn" for outcome in outcomes if outcome in TONE_OF)
    told = [f"{side.run} {WORDS[outcome]}" for side, outcome in zip(others, outcomes, strict=True)]
    return Page(
        kind=f"{len(result.runs)} runs side by side",
        word=f"{worse} of {len(others)} worse" if worse else "none worse",
        tone="warn" if worse else "healthy",
        reason=f"against {first.run}: {', '.join(told)}",
        title=_model(first.model),
        facts=(*(_side(side) for side in result.runs), *(f"{line(n)}" for n in result.notes)),
        sections=(_metrics(result), _changes(result), _facts(result)),
        table=_table(result),
        file="side-by-side",
    )


def _model(model: str) -> str:
    path = PurePath(model)
    return path.name if path.is_absolute() and path.name else model


def _side(side: Side) -> str:
    tokens = "no table of tokens" if side.tokens is None else plural(side.tokens, "token")
    date = f", {side.created[:10]}" if side.created else ""
    return f"{side.run}: {side.engine or 'unknown engine'}{date}, {tokens}, {side.status}"


def _table(result: SideBySide) -> Table:
    columns = (
        Column("metric", text),
        *(Column(side.run, interval=index + 1) for index, side in enumerate(result.runs)),
    )
    rows: list[Cells] = [("verdict", *(status_cell(side.status) for side in result.runs))]
    for item in result.metrics:
        write = metric_format(item.metric, item.values)
        pairs = zip(item.values, item.moves, strict=True)
        cells = (Cell(value, _tone(item, move), format=write) for value, move in pairs)
        rows.append((words_for(item.metric).label, *cells))
    return Table(columns, rows)


def _metrics(result: SideBySide) -> Section:
    return Section(
        id="side-by-side",
        title="Side by side",
        lead=LEAD,
        tables=(_table(result),),
        notes=(METHOD,),
        folded=False,
    )


def metric_format(metric: str, estimates: Sequence[Estimate | None]) -> Format:
    """One way of writing a metric in all runs."""
    values = [value for value in estimates if value is not None]
    if not values:
        return number
    row = Row(metric, words_for(metric), values[0])
    return alike((value.value for value in values), row.write)


def _tone(item: Line, move: Move | None) -> Tone:
    if move is None or not move.significant:
        return ""
    if item.low_is_bad is None:
        return "strong"
    return "healthy" if (move.change.value > 0) == item.low_is_bad else "warn"


def _changes(result: SideBySide) -> Section:
    """Every change with interval and p."""
    columns = (
        Column("metric", text),
        Column("run", text),
        Column("change", signed, interval=1),
        Column("p", chance, 2),
        Column("result", text),
        Column("told by", text, 3),
    )
    deciding: list[Cells] = []
    moved: list[Cells] = []
    for item in result.metrics:
        rows = deciding if item.metric in DECIDING else moved
        words = words_for(item.metric)
        write = points if words.share else signed
        for side, move in zip(result.runs, item.moves, strict=True):
            if move is not None and (item.metric in DECIDING or move.significant):
                told = WORDS[move.outcome] if move.outcome else "moved" if move.significant else ""
                outcome = Cell(told, TONE_OF.get(move.outcome, "dim"))
                change = Cell(move.change, "strong", format=write)
                rows.append(
                    (words.label, side.run, change, move.p_value, outcome, BASIS[move.basis])
                )
    other = Section(
        id="other-changes",
        title="Other metrics",
        short=f"{plural(len(moved), 'significant change')}",
        tables=(Table(columns, moved),),
    )
    return Section(
        id="changes",
        title=f"Changes from {result.runs[0].run}",
        lead="The metrics that decide.",
        tables=(Table(columns, deciding),),
        parts=(other,) if moved else (),
        folded=False,
    )


def _facts(result: SideBySide) -> Section:
    runs = (Column(side.run, text) for side in result.runs)
    columns = (Column("where", text), Column("what", text), *runs)
    known: list[Cells] = []
    partly: list[Cells] = []
    for it in result.facts:
        unset = it.name.startswith("environment.")
        rows = partly if ABSENT in it.values and not unset else known
        rows.append((it.where, Cell(it.name, "code"), *it.values))
    other = Section(
        id="partly-known",
        title="Said by some of the runs alone",
        short=f"{plural(len(partly), 'fact')}: other versions of mismatch record other facts",
        tables=(Table(columns, partly),),
    )
    return Section(
        id="facts",
        title="What differs",
        lead="Versions, settings and kernels as the runs themselves say.",
        tables=(Table(columns, known),) if known else (),
        sentences=() if known else ("No version, setting or kernel that all runs name differs.",),
        parts=(other,) if partly else (),
        folded=False,
    )


# ---------------------------------------------------------------- over time


def history_page(result: History) -> Page:
    """A metric over the runs of a folder, a picture for every model."""
    words = words_for(result.metric)
    latest = result.points[-1] if result.points else None
    moved = [point.place for point in result.points if point.moved][-4:]
    by = f"moved significantly by {', '.join(moved)}" if moved else "no run moved it significantly"
    reason = f"{plural(len(result.points), 'run')}; {by}"
    finding = ""
    if latest is not None:
        finding = f"The newest run, {latest.place}, is {latest.status}"
        finding += (
            f"; {words.label} moved with {moved[-1]}." if moved else f"; {words.label} is steady."
        )
    models = dict.fromkeys(point.model for point in result.points if point.value is not None)
    over_time = Section(
        id="history",
        title=f"{words.label} over time",
        lead=words.meaning,
        figures=[_figure(place, model, result) for place, model in enumerate(models)],
        folded=False,
    )
    why = Column("directory", text), Column("why", text)
    unreadable = Section(
        "unreadable", "Not readable", tables=(Table(why, result.unreadable),), folded=False
    )
    return Page(
        kind="history",
        word=latest.status if latest else "no run",
        tone=TONES[latest.status] if latest else "warn",
        lead=finding,
        reason=f"{latest.place}: {latest.reason}" if latest else reason,
        title=result.folder,
        facts=(f"{words.label} over {reason}",),
        sections=(over_time, _listed(result), *([unreadable] if result.unreadable else [])),
        table=_runs(result, result.points[-NEWEST:]),
        file="history",
    )


def _runs(result: History, points_shown: Sequence[Point]) -> Table:
    write = metric_format(result.metric, [point.value for point in result.points])
    words = words_for(result.metric)
    change = points if words.share else signed
    columns = (
        Column("date", text, of=lambda point: point.created[:16].replace("T", " ")),
        Column("run", text, of="place"),
        Column("model", text, 4, of=lambda point: _model(point.model)),
        Column("engine", text, 2, of="engine"),
        Column("verdict", text, of=lambda point: status_cell(point.status)),
        Column(words.label, interval=1, of=lambda point: Cell(point.value, format=write)),
        Column(
            "change",
            signed,
            3,
            interval=5,
            of=lambda point: (
                Cell(point.change, "strong", "significant", change)
                if point.moved
                else Cell(point.change, "dim", format=change)
            ),
        ),
    )
    return Table.of(columns, points_shown)


def _listed(result: History) -> Section:
    return Section(
        id="runs",
        title="Runs",
        tables=(_runs(result, result.points),),
        notes=(
            "A change is from the run of the same model before it. It is called significant where "
            "its 95 % interval, of two independent runs, leaves 0 out; not adjusted for their "
            "number. mismatch report A B compares two of them token by token.",
        ),
        folded=False,
    )


def _figure(place: int, model: str, result: History) -> Figure:
    shown = [p for p in result.points if p.model == model and p.value is not None]
    estimates = [p.value for p in shown if p.value is not None]
    write = metric_format(result.metric, estimates)
    first, last = write(estimates[0].value), write(estimates[-1].value)
    path = f"{first} → {last} in {plural(len(shown), 'run')}" if len(shown) > 1 else first
    title = f"{_model(model)}: {path}"
    moved = sum(p.moved for p in shown)
    return Figure(
        f"history-{place}",
        title,
        f"Lines are 95 % intervals, rings significant changes ({moved}), dashes the levels.",
        partial(_draw, title, shown, estimates, result.metric),
        (6.0, 2.7),
    )


def _draw(
    title: str, shown: Sequence[Point], estimates: Sequence[Estimate], metric: str, axes: Axes
) -> str:
    x = np.arange(len(shown), dtype=np.float64)
    y, low, high = np.array([(e.value, e.low, e.high) for e in estimates], np.float64).T
    known = np.isfinite(low) & np.isfinite(high)
    segments(axes, (x[known], x[known]), (low[known], high[known]), color=FAINT, linewidth=1.2)
    axes.plot(x, y, color=ACCENT, linewidth=1.4, marker="o", markersize=4)
    moved = np.array([p.moved for p in shown])
    axes.plot(x[moved], y[moved], "o", color=SECOND, markersize=10, fillstyle="none")
    span = [value for value in (*y, *low[known], *high[known]) if np.isfinite(value)]
    if 0 < 20 * min(span) < max(span):
        axes.set_yscale("log")
    for level, word in ((shown[-1].healthy, "healthy"), (shown[-1].unfit, "unfit")):
        if level is not None and level <= 3 * max(span):
            axes.axhline(level, color=INK, linewidth=0.8, dashes=(4, 3))
            label = f"{word} {bound(level)}"
            axes.text(len(x) - 0.5, level, label, ha="right", va="bottom", color=FAINT)
    step = max(1, -(-len(shown) // 6))
    labels = [f"{p.created[:10]}\n{p.engine}" for p in shown]
    axes.set_xticks(x[::step], labels[::step])
    axes.set_xlim(-0.5, len(x) - 0.5)
    axes.set_ylabel(METRICS[metric].unit if metric in METRICS else "")
    axes.yaxis.set_major_formatter(lambda value, _: bound(value))
    pairs = zip(shown, y, strict=True)
    return f"{title}: {', '.join(f'{p.created[:10]} {p.engine} {number(v)}' for p, v in pairs)}"
