"""A training loop: six curves, arms in fixed colours, and what they say."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.experiments.loop.history import COLUMNS
from mismatch.experiments.loop.judge import (
    FALL,
    WARNINGS,
    WINDOW,
    Arm,
    LoopReport,
    SeedRun,
    at_end,
    claims,
    fired,
    lead_time,
    reward_fall,
)
from mismatch.reports.formatting import count, number, plural, text
from mismatch.reports.section import Cell, Column, Figure, Page, Section, Table, status_cell
from mismatch.reports.svg import ACCENT, FAINT, INK, SECOND, legend_above
from mismatch.types import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAD = (
    "The engine samples, the trainer takes its optimiser's steps, the weights go back into the "
    "engine. All arms begin with the same weights, prompts and seeds."
)
PANELS = (
    ("k3_kl", True),
    ("entropy", False),
    ("reward", False),
    ("grad_norm", True),
    ("log_ppl_diff_max", True),
    ("ratio_max", True),
)
STYLES: tuple[tuple[str, Any], ...] = (
    *((colour, "-") for colour in (ACCENT, SECOND, INK, FAINT)),
    *((colour, (0, (4, 2))) for colour in (ACCENT, SECOND, INK, FAINT)),
    *((colour, (0, (1, 1))) for colour in (ACCENT, SECOND, INK, FAINT)),
)
TIMES = ("push_s", "verify_s", "generate_s", "score_s", "update_s", "export_s", "seconds")
ENDS = ("reward", "k3_kl", "entropy", "grad_norm")
NEVER = "never"
OVER = {"end": f"last {WINDOW} steps", "run": "all steps"}
BETTER = {"end": "ends with a higher reward than", "run": "has more reward over all steps than"}
Row = tuple[Cell | str | int | float | None, ...]
ARM_COLUMNS = (
    Column("arm", text),
    Column("seed", count),
    Column("steps", count, 1),
    Column("check at step 0", text),
    Column("reward", text, detail="first and last 5 steps"),
    Column("k3 KL", text, 1, detail="nats"),
    Column("entropy", text, 1, detail="nats"),
    Column("gradient norm", text, 2),
    Column("reward falls", text, detail="at step"),
    Column("lead time", text, 1, detail="steps"),
)


def section(result: LoopReport, report: Report | None = None) -> Section:
    """Arms and seeds, the pictures, warnings and times below."""
    rows = [_row(arm, run) for arm in result.arms for run in arm.runs]
    fires: tuple[Row, ...] = tuple(
        (Cell(arm.name, "code"), run.seed, *(_step(at) for at in fired(run).values()))
        for arm in result.arms
        for run in arm.runs
    )
    titles = (COLUMNS.get(warning.column) for warning in WARNINGS)
    columns = [Column(title.label if title else "sequence ESS lost", text) for title in titles]
    warned = Table((Column("arm", text), Column("seed", count), *columns), fires)
    times: tuple[Row, ...] = tuple(
        (Cell(arm.name, "code"), run.seed, *(_median(run, name) for name in TIMES))
        for arm in result.arms
        for run in arm.runs
    )
    shown = [Column(COLUMNS[name].label, number) for name in TIMES]
    timed = Table((Column("arm", text), Column("seed", count), *shown), times)
    return Section(
        id="loop",
        title="Training loop",
        lead=LEAD,
        warnings=tuple(_stopped(result)),
        sentences=tuple(_claims(result)),
        tables=(Table(ARM_COLUMNS, tuple(rows)),),
        figures=tuple(_figure(result, name, log) for name, log in PANELS),
        notes=(
            f"The reward falls where the mean of {WINDOW} steps lies {FALL:g} below the best one "
            "so far. Bands reach from the lowest to the highest seed.",
        ),
        parts=(
            Section("loop-claims", "Every two arms", tables=(_all_claims(result),)),
            Section("loop-warnings", "First step of each warning", tables=(warned,)),
            Section(
                "loop-times",
                "Seconds of a step",
                tables=(timed,),
                notes=("Medians over the steps.",),
            ),
        ),
    )


def _row(arm: Arm, run: SeedRun) -> Row:
    ends = [f"{number(_start(run, name))} → {number(at_end(run, name))}" for name in ENDS]
    first = Cell("–") if run.first is None else status_cell(run.first.status)
    falls, lead = reward_fall(run), lead_time(run)
    return (Cell(arm.name, "code"), run.seed, run.steps, first, *ends, _step(falls), _step(lead))


def _start(run: SeedRun, name: str) -> float:
    return at_end(run, name, WINDOW)


def _step(at: int | None) -> str:
    return NEVER if at is None else str(at)


def _median(run: SeedRun, name: str) -> float | None:
    values = run.curve(name)
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None


def _stopped(result: LoopReport) -> Iterator[str]:
    for arm in result.arms:
        for run in arm.runs:
            if run.stopped:
                yield f"{arm.name}, seed {run.seed}, stopped: {run.stopped}"


def _claims(result: LoopReport) -> Iterator[str]:
    """What is claimed of the first arm, or that nothing is."""
    first = result.arms[0].name if result.arms else ""
    about = [claim for claim in claims(result) if first in (claim.better, claim.worse)]
    for claim in about:
        if claim.agree:
            gaps = ", ".join(number(gap) for gap in claim.differences)
            seeds = plural(len(claim.differences), "seed")
            yield f"{claim.better} {BETTER[claim.over]} {claim.worse}: {gaps} with {seeds}."
    if about and not any(claim.agree for claim in about):
        yield (
            "No difference of rewards is claimed: it takes several seeds that agree, each by more "
            "than twice the standard error over its steps."
        )


def _all_claims(result: LoopReport) -> Table:
    rows: list[Row] = [
        (
            Cell(claim.better, "code"),
            Cell(claim.worse, "code"),
            OVER[claim.over],
            ", ".join(
                f"{number(gap)} ± {number(error)}"
                for gap, error in zip(claim.differences, claim.errors, strict=True)
            ),
            "yes" if claim.agree else "no",
        )
        for claim in claims(result)
    ]
    gap = "difference of reward by seed, ± standard error"
    titles = ("higher", "lower", "over", gap, "claimed")
    return Table(tuple(Column(title, text) for title in titles), tuple(rows))


# ---------------------------------------------------------------- pictures


def _figure(result: LoopReport, name: str, log: bool) -> Figure:
    column = COLUMNS[name]
    unit = f", {column.unit}" if column.unit else ""
    means = {
        arm.name: float(np.mean([at_end(run, name) for run in arm.runs])) for arm in result.arms
    }
    ends = ", ".join(f"{arm} {number(value)}" for arm, value in means.items())
    ranked = sorted(
        (arm for arm, value in means.items() if np.isfinite(value)), key=means.__getitem__
    )
    title = column.label[0].upper() + column.label[1:]
    if ranked:
        shown = dict.fromkeys((ranked[-1], ranked[0]))
        title += " ends at " + ", ".join(f"{number(means[arm])} in {arm}" for arm in shown)
    return Figure(
        f"loop-{name.replace('_', '-')}",
        title,
        f"{column.label}{unit}, by step; mean of the last {WINDOW}: {ends}.",
        partial(draw, result, name, log, column.unit),
    )


def draw(result: LoopReport, name: str, log: bool, label: str, axes: Axes) -> str:
    """Curves and bands of every arm; a logarithmic axis leaves out what is 0."""
    told = []
    for arm, (colour, dashes) in zip(result.arms, _styles(len(result.arms)), strict=True):
        steps, *bounds = _band(arm, name)
        if not len(steps):
            continue
        low, middle, high = (np.where(b > 0, b, np.nan) for b in bounds) if log else bounds
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, lw=0)
        axes.plot(steps, middle, color=colour, ls=dashes, lw=1.5, label=arm.name)
        ends = [f"{number(float(middle[at]))} at step {int(steps[at])}" for at in (0, -1)]
        told.append(f"{arm.name} {' to '.join(ends)}")
    if log and any((_band(arm, name)[1] > 0).any() for arm in result.arms):
        axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    legend_above(axes, 3)
    return f"{COLUMNS[name].label}: {'; '.join(told)}"


def _styles(arms: int) -> list[tuple[str, Any]]:
    """Of so many arms, by their order alone."""
    return [STYLES[index % len(STYLES)] for index in range(arms)]


def _band(arm: Arm, name: str) -> tuple[Any, Any, Any, Any]:
    """Steps, lowest, mean and highest seed; as far as every seed goes."""
    length = min((run.steps for run in arm.runs), default=0)
    if not length:
        return (np.zeros(0),) * 4
    table = np.stack([run.curve(name)[:length] for run in arm.runs])
    known = np.isfinite(table).any(axis=0)
    rows = table[:, known]
    low, high = np.nanmin(rows, axis=0), np.nanmax(rows, axis=0)
    return np.flatnonzero(known), low, np.nanmean(rows, axis=0), high


def page(result: LoopReport) -> Page:
    """The loop as a page of its own."""
    runs = [run for arm in result.arms for run in arm.runs]
    falls = [arm.name for arm in result.arms if any(reward_fall(r) is not None for r in arm.runs)]
    reason = f"the reward falls in {', '.join(falls)}" if falls else "the reward falls in no arm"
    steps = max((run.steps for run in runs), default=0)
    return Page(
        kind="training loop",
        word=plural(len(result.arms), "arm"),
        tone="warn" if falls else "healthy",
        reason=reason,
        title=Path(result.model).name,
        facts=(f"{result.engine} and FSDP2; {plural(steps, 'step')}",),
        sections=(section(result),),
        file="loop",
    )
