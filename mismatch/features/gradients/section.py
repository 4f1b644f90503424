"""The policy gradient of one batch, next to that of the trainer in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from mismatch.features.gradients.plan import BASELINE, REWARDS
from mismatch.features.gradients.results import GradientCheck, GradientRow, GroupGradient
from mismatch.reports.formatting import count, line, number, plural, text
from mismatch.reports.section import Cell, Cells, Column, Figure, Section, Table, not_tested
from mismatch.reports.svg import ACCENT, FAINT, INK, SECOND, legend_above, rows_of
from mismatch.types import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAD = (
    "The policy gradient of one batch, taken by the trainer and its fixes, and that of the "
    "trainer in float32 on the same tokens. Every token weighs the same. One batch, no training."
)
EXACT = (
    "The numbers are exact for this batch, so they have no interval; another batch gives others."
)


def angle(cosine: float) -> float:
    """Return degrees.

    >>> angle(0.0), angle(1.0)
    (90.0, 0.0)
    """
    return math.degrees(math.acos(cosine))


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


def cosine(value: float) -> str:
    """Write a cosine with the digits that its distance from 1 needs.

    >>> cosine(0.8), cosine(0.99987), cosine(1.0), cosine(1 - 3e-9)
    ('0.800', '0.99987', '1', '1 - 3e-9')
    """
    gap = 1.0 - value
    if gap == 0.0:
        return "1"
    if gap < 1e-6:
        return f"1 - {gap:.0e}".replace("e-0", "e-")
    digits = 3
    while digits < 8 and gap < 10.0 ** (1 - digits):
        digits += 1
    return f"{value:.{digits}f}"


COLUMNS = (
    Column("gradient", text),
    Column("off", degrees, detail="angle to the reference's"),
    Column("cosine", cosine, 3),
    Column("length", number, 1, detail="of the reference's"),
)


def section(result: GradientCheck, report: Report) -> Section:
    """Return the trainer and its fixes in a table, and each group of parameters in another."""
    size = f"{plural(result.prompts, 'prompt')}, {plural(result.sequences, 'sample')}"
    given = result.advantages == REWARDS
    advantages = "rewards, normalised within each prompt" if given else result.advantages
    batch = f"{size}, {plural(result.tokens, 'action token')}; advantages: {advantages}"
    lines = [
        (
            Cell(row.id, "code", row.label),
            Cell(row.whole.cosine, "strong"),
            row.whole.cosine,
            row.whole.norm_ratio,
        )
        for row in result.rows
    ]
    columns = [Column(each.group, degrees) for each in result.rows[0].groups]
    by_group: list[Cells] = [(row.id, *map(_group, row.groups)) for row in result.rows]
    groups = Section(
        "gradients-groups",
        "By group of parameters",
        "Angle between each group's part of the gradient and the reference's.",
        tables=(Table((Column("gradient", text), *columns), by_group),),
        page_only=True,
    )
    baseline = result.row(BASELINE)
    arc = None if baseline is None else baseline.whole.cosine
    return Section(
        id="gradients",
        title="Gradients",
        lead=f"{LEAD} {batch}.",
        tables=(Table(COLUMNS, lines),),
        figures=(
            Figure(
                "gradient-directions",
                "Direction, by group of parameters",
                "Further left is nearer to the reference. At 90° the two have nothing in common. "
                "A cross there: no gradient arrives where the reference has one.",
                partial(_directions, result.rows[:MOST]),
                (6.0, 1.3 + 0.42 * len(result.rows[0].groups)),
            ),
        ),
        notes=(*notes(result), *not_tested(result.not_tested)),
        parts=(groups,),
        short="" if arc is None else f"the trainer's points {degrees(arc)} away from float32's",
        first=True,
    )


def notes(check: GradientCheck) -> list[str]:
    """Return what has to be known before the table is believed."""
    texts = [
        f"{fix}: the gradient of {row}, of the same settings." for fix, row in check.same.items()
    ]
    if check.advantages != REWARDS:
        texts.append(
            "The rewards give no advantages, so seeded signs replace them: no task steered this "
            "gradient. It still shows the effect of kernels and dtypes."
        )
    elif check.deciding < check.prompts:
        texts.append(
            f"{count(check.deciding)} of {plural(check.prompts, 'prompt')} have samples of "
            "different reward; the others have no gradient."
        )
    return [*texts, EXACT]


def _group(group: GroupGradient) -> Cell:
    if group.silent:
        return Cell("no gradient", "critical", format=text)
    return Cell(group.cosine)


# ---------------------------------------------------------------- figure


COLOURS = (ACCENT, SECOND, INK, FAINT)
MARKERS = ("o", "s", "D", "^")
MOST = 4  # gradients in the picture of groups
LEAST = 1e-3  # degrees: what is nearer is drawn there
TICKS = (1e-3, 1e-2, 0.1, 1.0, 10.0, 90.0)


def _directions(rows: Sequence[GradientRow], axes: Axes) -> str:
    step, texts = 0.6 / len(rows), []
    for index, row in enumerate(rows):
        shift = (index - (len(rows) - 1) / 2) * step
        colour, marker = COLOURS[index], MARKERS[index]
        angles = [
            (height + shift, group.group, angle(group.cosine))
            for height, group in enumerate(row.groups)
            if group.cosine is not None
        ]
        x, y = [max(LEAST, arc) for _, _, arc in angles], [at for at, _, _ in angles]
        axes.plot(x, y, marker, color=colour, ms=5, label=line(row.id))
        named = ", ".join(f"{group} {number(arc)}°" for _, group, arc in angles)
        texts.append(f"{line(row.id)}: {named}")
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
