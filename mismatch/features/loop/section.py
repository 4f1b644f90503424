"""A training loop: six curves, arms in fixed colours, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mismatch.features.loop.history import COLUMNS
from mismatch.features.loop.judge import (
    FALL,
    WARNINGS,
    WINDOW,
    Arm,
    LoopReport,
    SeedRun,
    at_end,
    claims,
    fired,
    reward_fall,
)
from mismatch.reports.formatting import capital, count, number, plural, text
from mismatch.reports.section import Cell, Cells, Column, Figure, Page, Section, Table
from mismatch.reports.svg import ACCENT, FAINT, INK, SECOND, legend_above
from mismatch.types import Floats, Ints

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
STYLES: list[tuple[str, Any]] = [
    (colour, dashes)
    for dashes in ("-", (0, (4, 2)), (0, (1, 1)))
    for colour in (ACCENT, SECOND, INK, FAINT)
]
NEVER = "never"
OVER = {"end": f"last {WINDOW} steps", "run": "all steps"}
BETTER = {"end": "ends with a higher reward than", "run": "has more reward over all steps than"}
Trained = tuple[Arm, SeedRun]  # a row
ARM, SEED = (
    Column("arm", text, of=lambda row: row[0].name, tone="code"),
    Column("seed", count, of=lambda row: row[1].seed),
)


def _ends(name: str) -> Callable[[Trained], str]:
    """A column's mean over the first and over the last steps."""
    return lambda row: f"{number(at_end(row[1], name, WINDOW))} → {number(at_end(row[1], name))}"


def _step(at: int | None) -> str:
    return NEVER if at is None else str(at)


ARMS = (
    ARM,
    SEED,
    Column("steps", count, 1, of=lambda row: row[1].steps),
    Column("reward", text, detail="first and last 5 steps", of=_ends("reward")),
    Column("k3 KL", text, 1, detail="nats", of=_ends("k3_kl")),
    Column("entropy", text, 1, detail="nats", of=_ends("entropy")),
    Column("gradient norm", text, 2, of=_ends("grad_norm")),
    Column("reward falls", text, detail="at step", of=lambda row: _step(reward_fall(row[1]))),
)
CLAIMS = (
    Column("higher", text, of="better", tone="code"),
    Column("lower", text, of="worse", tone="code"),
    Column("over", text, of=lambda claim: OVER[claim.over]),
    Column(
        "difference of reward by seed, ± standard error",
        text,
        of=lambda claim: ", ".join(
            f"{number(gap)} ± {number(error)}"
            for gap, error in zip(claim.differences, claim.errors, strict=True)
        ),
    ),
    Column("claimed", text, of=lambda claim: "yes" if claim.agree else "no"),
)


def section(result: LoopReport) -> Section:
    """Arms and seeds, the pictures, warnings and times below."""
    rows = [(arm, run) for arm in result.arms for run in arm.runs]
    titles = (COLUMNS.get(warning.column) for warning in WARNINGS)
    columns = [Column(title.label if title else "sequence ESS lost", text) for title in titles]
    fires: list[Cells] = [
        (Cell(arm.name, "code"), run.seed, *map(_step, fired(run).values())) for arm, run in rows
    ]
    return Section(
        "loop",
        "Training loop",
        LEAD,
        warnings=[
            f"{arm.name}, seed {run.seed}, stopped: {run.stopped}"
            for arm, run in rows
            if run.stopped
        ],
        sentences=[*_claims(result)],
        tables=[Table.of(ARMS, rows)],
        figures=[_figure(result, name, log) for name, log in PANELS],
        notes=[
            f"The reward falls where the mean of {WINDOW} steps lies {FALL:g} below the best one "
            "so far. Bands reach from the lowest to the highest seed."
        ],
        parts=[
            Section("loop-claims", "Every two arms", tables=[Table.of(CLAIMS, claims(result))]),
            Section(
                "loop-warnings",
                "First step of each warning",
                tables=[Table((ARM, SEED, *columns), fires)],
            ),
        ],
    )


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
    title = capital(column.label)
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
    """Draw curves and bands of every arm; a logarithmic axis leaves out what is 0."""
    curves = []
    for arm, (colour, dashes) in zip(result.arms, cycle(STYLES), strict=False):
        band = _band(arm, name, log)
        if not len(band.steps):
            continue
        axes.fill_between(band.steps, band.low, band.high, color=colour, alpha=0.15, lw=0)
        axes.plot(band.steps, band.middle, color=colour, ls=dashes, lw=1.5, label=arm.name)
        ends = [f"{number(float(band.middle[at]))} at step {int(band.steps[at])}" for at in (0, -1)]
        curves.append(f"{arm.name} {' to '.join(ends)}")
    if log and any(np.isfinite(_band(arm, name, log).low).any() for arm in result.arms):
        axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(xlabel="step", ylabel=label)
    legend_above(axes, 3)
    return f"{COLUMNS[name].label}: {'; '.join(curves)}"


class Band(NamedTuple):
    """A curve of an arm: lowest, mean and highest seed at these steps."""

    steps: Ints
    low: Floats
    middle: Floats
    high: Floats


def _band(arm: Arm, name: str, log: bool) -> Band:
    """Return the curve as far as every seed goes; on a logarithmic axis 0 is left out."""
    length = min(run.steps for run in arm.runs)
    table = np.stack([run.curve(name)[:length] for run in arm.runs])
    steps = np.flatnonzero(np.isfinite(table).any(axis=0))
    if not len(steps):
        return Band(steps, *[np.zeros(0)] * 3)
    rows = table[:, steps]
    bounds = np.nanmin(rows, axis=0), np.nanmean(rows, axis=0), np.nanmax(rows, axis=0)
    return Band(steps, *(np.where(bound > 0, bound, np.nan) if log else bound for bound in bounds))


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
