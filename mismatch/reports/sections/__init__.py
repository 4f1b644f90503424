"""The sections of a report, in their order: one module each; an analysis's has its id as name.

A module that tells of an analysis has ``section(result, report)``; one that tells of the report
itself has ``of_report(report)``, ``of_tokens(report, tokens)`` or ``of_names(report, names)``. They
give one section, several, or None.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mismatch.analysis import plugins
from mismatch.reports import summary
from mismatch.reports.formatting import TONES
from mismatch.reports.section import Page, Section
from mismatch.reports.sections import headline
from mismatch.reports.sections.first import answers, lead
from mismatch.types import Report

if TYPE_CHECKING:
    import pandas as pd

    from mismatch.reports.framework_values import Elsewhere

# Chapters in their order: id, title, the sections in each.
CHAPTERS = (
    (
        "normal-or-not",
        "Is this normal?",
        ("headline", "published_values", "two_passes", "exact", "forecast"),
    ),
    ("place", "Where does it sit?", ("tokens", "patterns", "breakdowns")),
    (
        "why",
        "Why?",
        ("causes", "square", "explain", "engines", "locate", "budget", "variants", "kernels"),
    ),
    ("helps", "What helps?", ("fixes", "corrections", "gradients")),
    ("token-by-token", "Token by token", ("explorer",)),
    ("experts", "Expert routing", ("routing",)),
    ("unseen", "Checks, and what was not tested", ("checks",)),
    ("reproduce", "Reproduce", ("ran", "glossary")),
)
Sections = Section | tuple[Section, ...] | None


def page(
    report: Report, tokens: pd.DataFrame | None = None, names: Elsewhere | None = None
) -> Page:
    """The report as every renderer shows it.

    Args:
        tokens: the tokens table; None: no section that needs one.
        names: what others call the metrics.
    """
    comparison, status = summary.headline(report), report.verdict.status
    created = report.run.get("created", "")
    shown = chapters(report, tokens, names)
    warnings = [text for chapter in shown for part in chapter.parts for text in part.warnings]
    return Page(
        kind="train–inference check" + (f" · {created}" if created else ""),
        word=status,
        tone=TONES[status],
        reason=report.verdict.reason,
        title=summary.model_name(report),
        facts=(
            f"{comparison.rollout} against {comparison.train}",
            f"{summary.size(report)}; levels for {report.verdict.levels}",
        ),
        sections=tuple(shown),
        lead=lead(report),
        answers=answers(report, warnings),
        table=headline.table(summary.most_telling(report)),
        asked=headline.names_there(report, names),
        steps=tuple(summary.next_steps(report)),
        command=summary.command(report),
    )


def chapters(
    report: Report, tokens: pd.DataFrame | None = None, names: Elsewhere | None = None
) -> list[Section]:
    """Every section of this report in its chapter; analyses without a place come last."""
    placed = {section for _, _, ids in CHAPTERS for section in ids}
    rest = ("more", "Also measured", tuple(id for id in report.analyses if id not in placed))
    shown = []
    for id, title, ids in (*CHAPTERS, rest):
        parts = tuple(part for each in ids for part in _sections(each, report, tokens, names))
        if parts:
            shown.append(Section(id, title, parts=parts))
    return shown


def sections(
    report: Report, tokens: pd.DataFrame | None = None, names: Elsewhere | None = None
) -> list[Section]:
    """The same without chapters."""
    return [part for chapter in chapters(report, tokens, names) for part in chapter.parts]


def _sections(
    id: str, report: Report, tokens: pd.DataFrame | None, names: Elsewhere | None
) -> tuple[Section, ...]:
    place, _, name = plugins.section_of(id).partition(":")
    module = import_module(place)
    shown: Sections = None
    if not name and hasattr(module, "of_report"):
        shown = module.of_report(report)
    elif not name and hasattr(module, "of_names"):
        shown = module.of_names(report, names)
    elif not name and hasattr(module, "of_tokens"):
        shown = None if tokens is None else module.of_tokens(report, tokens)
    elif (result := report.result(id)) is not None:
        shown = getattr(module, name or "section")(result, report)
    return shown if isinstance(shown, tuple) else (shown,) if shown else ()
