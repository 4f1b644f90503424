"""The sections of a report, in their order: one module each, named after its id.

A module that tells of an analysis has ``section(result, report)``; one that tells of the report
itself has ``of_report(report)``, which gives None where there is nothing to show.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from mismatch.analysis import registry
from mismatch.reports.section import Section
from mismatch.types import Report

ORDER = (
    "square", "where", "beside", "engines", "budget", "two_passes", "forecast", "exact",
    "corrections",
)  # fmt: skip


def sections(report: Report) -> list[Section]:
    """Every section that this report has; analyses without a place in ORDER come last."""
    ids = [*ORDER, *(id for id in report.analyses if id not in ORDER)]
    found = [_section(id, report) for id in ids]
    return [section for section in found if section is not None]


def _section(id: str, report: Report) -> Section | None:
    place, _, name = registry.section_of(id).partition(":")
    if not name and find_spec(place) is None:  # told elsewhere
        return None
    module = import_module(place)
    if not name and hasattr(module, "of_report"):
        made: Section | None = module.of_report(report)
        return made
    result = report.result(id)
    if result is None:
        return None
    section: Section = getattr(module, name or "section")(result, report)
    return section
