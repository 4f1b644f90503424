"""The policy gradient of one batch, beside that of the trainer in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from mismatch.experiments.gradients.types import (
    REWARDS,
    GradientCheck,
    GradientRow,
    GroupGradient,
)
from mismatch.reports.formatting import (
    cosine,
    count,
    line,
    memory,
    number,
    plural,
    seconds,
    text,
)
from mismatch.reports.section import Cell, Cells, Column, Figure, Section, Table, not_tested
from mismatch.reports.svg import ACCENT, FAINT, INK, SECOND, legend_above, rows_of
from mismatch.types import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAD = (
    "The policy gradient of one batch, taken by the trainer and its fixes, beside that of the "
    "trainer in float32 on the same tokens. Every token weighs the same. One batch, no training."
)
JACKKNIFE = "Intervals: jackknife over prompts, 95 % each, not adjusted for how many there are."


def angle(cosine: float) -> float:
    """Return degrees.

    >>> angle(0.0), angle(1.0)
    (90.0, 0.0)
    """
    return math.degrees(math.acos(max(-1.0, min(1.0, cosine))))


def degrees(cosine: float) -> str:
    """Write the angle of a cosine.

    >>> degrees(0.8), degrees(1.0)
    ('37°', '0°')
    """
    value = angle(cosine)
    if value == 0.0:
        return "0°"
    if value < 1e-3:
        return "under 0.001°"
    return f"{value:.0f}°" if value >= 9.95 else f"{float(f'{value:.2g}'):g}°"


COLUMNS = (
    Column("gradient", text),
    Column("off", degrees, interval=4, detail="angle to the reference's"),
    Column("cosine", cosine, 3),
    Column("length", number, 1, interval=2, detail="of the reference's"),
)


def section(result: GradientCheck, report: Report) -> Section:
    """Return the trainer and its fixes in a table, and each group of parameters in another."""
    own = [row for row in result.rows if not row.same_as]
    # A trainer that is the reference itself keeps its line: it is what the check is about.
    lines = [_row(row) for row in result.rows if row.id == "baseline" or not row.same_as]
    columns = [Column(each.group, degrees) for each in (own[0].groups if own else ())]
    by_group: list[Cells] = [(row.id, *map(_group, row.groups)) for row in own]
    same = [
        f"{row.id}: the gradient of {row.same_as}, of the same settings."
        for row in result.rows
        if row.same_as
    ]
    groups = Section(
        "gradients-groups",
        "By group of parameters",
        "Angle of each group's part of the gradient to the reference's.",
        tables=(Table((Column("gradient", text), *columns), by_group),),
        page_only=True,
    )
    return Section(
        id="gradients",
        title="Gradients",
        lead=f"{LEAD} {batch(result)}.",
        tables=(Table(COLUMNS, lines),),
        figures=_figures(result),
        notes=(*same, *notes(result), *not_tested(result.not_tested)),
        parts=(groups,),
        short=_short(result),
    )


def _short(check: GradientCheck) -> str:
    baseline = check.row("baseline")
    if baseline is None or baseline.whole.cosine is None:
        return ""
    return f"the trainer's is {degrees(baseline.whole.cosine.value)} off the reference's"


def batch(check: GradientCheck) -> str:
    """What the gradients were taken of."""
    size = f"{plural(check.prompts, 'prompt')}, {plural(check.sequences, 'sample')}"
    given = check.advantages == REWARDS
    advantages = "rewards, normalised within each prompt" if given else check.advantages
    return f"{size}, {plural(check.tokens, 'action token')}; advantages: {advantages}"


def notes(check: GradientCheck) -> list[str]:
    """What has to be known before the table is believed."""
    texts = []
    if check.advantages != REWARDS:
        texts.append(
            "No task steered this gradient: the rewards cannot, so signs stand in for advantages. "
            "How kernels and dtypes bend a gradient shows all the same."
        )
    elif check.deciding < check.prompts:
        texts.append(
            f"{count(check.deciding)} of {plural(check.prompts, 'prompt')} have samples of "
            "different reward; the others have no gradient."
        )
    ratios = [row.whole.norm_ratio for row in check.rows]
    flags = {flag for ratio in ratios if ratio is not None for flag in ratio.flags}
    if "one-prompt" in flags:
        texts.append("One prompt only: nothing can be told from chance.")
    elif "few-prompts" in flags:
        texts.append("Few prompts: the intervals are rough. More: --gradient-prompts.")
    return [*texts, JACKKNIFE]


def _row(row: GradientRow) -> Cells:
    parts = [f"{row.kind}: {row.label}"]
    if row.same_as == "reference":
        parts.append("the reference itself: the same settings")
    if row.seconds is not None:
        parts.append(seconds(row.seconds))
    if row.peak_bytes is not None:
        parts.append(memory(row.peak_bytes))
    arc = row.whole.cosine  # the wider the angle, the smaller its cosine
    off = None if arc is None else replace(arc, low=arc.high, high=arc.low)
    name = Cell(row.id, "code", "; ".join(parts))
    return (name, Cell(off, "strong"), arc, row.whole.norm_ratio)


def _group(group: GroupGradient) -> Cell:
    if group.silent:
        return Cell("no gradient", "critical", format=text)
    return Cell(None if group.cosine is None else group.cosine.value)


# ---------------------------------------------------------------- figures


COLOURS = (ACCENT, SECOND, INK, FAINT)
MARKERS = ("o", "s", "D", "^")
MOST = 4  # gradients in the picture of groups
LEAST = 1e-3  # degrees: what is nearer is drawn there
TICKS = (1e-3, 1e-2, 0.1, 1.0, 10.0, 90.0)


def _figures(check: GradientCheck) -> tuple[Figure, ...]:
    """Return the picture of directions, where a gradient was taken."""
    rows = [row for row in check.rows if not row.same_as]
    if not rows:
        return ()
    return (
        Figure(
            "gradient-directions",
            "Direction, by group of parameters",
            "Further left is nearer to the reference; lines are 95 % intervals over prompts. At "
            "90° the two have nothing in common. A cross there: no gradient arrives where one "
            "should.",
            partial(_directions, rows[:MOST]),
            (6.0, 1.3 + 0.42 * len(rows[0].groups)),
        ),
    )


def _directions(rows: Sequence[GradientRow], axes: Axes) -> str:
    step, texts = 0.6 / max(1, len(rows)), []
    for index, row in enumerate(rows):
        shift = (index - (len(rows) - 1) / 2) * step
        colour, marker = COLOURS[index], MARKERS[index]
        placed = [(height + shift, each.cosine) for height, each in enumerate(row.groups)]
        angles = [(at, max(LEAST, angle(arc.value))) for at, arc in placed if arc is not None]
        for at, arc in placed:
            if arc is not None and arc.low is not None and arc.high is not None:
                ends = [max(LEAST, angle(end)) for end in (arc.high, arc.low)]
                axes.plot(ends, [at] * 2, color=colour, lw=1.2)
        x, y = [x for _, x in angles], [y for y, _ in angles]
        axes.plot(x, y, marker, color=colour, ms=5, label=line(row.id))
        named = zip(row.groups, placed, strict=True)
        degrees = [f"{g.group} {number(angle(a.value))}°" for g, (_, a) in named if a is not None]
        texts.append(f"{line(row.id)}: {', '.join(degrees)}")
        crossed = [height + shift for height, each in enumerate(row.groups) if each.silent]
        axes.plot([90.0] * len(crossed), crossed, "x", color=colour, ms=8, mew=2.2)
    axes.set_xscale("log")
    axes.set_xlim(LEAST * 0.7, 260.0)
    axes.set_xticks(TICKS, ["≤ 0.001°", "0.01°", "0.1°", "1°", "10°", "90°"])
    axes.minorticks_off()
    rows_of(axes, [each.group for each in rows[0].groups])
    axes.set_xlabel("angle to the float32 reference's gradient (log)")
    legend_above(axes, 2, 0.4)
    return f"Angle to the reference's gradient. {'; '.join(texts)}"
