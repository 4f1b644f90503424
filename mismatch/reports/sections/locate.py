"""Where the sides part: sources first, then every module, then errors over the layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from mismatch.experiments.locate.judge import (
    is_other,
    judge,
    other_than_the_run,
    place_of,
    sentence,
)
from mismatch.experiments.locate.types import TITLES, Group, Location, SideLocation, SiteError
from mismatch.reports.formatting import line, number, percent, plural, text
from mismatch.reports.section import Cell, Column, Figure, Section, Table, Tone, Value
from mismatch.reports.svg import ACCENT, FAINT, INK, SECOND, legend_above, ticks
from mismatch.types import Report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

LEAD = (
    "Every module of each side ran beside the float32 reference. New is what a module adds to what "
    "the reference's module gives on the same input; a source adds more than four times what a "
    "plain forward in the same dtype does there. What it explains is measured: its new error alone "
    "is put into the reference; then all others are, and it is left out."
)
GROUPS = (
    Column("side", text),
    Column("source", text),
    Column("excess", number, 1, detail="new error over what the precision costs there"),
    Column("explains", percent, detail="of the side's squared distance from float32"),
    Column("moves", percent, 2, detail="the end by itself, over that distance"),
    Column("goes with it", percent, 1, detail="of its mean distance"),
)
SITES = (
    Column("layer", text),
    Column("module", text),
    Column("error", number, detail="of its output, relative"),
    Column("new", number, detail="on the same input"),
    Column("cost", number, 2, detail="new in a plain forward of the dtype"),
    Column("excess", number, 1),
    Column("gain", number, 2, detail="of errors that enter"),
    Column("cosine", number, 3),
    Column("routing flips", percent, 3, detail="share of tokens"),
    Column("", text, 1),
)
PICTURED = ("attention", "router", "mlp", "residual")
STYLES = {"attention": "--", "router": ":", "mlp": "-.", "residual": "-"}


def section(result: Location, report: Report | None = None) -> Section:
    """Sources and what they explain, then a part for each side."""
    told = tuple(sentences(result))
    rows = tuple(_row(side, group) for side in result.sides for group in side.groups)
    return Section(
        id="locate",
        title="Module by module",
        lead=LEAD,
        sentences=told,
        tables=(Table(GROUPS, rows),),
        figures=tuple(_figures(result)),
        notes=tuple(f"Not tested: {line(str(one))}" for one in result.not_tested),
        parts=tuple(_part(side) for side in result.sides),
        short=judge(result).reason,
    )


def sentences(result: Location) -> Iterator[str]:
    """One of each side, and what the reference is."""
    for side in result.sides:
        if side.source is not None:
            yield f"{line(sentence(side))}."
        else:
            yield (
                f"{line(side.name)}: no module errs beyond what {side.dtype} costs; mean distance "
                f"{number(side.distance)} nats"
                + (
                    f", a plain forward {number(side.plain_distance)}."
                    if side.plain_distance is not None
                    else "."
                )
            )
        if is_other(side):
            yield f"{line(other_than_the_run(side))}."
        if side.reverted is not None and side.source is not None:
            yield (
                f"With the reference's output at the {place_of(side.source)}, {line(side.name)} "
                f"itself loses {percent(side.reverted)} of its distance."
            )
        for pair in side.pairs:
            names = " and the ".join(place_of(side.groups[n]) for n in (pair.first, pair.second))
            yield (
                f"Without the {names} together {percent(pair.removed)} of the distance of "
                f"{line(side.name)} goes; interaction {percent(pair.interaction)}."
            )
    size = f"{plural(result.tokens, 'action token')} of {plural(len(result.sequences), 'sequence')}"
    yield (
        f"The reference holds the trainer's weights ({line(result.model)}): where the engine's "
        f"differ, its module is named, whichever of the two is right. {size}."
    )


def _row(side: SideLocation, group: Group) -> tuple[Cell | Value, ...]:
    tone: Tone = "critical" if side.source is group else ""
    place = Cell(place_of(group), tone)
    return side.name, place, group.excess, group.explains, group.moves, group.removed


def _part(side: SideLocation) -> Section:
    held = (
        f"On these tokens it gives what the run recorded within {number(side.held)} nats (mean)."
        if side.held is not None
        else "The run has no scoring of this side to hold it against."
    )
    return Section(
        f"locate-{side.role}",
        f"Modules of {line(side.name)}",
        sentences=(held,),
        tables=(Table(SITES, tuple(_site(one) for one in side.sites)),),
        short=f"{plural(len(side.sites), 'module')}, largest excess first in "
        f"{_largest(side.sites)}",
    )


def _largest(sites: Sequence[SiteError]) -> str:
    first = max(sites, key=lambda one: one.excess, default=None)
    return "none" if first is None else first.place.key


def _site(one: SiteError) -> tuple[Cell | Value, ...]:
    tone: Tone = "critical" if one.role == "source" else "warn" if one.role == "amplifier" else ""
    layer = "" if one.layer is None else str(one.layer)
    return (
        layer, TITLES[one.site], one.error, one.new, one.cost, one.excess, one.gain, one.cosine,
        one.other_experts, Cell(one.role, tone),
    )  # fmt: skip


# ---------------------------------------------------------------- figures


def _figures(result: Location) -> Iterable[Figure]:
    sides = [side for side in result.sides if any(one.layer is not None for one in side.sites)]
    if sides and result.layers > 1:
        yield Figure(
            "locate-layers",
            "Errors over the layers",
            "Relative error of attention, router, experts or MLP and of the residual stream behind "
            "each layer, both sides against float32. A step is a source; a steady climb is "
            "rounding that is passed on.",
            partial(_drawn, sides),
            (6.0, 3.0),
        )


def _drawn(sides: Sequence[SideLocation], axes: Axes) -> str:
    told = []
    for index, side in enumerate(sides):
        for name in PICTURED:
            points = [
                (one.layer, one.error)
                for one in side.sites
                if one.site == name and one.layer is not None and one.error > 0
            ]
            if points:
                label = f"{line(side.name)}: {TITLES[name]}"
                ends = [f"{number(e)} at layer {at}" for at, e in (points[0], points[-1])]
                told.append(f"{label} {' to '.join(ends)}")
                axes.plot(
                    *zip(*points, strict=True),
                    color=(ACCENT, SECOND, FAINT, INK)[index % 4],
                    linestyle=STYLES[name],
                    marker="o",
                    markersize=3,
                    label=label,
                )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    layers = [one.layer for side in sides for one in side.sites if one.layer is not None]
    ticks(axes.xaxis, range(1 + max(layers)))
    axes.set_xlabel("layer")
    axes.set_ylabel("relative error (log)")
    legend_above(axes, 2)
    return f"Errors of modules over the layers: {'; '.join(told)}"
