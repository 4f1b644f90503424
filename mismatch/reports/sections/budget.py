"""The error budget: each step from the engine to the trainer, on the same tokens."""

from __future__ import annotations

import numpy as np

from mismatch.analysis.growth import BESIDE, ENGINE_REPEATED
from mismatch.metrics.budget import Budget, Step
from mismatch.reports.formatting import interval, line, number, tenths, text
from mismatch.reports.section import Cell, Column, Figure, Section, Table, Value
from mismatch.reports.svg import ACCENT, FAINT, INK, SECOND, drawing, to_svg
from mismatch.run.scorings import TRAIN
from mismatch.types import Estimate, Report

LEAD = (
    "Each step from the engine to the trainer, on the same tokens. Mean delta adds up exactly; the "
    "shares of its spread add up to 100 %, and one may be negative. Mean |delta| does not add up."
)
AGAIN = (
    "The same pass made again. What it differs by is noise: no step above can be told from it if "
    "it is no larger."
)
_LABELS = {
    ("decode", "prefill"): "engine: decode → prefill",
    ("decode", "reference"): "engine decode → float32",
    ("decode", "train"): "engine decode → trainer",
    ("prefill", "reference"): "engine prefill → float32",
    ("prefill", "train"): "engine prefill → trainer",
    ("reference", "train"): "float32 → trainer",
}


def section(result: Budget, report: Report) -> Section:
    """The chain in order, what it adds up to, and what was measured beside it."""
    largest_step = largest(result)
    again = Section(
        id="budget-beside",
        title="Beside the chain",
        lead=AGAIN,
        tables=(
            Table(_columns("spread, of delta's"), tuple(_row(s, _again(s)) for s in result.beside)),
        ),
        folded=False,
    )
    return Section(
        id="budget",
        title="Error budget",
        lead=LEAD,
        sentences=(largest_step,),
        tables=(Table(_columns("of the spread"), _chain(result)),),
        figures=_figures(result),
        notes=tuple(remarks(result)),
        parts=(again,) if result.beside else (),
        short=largest_step or "the error budget has one step only: what the headline compares",
    )


def _columns(share: str) -> tuple[Column, ...]:
    return (
        Column("step", text),
        Column("mean delta", number, interval=2),
        Column("mean |delta|", number, 3),
        Column(share, tenths, interval=1),
    )


def _chain(result: Budget) -> tuple[tuple[Cell | Value, ...], ...]:
    """Every step, then what they add up to."""
    whole = (
        Cell("together", note=f"{result.left} / {result.right}"),
        Cell(result.mean, "strong"),
        None,
        Cell(1.0 if result.spread.value > 0 else None, "strong"),
    )
    return (*(_row(step, _label(step)) for step in result.steps), whole)


def _row(step: Step, label: str) -> tuple[Cell | Value, ...]:
    name = Cell(label, note=f"{step.left} / {step.right}")
    return name, Cell(step.mean, "strong"), step.size, Cell(step.share, "strong")


def remarks(result: Budget) -> list[str]:
    """What was not run and why, and what else a reader must know; one sentence each."""
    gaps = [f"{line(gap.step)}: not run, because {line(gap.reason)}" for gap in result.gaps]
    carried = [
        f"{_label(step)}: a few tokens carry it, so the interval of its share may be too narrow"
        for step in result.steps
        if step.share is not None and "heavy-tail" in step.share.flags
    ]
    return gaps + carried + [line(note) for note in result.notes]


def largest(result: Budget) -> str:
    """Which step carries most of the spread, as a sentence; empty without a choice."""
    if len(result.steps) < 2:
        return ""
    shares = [(step.share, step) for step in result.steps if step.share is not None]
    if not shares:
        return "Every step is exactly 0."
    share, step = max(shares, key=lambda pair: pair[0].value)
    return (
        f"{_label(step)} carries {tenths(share.value)} of the spread of delta "
        f"({interval(share, tenths)})."
    )


def _label(step: Step) -> str:
    kinds = _kind(step.left), _kind(step.right)
    return _LABELS.get(kinds, f"{line(step.left)} → {line(step.right)}")


def _kind(name: str) -> str:
    engine, _, variant = name.partition(":")
    return "reference" if engine == "reference" else variant or "train"


def _again(step: Step) -> str:
    variant = _kind(step.right)
    if not step.right.startswith(TRAIN):
        return ENGINE_REPEATED
    return BESIDE.get(variant, line(step.right))


def _figures(result: Budget) -> tuple[Figure, ...]:
    """Waterfalls of the spread and of mean delta; none for a chain of one step."""
    if len(result.steps) < 2:
        return ()
    labels = [_short(step) for step in result.steps]
    shares = [step.share for step in result.steps if step.share is not None]
    means = [step.mean for step in result.steps]
    spread = Figure(
        "budget-spread",
        "Which step makes delta vary",
        "Each bar starts where the one before ended; a step that undoes part of another "
        "goes down. The shares add up to 100 %. Lines: 95 % intervals of the step.",
        lambda: _waterfall("budget-spread", labels, shares, 100.0, "share of the spread, %"),
    )
    mean = Figure(
        "budget-mean",
        "Which step moves the mean",
        "Mean delta is the one number that adds up exactly along the chain. A bar whose line "
        "crosses its own start cannot be told from 0.",
        lambda: _waterfall("budget-mean", labels, means, 1.0, "mean delta, nats"),
    )
    return (spread, mean) if len(shares) == len(result.steps) else (mean,)


def _short(step: Step) -> str:
    names = {"reference": "float32", "train": "trainer"}
    left, right = (names.get(kind, kind) for kind in (_kind(step.left), _kind(step.right)))
    return f"{left} →\n{right}"


def _waterfall(name: str, labels: list[str], parts: list[Estimate], scale: float, axis: str) -> str:
    values = np.array([part.value for part in parts]) * scale
    tops = np.cumsum(values)
    starts = tops - values
    with drawing() as (figure, axes):
        x = np.arange(len(parts) + 1)
        colors = [ACCENT if value >= 0 else SECOND for value in values]
        axes.bar(x[:-1], values, bottom=starts, color=colors, width=0.6)
        axes.bar(x[-1:], tops[-1:], color=FAINT, width=0.6)
        for index, part in enumerate(parts):
            axes.plot([x[index] - 0.3, x[index] + 1.3], [tops[index]] * 2, color=INK, lw=0.8)
            if part.low is not None and part.high is not None:
                ends = [starts[index] + scale * end for end in (part.low, part.high)]
                axes.plot([x[index]] * 2, ends, color=INK, lw=1.2)
        axes.axhline(0.0, color=INK, lw=0.8)
        axes.set_xticks(x, [*labels, "together"])
        axes.margins(y=0.12)
        axes.set_ylabel(axis)
        return to_svg(figure, name, f"Waterfall: {axis} per step")
