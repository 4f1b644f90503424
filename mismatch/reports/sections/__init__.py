"""The sections of a report, in their order.

:data:`CHAPTERS` has the order, :data:`OF_REPORT` the sections of the report itself. An analysis
names the section of its result (:class:`mismatch.plugins.Analysis`), imported where it is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mismatch.analysis import plugins
from mismatch.analysis.validity import in_words, validity
from mismatch.attempts import Attempts
from mismatch.plugins import load
from mismatch.reports import summary
from mismatch.reports.formatting import TONES, capital, line
from mismatch.reports.section import Page, Section
from mismatch.reports.sections import breakdowns, explorer, headline, noise, passes, ran
from mismatch.reports.sections import tokens as by_token
from mismatch.types import Report

if TYPE_CHECKING:
    import pandas as pd

Sections = Section | tuple[Section, ...] | None
# Chapters in their order: id, title, the sections in each.
CHAPTERS = (
    ("normal-or-not", "Is this normal?", ("headline", "valid", "noise", "two_passes", "exact-kl")),
    ("place", "Where does it sit?", ("tokens", "breakdowns")),
    ("why", "Why?", ("causes", "square", "long_sequence", "explain", "variants")),
    ("helps", "What helps?", ("fixes",)),
    ("token-by-token", "Token by token", ("explorer",)),
    ("experts", "Expert routing", ("routing",)),
    ("unseen", "Checks, and what was not tested", ("checks",)),
    ("reproduce", "Reproduce", ("ran", "glossary")),
)
# Of a report, its tokens (None: there is no table of them) and the framework that was asked for.
OF_REPORT: dict[str, Callable[[Report, pd.DataFrame | None, str | None], Sections]] = {
    "valid": lambda report, *_: headline.valid(report),
    "headline": lambda report, tokens, framework: headline.section(report, framework),
    "noise": lambda report, *_: noise.section(report),
    "exact-kl": lambda report, *_: passes.exact(report),
    "tokens": lambda report, tokens, _: by_token.section(report, tokens),
    "breakdowns": lambda report, *_: breakdowns.section(report),
    "variants": lambda report, *_: passes.variants(report),
    "explorer": lambda report, tokens, _: explorer.section(report, tokens),
    "routing": lambda report, *_: (  # None of a dense model
        load(f"{__name__}.routing:section")(report) if summary.headline(report).routing else None
    ),
    "checks": lambda report, *_: headline.checks(report),
    "ran": lambda report, *_: ran.section(report),
    "glossary": lambda *_: ran.glossary(),
}


def page(
    report: Report,
    tokens: pd.DataFrame | None = None,
    framework: str | None = None,
    attempts: Attempts | None = None,
) -> Page:
    """Return the report as every renderer shows it; a section that raises is left out and named.

    Args:
        attempts: keeps what raised.
        tokens: the tokens table; None: no section that needs one.
        framework: whose names of the metrics are shown next to ours; None: in no separate table.
    """
    attempts = attempts or Attempts()
    comparison, status = summary.headline(report), report.verdict.status
    created = str(report.run.get("created", ""))[:16].replace("T", " ")  # UTC, as runs note it
    shown = chapters(report, tokens, framework, attempts)
    parts = [part for chapter in shown for part in chapter.parts]
    warnings = [text for part in parts for text in part.warnings]
    read = report, warnings
    first = {part.title: f"{capital(part.short)}." for part in parts if part.first and part.short}
    return Page(
        kind="train–inference check",
        word=status,
        tone=TONES[status],
        reason=report.verdict.reason,
        title=summary.model_name(report),
        facts=(
            f"rollout {comparison.rollout}, trainer {comparison.train}"
            if comparison.sampled_by_left
            else f"{comparison.rollout} against {comparison.train}",
            *(line(check.detail) for check in report.checks if check.id == "whole-model"),
            f"{summary.size(report)}; levels for {report.verdict.levels}",
            *summary.trainer_code(report),
            in_words(validity(report)),
        ),
        sections=tuple(shown),
        lead=attempts.make("lead", headline.lead, report, otherwise=""),
        answers=attempts.make("answers", headline.answers, *read, first, otherwise=()),
        table=headline.table(summary.most_telling(report)),
        asked=headline.names_there(report, framework),
        steps=tuple(attempts.make("next steps", summary.next_steps, report, otherwise=[])),
        command=summary.command(report),
        made=f"{created} UTC" if created else "",
    )


def chapters(
    report: Report,
    tokens: pd.DataFrame | None = None,
    framework: str | None = None,
    attempts: Attempts | None = None,
) -> list[Section]:
    """Return every section of this report in its chapter; analyses without a place come last."""
    attempts = attempts or Attempts()
    added = [each for each in plugins.analyses() if each.section]
    order = [
        (id, title, (*ids, *(each.id for each in added if each.chapter == id)))
        for id, title, ids in CHAPTERS
    ]
    placed = {id for _, _, ids in order for id in ids}
    order.append(("more", "Also measured", tuple(id for id in report.analyses if id not in placed)))
    shown = []
    for chapter, title, ids in order:
        parts: list[Section] = []
        for id in dict.fromkeys(ids):
            asked = id, report, tokens, framework
            made = attempts.make(f"section {id}", _sections, *asked, otherwise=None)
            parts += made if isinstance(made, tuple) else [made] if made else []
        if parts:
            shown.append(Section(chapter, title, parts=parts))
    return shown


def _sections(
    id: str, report: Report, tokens: pd.DataFrame | None, framework: str | None
) -> Sections:
    if id in OF_REPORT:
        return OF_REPORT[id](report, tokens, framework)
    result = report.result(id)
    if result is None:
        return None
    named = (each for each in plugins.analyses() if each.id == id)
    shown: Sections = next(named).call("section", result, report)
    return shown
