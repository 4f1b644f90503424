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
from mismatch.reports.section import Cell, Column, Figure, Section, Table, Tone, not_tested
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


def _tone(site: SiteError) -> Tone:
    return "critical" if site.role == "source" else "warn" if site.role == "amplifier" else ""


def _source(row: tuple[SideLocation, Group]) -> Cell:
    side, group = row
    return Cell(place_of(group), "critical" if side.source is group else "")


GROUPS = (
    Column("side", text, of=lambda row: row[0].name),
    Column("source", text, of=_source),
    Column(
        "excess", number, 1, detail="new error over what the precision costs there",
        of=lambda row: row[1].excess,
    ),
    Column(
        "explains", percent, detail="of the side's squared distance from float32",
        of=lambda row: row[1].explains,
    ),
    Column(
        "moves", percent, 2, detail="the end by itself, over that distance",
        of=lambda row: row[1].moves,
    ),
    Column(
        "goes with it", percent, 1, detail="of its mean distance", of=lambda row: row[1].removed
    ),
)  # fmt: skip
SITES = (
    Column("layer", text, of=lambda site: "" if site.layer is None else str(site.layer)),
    Column("module", text, of=lambda site: TITLES[site.site]),
    Column("error", detail="of its output, relative", of="error"),
    Column("new", detail="on the same input", of="new"),
    Column("cost", number, 2, detail="new in a plain forward of the dtype", of="cost"),
    Column("excess", number, 1, of="excess"),
    Column("gain", number, 2, detail="of errors that enter", of="gain"),
    Column("cosine", number, 3, of="cosine"),
    Column("routing flips", percent, 3, detail="share of tokens", of="other_experts"),
    Column("", text, 1, of=lambda site: Cell(site.role, _tone(site))),
)
PICTURED = ("attention", "router", "mlp", "residual")
COLOURS = (ACCENT, SECOND, FAINT, INK)
STYLES = {"attention": "--", "router": ":", "mlp": "-.", "residual": "-"}


def section(result: Location, report: Report | None = None) -> Section:
    """Sources and what they explain, then a part for each side."""
    groups = [(side, group) for side in result.sides for group in side.groups]
    return Section(
        "locate",
        "Module by module",
        LEAD,
        sentences=[*sentences(result)],
        tables=[Table.of(GROUPS, groups)],
        figures=[*_figures(result)],
        notes=not_tested(result.not_tested),
        parts=[_part(side) for side in result.sides],
        short=judge(result).reason,
    )


def sentences(result: Location) -> Iterator[str]:
    """One of each side, and what the reference is."""
    for side in result.sides:
        if side.source is not None:
            yield f"{line(sentence(side))}."
        else:
            plain = side.plain_distance
            yield (
                f"{line(side.name)}: no module errs beyond what {side.dtype} costs; mean distance "
                f"{number(side.distance)} nats"
                f"{'' if plain is None else f', a plain forward {number(plain)}'}."
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


def _part(side: SideLocation) -> Section:
    held = "The run has no scoring of this side to hold it against."
    if side.held is not None:
        held = (
            "On these tokens it gives what the run recorded within "
            f"{number(side.held)} nats (mean)."
        )
    first = max(side.sites, key=lambda site: site.excess, default=None)
    largest = "none" if first is None else first.location.key
    return Section(
        f"locate-{side.role}",
        f"Modules of {line(side.name)}",
        sentences=[held],
        tables=[Table.of(SITES, side.sites)],
        short=f"{plural(len(side.sites), 'module')}, largest excess first in {largest}",
    )


# ---------------------------------------------------------------- figures


def _figures(result: Location) -> Iterable[Figure]:
    sides = [side for side in result.sides if any(site.layer is not None for site in side.sites)]
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
    curves = []
    for index, side in enumerate(sides):
        for name in PICTURED:
            points = [
                (site.layer, site.error)
                for site in side.sites
                if site.site == name and site.layer is not None and site.error > 0
            ]
            if points:
                label = f"{line(side.name)}: {TITLES[name]}"
                ends = [f"{number(e)} at layer {at}" for at, e in (points[0], points[-1])]
                curves.append(f"{label} {' to '.join(ends)}")
                x, y = zip(*points, strict=True)
                colour, style = COLOURS[index % 4], STYLES[name]
                axes.plot(x, y, color=colour, ls=style, marker="o", ms=3, label=label)
    axes.set(yscale="log", xlabel="layer", ylabel="relative error (log)")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    layers = [site.layer for side in sides for site in side.sites if site.layer is not None]
    ticks(axes.xaxis, range(1 + max(layers)))
    legend_above(axes, 2)
    return f"Errors of modules over the layers: {'; '.join(curves)}"
