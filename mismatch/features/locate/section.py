"""Where the sides part: sources first, then every module."""

from __future__ import annotations

from collections.abc import Iterator

from mismatch.features.locate.judge import judge, other_than_the_run, sentence
from mismatch.features.locate.results import TITLES, Group, Location, SideLocation
from mismatch.reports.formatting import line, number, percent, plural, text
from mismatch.reports.section import Cell, Column, Section, Table, not_tested
from mismatch.types import Report

LEAD = (
    "Every module of each side is compared with the float32 reference on the same input. “New” is "
    "the error that the module itself adds. A source adds over four times what a plain forward in "
    "the same dtype adds there. What a source explains is measured twice: the reference with its "
    "error alone, and the reference with the errors of all other modules."
)


def _source(row: tuple[SideLocation, Group]) -> Cell:
    side, group = row
    return Cell(group.place, "critical" if side.source is group else "")


OVER_COST, OF_SQUARES = "new error over what the precision costs", "of the squared distance"
GROUPS = (
    Column("side", text, of=lambda row: row[0].name),
    Column("source", text, of=_source),
    Column("excess", number, 1, detail=OVER_COST, of=lambda row: row[1].excess),
    Column("explains", percent, detail=OF_SQUARES, of=lambda row: row[1].explains),
    Column("moves", percent, 2, detail="the end by itself", of=lambda row: row[1].moves),
    Column("gone without it", percent, 1, detail="of the distance", of=lambda row: row[1].removed),
)
SITES = (
    Column("layer", text, of=lambda site: "" if site.layer is None else str(site.layer)),
    Column("module", text, of=lambda site: TITLES[site.site]),
    Column("error", detail="of its output, relative", of="error"),
    Column("new", detail="on the same input", of="new"),
    Column("cost", number, 2, detail="new in a plain forward of the dtype", of="cost"),
    Column("excess", number, 1, of="excess"),
    Column("", text, 1, of=lambda site: Cell(site.role, "critical" * (site.role == "source"))),
)


def section(result: Location, report: Report | None = None) -> Section:
    """Return sources and what they explain, then a part for each side."""
    groups = [(side, group) for side in result.sides for group in side.groups]
    return Section(
        "locate",
        "Module by module",
        LEAD,
        sentences=[*sentences(result)],
        tables=[Table.of(GROUPS, groups)],
        notes=not_tested(result.not_tested),
        parts=[_part(side) for side in result.sides],
        short=judge(result).reason,
    )


def sentences(result: Location) -> Iterator[str]:
    """Give a sentence for each side, and what the reference is."""
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
        if side.is_other:
            yield f"{line(other_than_the_run(side))}."
    size = f"{plural(result.tokens, 'action token')} of {plural(len(result.sequences), 'sequence')}"
    yield (
        f"The reference holds the trainer's weights ({line(result.model)}): where the engine's "
        f"differ, its module is named, whichever of the two is right. {size}."
    )


def _part(side: SideLocation) -> Section:
    first = max(side.sites, key=lambda site: site.excess, default=None)
    largest = "none" if first is None else first.location.key
    return Section(
        f"locate-{side.role}",
        f"Modules of {line(side.name)}",
        tables=[Table.of(SITES, side.sites)],
        short=f"{plural(len(side.sites), 'module')}, largest excess first in {largest}",
    )
