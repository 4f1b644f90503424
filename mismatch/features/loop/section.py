"""A training loop: six curves, arms in fixed colours, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
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
STRONG = (ACCENT, SECOND, INK)  # of the first arms, whose story the page tells; the others are grey
DASHES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1)))
ROUNDING = 1e-9  # k3 of float64 sums below this is 0 in float32, in which the weights rest
NEVER = "never"
OVER = {"end": f"last {WINDOW} steps", "run": "all steps"}
BETTER = {"end": "ends with a higher reward than", "run": "has more reward over all steps than"}
ARM = Column("arm", text, of="name", tone="code")


def tiny(value: float) -> str:
    """Write a value; below what float32 separates from 0, say so.

    >>> tiny(9.5e-14), tiny(0.0702)
    ('0 (float32)', '0.0702')
    """
    return "0 (float32)" if 0 < abs(value) < ROUNDING else number(value)


def _checked(result: LoopReport) -> list[Column]:
    """Return the column of the verdicts before the first step, where a check gave them."""
    checked = result.checked
    if checked is None:
        return []
    size, found = f"{checked.prompts} prompts × {checked.samples}", checked.verdicts
    return [Column("check before", text, detail=size, of=lambda a: found.get(a.name, "–").upper())]


def _ends(name: str) -> Callable[[Arm], str]:
    """Return a column's mean over the last steps of an arm's seeds, and from where to where."""

    def shown(arm: Arm) -> str:
        values = [at_end(run, name) for run in arm.runs]
        low, high, mean = tiny(min(values)), tiny(max(values)), tiny(float(np.mean(values)))
        return mean if low == high else f"{mean} ({low} to {high})"

    return shown


def _step(at: int | None) -> str:
    return NEVER if at is None else str(at)


def _falls(arm: Arm) -> list[int | None]:
    """Return the step at which the reward falls, of every seed."""
    return [reward_fall(run) for run in arm.runs]


ARMS = (
    ARM,
    Column("seeds", count, 1, of=lambda arm: len(arm.runs)),
    Column("reward", text, detail="last 5 steps, range of seeds", of=_ends("reward")),
    Column("reward falls", text, detail="at step", of=lambda a: ", ".join(map(_step, _falls(a)))),
    Column("k3 KL", text, 1, detail="nats, last 5 steps", of=_ends("k3_kl")),
    Column("entropy", text, 2, detail="nats, last 5 steps", of=_ends("entropy")),
    Column("gradient norm", text, 3, detail="last 5 steps", of=_ends("grad_norm")),
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
    """Return arms and seeds, the pictures, warnings and times below."""
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
        sentences=[story(result), *_start(result), *_claims(result)],
        tables=[Table.of((*ARMS[:2], *_checked(result), *ARMS[2:]), result.arms)],
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
                tables=[Table((Column("arm", text), Column("seed", count), *columns), fires)],
            ),
        ],
    )


def story(result: LoopReport) -> str:
    """Say in which arms the reward falls, and in which it does not, with every seed.

    An arm whose seeds disagree is named with how many of them fall. An arm of one seed says nothing
    next to arms of several.
    """
    least = 2 if any(len(arm.runs) > 1 for arm in result.arms) else 1
    steps = {arm.name: _falls(arm) for arm in result.arms if len(arm.runs) >= least}
    falling = {name: falls for name, falls in steps.items() if set(falls) != {None}}
    never = [name for name, falls in list(steps.items())[: len(STRONG)] if set(falls) == {None}]
    if not falling:
        return "The reward falls in no arm."
    parts = []
    for name, falls in falling.items():
        at = [str(step) for step in falls if step is not None]
        part = f"{name} at step{'s' * (len(at) > 1)} {' and '.join(at)}"
        few = f" ({len(at)} of {len(falls)} seeds)" if len(at) < len(falls) else ""
        parts.append(part + few)
    fine = f"; with {' and '.join(never)} it does not" if never else ""
    return f"The reward falls in {'; in '.join(parts)}{fine}."


def _start(result: LoopReport) -> Iterator[str]:
    """Say what a check found of the arms before the first step."""
    if checked := result.checked:
        of = [arm.name for arm in result.arms if arm.name in checked.verdicts]
        verdicts = ", ".join(f"{checked.verdicts[name].upper()} with {name}" for name in of)
        size = f"{plural(checked.prompts, 'prompt')} × {plural(checked.samples, 'sample')}"
        yield f"A check of {size} before the first step: {verdicts}."


def _claims(result: LoopReport) -> Iterator[str]:
    """Yield what is claimed of the first arm, or that nothing is."""
    first = result.arms[0].name if result.arms else ""
    about = [claim for claim in claims(result) if first in (claim.better, claim.worse)]
    for claim in about:
        if claim.agree:
            gaps = " and ".join(f"+{number(gap)}" for gap in claim.differences)
            yield f"{claim.better} {BETTER[claim.over]} {claim.worse}: by {gaps}, a seed each."
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
    told = [arm.name for arm in result.arms[: len(STRONG)] if np.isfinite(means[arm.name])]
    title = capital(column.label)
    if told:
        title += " ends at " + ", ".join(f"{tiny(means[arm])} in {arm}" for arm in told)
    return Figure(
        f"loop-{name.replace('_', '-')}",
        title,
        f"{column.label}{unit}, by step; numbers: means of the last {WINDOW}.",
        partial(draw, result, name, log, column.unit),
    )


def draw(result: LoopReport, name: str, log: bool, label: str, axes: Axes) -> str:
    """Draw curves and bands of every arm; a logarithmic axis leaves out what is 0."""
    curves = []
    for place, arm in reversed(list(enumerate(result.arms))):  # the first on top
        band, strong = _band(arm, name, log), place < len(STRONG)
        if not len(band.steps):
            continue
        if strong:
            axes.fill_between(
                band.steps, band.low, band.high, color=STRONG[place], alpha=0.15, lw=0
            )
        axes.plot(
            band.steps,
            band.middle,
            color=STRONG[place] if strong else FAINT,
            ls="-" if strong else DASHES[place % len(DASHES)],
            lw=2.0 if strong else 0.8,
            label=arm.name if strong else None,
        )
        ends = [f"{tiny(float(band.middle[at]))} at step {int(band.steps[at])}" for at in (0, -1)]
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
    """Return the loop as a separate page."""
    runs = [run for arm in result.arms for run in arm.runs]
    falls = [arm.name for arm in result.arms if arm.runs and None not in _falls(arm)]
    reason = f"{plural(len(result.arms), 'arm')} with the same weights, prompts and seeds"
    steps, shown = max((run.steps for run in runs), default=0), section(result)
    return Page(
        kind="training loop",
        word="reward falls" if falls else "reward holds",
        lead=story(result),
        tone="warn" if falls else "healthy",
        reason=reason,
        title=Path(result.model).name,
        facts=(f"{result.engine} and FSDP2; {plural(steps, 'step')}",),
        sections=(replace(shown, sentences=shown.sentences[1:]),),  # the first is the lead
        file="loop",
    )
