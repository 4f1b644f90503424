"""The sections of a report, in their order: one module each, named after its id.

A module that tells of an analysis has ``section(result, report)``; one that tells of the report
itself has ``of_report(report)`` or ``of_tokens(report, tokens)``. None: there is nothing to show.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from mismatch.analysis import registry
from mismatch.reports.section import Section
from mismatch.types import Report

if TYPE_CHECKING:
    import pandas as pd

ORDER = (
    "causes", "tokens", "where", "routing", "beside", "engines", "budget", "two_passes", "forecast",
    "kernels", "exact", "fixes", "corrections", "gradients",
)  # fmt: skip


def sections(report: Report, tokens: pd.DataFrame | None = None) -> list[Section]:
    """Every section that this report has; analyses without a place in ORDER come last.

    Args:
        tokens: the tokens table; None: no section that needs one.
    """
    ids = [*ORDER, *(id for id in report.analyses if id not in ORDER)]
    shown = [_section(id, report, tokens) for id in ids]
    return [section for section in shown if section is not None]


def _section(id: str, report: Report, tokens: pd.DataFrame | None) -> Section | None:
    place, _, name = registry.section_of(id).partition(":")
    if not name and find_spec(place) is None:  # told elsewhere
        return None
    module = import_module(place)
    section: Section | None
    if not name and hasattr(module, "of_report"):
        section = module.of_report(report)
    elif not name and hasattr(module, "of_tokens"):
        section = None if tokens is None else module.of_tokens(report, tokens)
    else:
        result = report.result(id)
        section = None if result is None else getattr(module, name or "section")(result, report)
    return section
