"""Pictures of a gradient check: direction per parameter group, and length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mismatch.experiments.gradients.analysis import KINDS
from mismatch.experiments.gradients.sentences import angle, main_loss, silent
from mismatch.experiments.gradients.types import GradientCheck, GradientRow, GroupError
from mismatch.reports.figures import Picture
from mismatch.reports.svg import ACCENT, FAINT, INK, SECOND, drawing, to_svg
from mismatch.reports.text import line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (ACCENT, SECOND, INK, FAINT)
MARKERS = ("o", "s", "D", "^")
MOST = 4  # gradients in the picture of groups
LEAST = 1e-3  # degrees: what is nearer is drawn there
TICKS = (1e-3, 1e-2, 0.1, 1.0, 10.0, 90.0)


def pictures(made: GradientCheck) -> list[Picture]:
    """Those that the rows of one loss allow."""
    loss = main_loss(made)
    rows = [row for row in made.rows if row.loss == loss and not row.same_as]
    drawn = [_directions(chosen(rows)), _lengths(rows)]
    return [one for one in drawn if one is not None]


def chosen(rows: Sequence[GradientRow]) -> list[GradientRow]:
    """As many as can be told apart: the trainer, its nearest fixes and correction, then others."""

    def off(row: GradientRow) -> float:
        return math.inf if row.error_ratio is None else row.error_ratio.value

    kinds = {kind: sorted((r for r in rows if r.kind == kind), key=off) for kind in KINDS}
    nearest = [*kinds["baseline"], *kinds["fix"][:2], *kinds["correction"][:1]]
    others = [row for kind in ("ratio", "fix", "correction") for row in kinds[kind]]
    return [*nearest, *(row for row in others if row not in nearest)][:MOST]


def _directions(rows: Sequence[GradientRow]) -> Picture | None:
    if not rows:
        return None
    groups = [one.group for one in rows[0].groups]
    with drawing(6.0, 1.3 + 0.42 * len(groups)) as (figure, axes):
        step = 0.6 / max(1, len(rows))
        for index, row in enumerate(rows):
            shift = (index - (len(rows) - 1) / 2) * step
            _points(axes, row.groups, shift, COLOURS[index], MARKERS[index], line(row.id))
        axes.set_xscale("log")
        axes.set_xlim(LEAST * 0.7, 260.0)
        axes.set_xticks(TICKS, ["≤ 0.001°", "0.01°", "0.1°", "1°", "10°", "90°"])
        axes.minorticks_off()
        axes.set_yticks(range(len(groups)), groups)
        axes.set_ylim(len(groups) - 0.4, -0.6)
        axes.grid(axis="x")
        axes.grid(False, axis="y")
        axes.set_xlabel("angle to the float32 reference's gradient (log)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2)
        svg = to_svg(figure, "gradient-directions", "Angle to the reference's gradient, by group")
    return Picture(
        "gradient-directions",
        "Direction, by group of parameters",
        "Further left is nearer to the reference; lines are 95 % intervals over prompts. At 90° "
        "the two have nothing in common. A cross there: no gradient arrives where one should.",
        svg,
    )


def _points(
    axes: Axes, groups: Sequence[GroupError], shift: float, colour: str, marker: str, label: str
) -> None:
    placed, crossed = [], []
    for place, one in enumerate(groups):
        if silent(one):
            crossed.append(place + shift)
        if one.cosine is None:
            continue
        placed.append((max(LEAST, angle(one.cosine.value)), place + shift))
        if one.cosine.low is not None and one.cosine.high is not None:
            ends = [max(LEAST, angle(end)) for end in (one.cosine.high, one.cosine.low)]
            axes.plot(ends, [place + shift] * 2, color=colour, lw=1.2)
    axes.plot(
        [x for x, _ in placed], [y for _, y in placed], marker, color=colour, ms=5, label=label
    )
    axes.plot([90.0] * len(crossed), crossed, "x", color=colour, ms=8, mew=2.2)


def _lengths(rows: Sequence[GradientRow]) -> Picture | None:
    shown = [(row, ratio) for row in rows if (ratio := row.whole.norm_ratio) is not None]
    if not shown:
        return None
    with drawing(6.0, 1.1 + 0.3 * len(shown)) as (figure, axes):
        axes.axvline(1.0, color=FAINT, lw=1, dashes=(4, 3))
        for place, (row, ratio) in enumerate(shown):
            colour = SECOND if row.kind == "correction" else ACCENT
            if ratio.low is not None and ratio.high is not None:
                axes.plot([ratio.low, ratio.high], [place, place], color=colour, lw=2)
            axes.plot([ratio.value], [place], "o", color=colour, ms=6)
        axes.set_yticks(range(len(shown)), [line(row.id) for row, _ in shown])
        axes.set_ylim(len(shown) - 0.4, -0.6)
        ends = [
            end for _, one in shown for end in (one.low, one.value, one.high) if end is not None
        ]
        reach = max(0.02, *(abs(end - 1.0) for end in ends))
        axes.set_xlim(1.0 - 1.15 * min(reach, 0.95), 1.0 + 1.15 * min(reach, 4.0))
        axes.grid(axis="x")
        axes.grid(False, axis="y")
        axes.set_xlabel("length of the gradient over the reference's")
        svg = to_svg(figure, "gradient-lengths", "Length of the gradient over the reference's")
    return Picture(
        "gradient-lengths",
        "Length",
        "Dots with 95 % intervals over prompts; the dashed line is the reference. Corrections, in "
        "the other colour, may shorten the gradient on purpose.",
        svg,
    )
