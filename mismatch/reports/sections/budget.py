"""The error budget: each step from the engine to the trainer, on the same tokens."""

from __future__ import annotations

from mismatch.metrics.budget import Budget, Step
from mismatch.reports.formatting import interval, line, number, tenths, text
from mismatch.reports.section import Cell, Column, Section, Table, Value
from mismatch.types import Report

LEAD = (
    "Each step from the engine to the trainer, on the same tokens. Mean delta adds up exactly; the "
    "shares of its spread add up to 100 %, and one may be negative. Mean |delta| does not add up."
)
COLUMNS = (
    Column("step", text),
    Column("mean delta", number, interval=2),
    Column("mean |delta|", number, 3),
    Column("of the spread", tenths, interval=1),
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
    return Section(
        id="budget",
        title="Error budget",
        lead=LEAD,
        sentences=(largest_step,),
        tables=(Table(COLUMNS, _chain(result)),),
        notes=tuple(remarks(result)),
        short=largest_step or "One step only: what the headline compares.",
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
        f"{_label(step)}: heavy-tailed, a few tokens carry its share"
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
