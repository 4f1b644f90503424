"""Pages of several saved runs: side by side, and one metric over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

import numpy as np

from mismatch.experiments.regression.measure import DECIDING
from mismatch.metrics import METRICS
from mismatch.pipeline.history import History, Point
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
from mismatch.reports.section import Cell, Column, Figure, Page, Section, Table, Tone, Value
from mismatch.reports.sections.regression import WORDS
from mismatch.reports.summary import Row
from mismatch.reports.svg import ACCENT, FAINT, INK, SECOND, drawing, segments, to_svg
from mismatch.reports.words import words_for
from mismatch.types import Estimate

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
    "k3, mean |delta| and differing experts decide: a permutation test within prompts, adjusted "
    "for all runs and metrics (Holm), at 5 %; without p, and for all other metrics, a change is "
    "marked where its own 95 % interval leaves 0 out, not adjusted."
)
TONE_OF: dict[str | None, Tone] = {"worse": "warn", "mixed": "warn", "undecided": "warn"}


# ---------------------------------------------------------------- side by side


def beside_page(result: SideBySide) -> Page:
    """A column a run; the first is what the others are held against."""
    first, *others = result.runs
    worse = [
        side.run
        for side, outcome in zip(result.runs, result.outcomes, strict=True)
        if outcome in ("worse", "mixed", "undecided")
    ]
    outcomes = [outcome for outcome in result.outcomes if outcome]
    told = [f"{side.run} {WORDS[outcome]}" for side, outcome in zip(others, outcomes, strict=True)]
    return Page(
        kind=f"{len(result.runs)} runs side by side",
        word=f"{len(worse)} of {len(others)} worse" if worse else "none worse",
        tone="warn" if worse else "healthy",
        reason=f"against {first.run}: {', '.join(told)}",
        title=_model(first.model),
        facts=tuple(_side(side) for side in result.runs),
        sections=(_metrics(result), _changes(result), *_facts(result)),
        file="side-by-side",
    )


def _model(model: str) -> str:
    path = PurePath(model)
    return path.name if path.is_absolute() and path.name else model


def _side(side: Side) -> str:
    tokens = "no table of tokens" if side.tokens is None else plural(side.tokens, "token")
    date = f", {side.created[:10]}" if side.created else ""
    return f"{side.run}: {side.engine or 'unknown engine'}{date}, {tokens}, {side.status}"


def _metrics(result: SideBySide) -> Section:
    columns = (
        Column("metric", text),
        *(Column(side.run, interval=index + 1) for index, side in enumerate(result.runs)),
    )
    verdict: tuple[Cell | Value, ...] = (
        "verdict",
        *(Cell(side.status, TONES[side.status]) for side in result.runs),
    )
    rows = [verdict, *(_row(item) for item in result.metrics)]
    return Section(
        id="side-by-side",
        title="Side by side",
        lead=LEAD,
        sentences=tuple(f"{note[0].upper()}{note[1:]}." for note in map(line, result.notes)),
        tables=(Table(columns, tuple(rows)),),
        notes=(METHOD,),
        folded=False,
    )


def _row(item: Line) -> tuple[Cell | Value, ...]:
    words = words_for(item.metric)
    write = metric_format(item.metric, item.values)
    return (
        words.label,
        *(
            Cell(value, tone=_tone(item, move), format=write)
            for value, move in zip(item.values, item.moves, strict=True)
        ),
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
    rows = [
        _change(item.metric, side.run, move)
        for item in result.metrics
        for side, move in zip(result.runs, item.moves, strict=True)
        if move is not None and (item.metric in DECIDING or move.significant)
    ]
    return Section(
        id="changes",
        title=f"Changes from {result.runs[0].run}",
        lead="The metrics that decide, and every other that moved significantly.",
        tables=(Table(columns, tuple(rows)),),
        folded=False,
    )


def _change(metric: str, run: str, move: Move) -> tuple[Cell | Value, ...]:
    words = words_for(metric)
    told = WORDS[move.outcome] if move.outcome else "moved" if move.significant else ""
    tone: Tone = "healthy" if move.outcome == "better" else TONE_OF.get(move.outcome, "dim")
    return (
        words.label,
        run,
        Cell(move.change, "strong", format=points if words.share else signed),
        move.p_value,
        Cell(told, tone),
        BASIS[move.basis],
    )


def _facts(result: SideBySide) -> tuple[Section, ...]:
    columns = (
        Column("where", text),
        Column("what", text),
        *(Column(side.run, text) for side in result.runs),
    )
    rows: tuple[tuple[Cell | Value, ...], ...] = tuple(
        (fact.where, Cell(fact.name, "code"), *fact.values) for fact in result.facts
    )
    return (
        Section(
            id="facts",
            title="What differs",
            lead="Versions, settings and kernels as the runs themselves say."
            if rows
            else "Nothing of what the runs say of themselves.",
            tables=(Table(columns, rows),),
            sentences=() if rows else ("No version, setting or kernel differs.",),
            folded=False,
        ),
    )


# ---------------------------------------------------------------- over time


def history_page(result: History) -> Page:
    """A metric over the runs of a folder, a picture for every model."""
    label = words_for(result.metric).label
    latest = result.points[-1] if result.points else None
    moved = [point for point in result.points if point.moved]
    reason = f"{plural(len(result.points), 'run')}; {_moves(moved, result)}"
    return Page(
        kind="history",
        word=latest.status if latest else "no run",
        tone=TONES[latest.status] if latest else "warn",
        reason=f"the newest run, {latest.place}: {latest.reason}" if latest else reason,
        title=result.folder,
        facts=(f"{label} over {reason}",),
        sections=(_over_time(result), _listed(result), *_unreadable(result)),
        file="history",
    )


def _moves(moved: Sequence[Point], result: History) -> str:
    if not moved:
        return "no run moved it significantly"
    return f"moved significantly by {', '.join(point.place for point in moved[-4:])}"


def _over_time(result: History) -> Section:
    models = dict.fromkeys(point.model for point in result.points if point.value is not None)
    return Section(
        id="history",
        title=f"{words_for(result.metric).label} over time",
        lead=words_for(result.metric).meaning,
        figures=tuple(_figure(number_of, model, result) for number_of, model in enumerate(models)),
        folded=False,
    )


def _listed(result: History) -> Section:
    write = metric_format(result.metric, [p.value for p in result.points])
    share = words_for(result.metric).share
    columns = (
        Column("date", text),
        Column("run", text),
        Column("model", text, 4),
        Column("engine", text, 2),
        Column("verdict", text),
        Column(words_for(result.metric).label, interval=1),
        Column("change", signed, 3, interval=5),
    )
    rows: tuple[tuple[Cell | Value, ...], ...] = tuple(
        (
            point.created[:16].replace("T", " "),
            point.place,
            _model(point.model),
            point.engine,
            Cell(point.status, TONES[point.status]),
            Cell(point.value, format=write),
            Cell(
                point.change,
                "strong" if point.moved else "dim",
                "significant" if point.moved else "",
                points if share else signed,
            ),
        )
        for point in result.points
    )
    return Section(
        id="runs",
        title="Runs",
        tables=(Table(columns, rows),),
        notes=(
            "A change is from the run of the same model before it. It is called significant where "
            "its 95 % interval, of two independent runs, leaves 0 out; not adjusted for their "
            "number. mismatch report A B compares two of them token by token.",
        ),
        folded=False,
    )


def _unreadable(result: History) -> tuple[Section, ...]:
    rows = tuple((place, reason) for place, reason in result.unreadable)
    if not rows:
        return ()
    table = Table((Column("directory", text), Column("why", text)), rows)
    return (Section("unreadable", "Not readable", tables=(table,), folded=False),)


def _figure(number_of: int, model: str, result: History) -> Figure:
    shown = [p for p in result.points if p.model == model and p.value is not None]
    values = [p.value.value for p in shown if p.value is not None]
    write = metric_format(result.metric, [p.value for p in shown])
    moved = sum(p.moved for p in shown)
    first, last = write(values[0]), write(values[-1])
    title = f"{_model(model)}: {first} → {last} in {plural(len(shown), 'run')}"
    return Figure(
        f"history-{number_of}",
        title,
        f"Lines are 95 % intervals, rings significant changes ({moved}), dashes the levels.",
        lambda: _draw(f"history-{number_of}", title, shown, result.metric),
    )


def _draw(name: str, title: str, shown: Sequence[Point], metric: str) -> str:
    x = np.arange(len(shown), dtype=np.float64)
    estimates = [p.value for p in shown if p.value is not None]
    y = np.array([e.value for e in estimates])
    low, high = (
        np.array([np.nan if end is None else end for end in ends])
        for ends in ([e.low for e in estimates], [e.high for e in estimates])
    )
    with drawing(6.0, 2.7) as (figure, axes):
        known = np.isfinite(low) & np.isfinite(high)
        segments(axes, (x[known], x[known]), (low[known], high[known]), color=FAINT, linewidth=1.2)
        axes.plot(x, y, color=ACCENT, linewidth=1.4, marker="o", markersize=4)
        moved = np.array([p.moved for p in shown])
        axes.plot(x[moved], y[moved], "o", color=SECOND, markersize=10, fillstyle="none")
        span = [value for value in (*y, *low[known], *high[known]) if np.isfinite(value)]
        positive = min(span) > 0
        if positive and max(span) > 20 * min(span):
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
        values = ", ".join(
            f"{p.created[:10]} {p.engine} {number(v)}" for p, v in zip(shown, y, strict=True)
        )
        return to_svg(figure, name, f"{title}: {values}")
