"""The sections of a report, in their order.

``section(result, report)`` in the module of an analysis's id shows its result; one in
:data:`CHAPTERS` says ``module:function`` where several share a module. Those that show the report
itself ask by the names of their parameters for ``report``, ``tokens`` or ``framework``. They give
one section, several, or None.
"""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING

from mismatch.analysis import plugins
from mismatch.reports import summary
from mismatch.reports.formatting import TONES
from mismatch.reports.section import Page, Section
from mismatch.reports.sections import headline
from mismatch.types import Report

if TYPE_CHECKING:
    import pandas as pd


# Chapters in their order: id, title, the sections in each.
CHAPTERS = (
    (
        "normal-or-not",
        "Is this normal?",
        ("headline", "noise", "passes:two_passes", "passes:exact"),
    ),
    ("place", "Where does it sit?", ("tokens", "breakdowns")),
    ("why", "Why?", ("causes", "square", "causes:explain", "locate",
                     "passes:variants")),
    ("helps", "What helps?", ("fixes",)),
    ("token-by-token", "Token by token", ("explorer",)),
    ("experts", "Expert routing", ("routing",)),
    ("unseen", "Checks, and what was not tested", ("headline:checks",)),
    ("reproduce", "Reproduce", ("ran", "ran:glossary")),
)  # fmt: skip
Sections = Section | tuple[Section, ...] | None


def page(report: Report, tokens: pd.DataFrame | None = None, framework: str | None = None) -> Page:
    """The report as every renderer shows it.

    Args:
        tokens: the tokens table; None: no section that needs one.
        framework: whose names of the metrics are shown beside ours; None: in no table of their own.
    """
    comparison, status = summary.headline(report), report.verdict.status
    created = report.run.get("created", "")
    shown = chapters(report, tokens, framework)
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
            *summary.trainer_code(report),
        ),
        sections=tuple(shown),
        lead=headline.lead(report),
        answers=headline.answers(report, warnings),
        table=headline.table(summary.most_telling(report)),
        asked=headline.names_there(report, framework),
        steps=tuple(summary.next_steps(report)),
        command=summary.command(report),
    )


def chapters(
    report: Report, tokens: pd.DataFrame | None = None, framework: str | None = None
) -> list[Section]:
    """Every section of this report in its chapter; analyses without a place come last."""
    placed = {entry.rpartition(":")[2] for _, _, places in CHAPTERS for entry in places}
    of_features = {id: plugins.in_chapter(id) for id, _, _ in CHAPTERS}
    elsewhere = placed.union(*of_features.values())
    rest = ("more", "Also measured", tuple(id for id in report.analyses if id not in elsewhere))
    shown = []
    for id, title, ids in (*CHAPTERS, rest):
        added = tuple(each for each in of_features.get(id, ()) if each not in placed)
        parts = tuple(
            part for each in (*ids, *added) for part in _sections(each, report, tokens, framework)
        )
        if parts:
            shown.append(Section(id, title, parts=parts))
    return shown


def sections(
    report: Report, tokens: pd.DataFrame | None = None, framework: str | None = None
) -> list[Section]:
    """The same without chapters."""
    return [part for chapter in chapters(report, tokens, framework) for part in chapter.parts]


def _sections(
    entry: str, report: Report, tokens: pd.DataFrame | None, framework: str | None
) -> tuple[Section, ...]:
    module, _, id = entry.rpartition(":")
    ours = f"{__name__}.{module or id}:{id if module else 'section'}"
    home, _, name = (plugins.section_of(id) or ours).partition(":")
    make = getattr(import_module(home), name)
    shown: Sections = None
    if (result := report.result(id)) is not None:
        shown = make(result, report)
    elif "result" not in (wanted := signature(make).parameters):
        given = {"report": report, "tokens": tokens, "framework": framework}
        if tokens is not None or "tokens" not in wanted:
            shown = make(*(given[name] for name in wanted))
    return shown if isinstance(shown, tuple) else (shown,) if shown else ()
