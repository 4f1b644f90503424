"""The sections of a report, in their order: one module each, named after its id.

A module that tells of an analysis has ``section(result, report)``; one that tells of the report
itself has ``of_report(report)``, ``of_tokens(report, tokens)`` or ``of_names(report, names)``. They
give one section, several, or None.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mismatch.analysis import registry
from mismatch.reports import summary
from mismatch.reports.formatting import TONES
from mismatch.reports.section import Page, Section
from mismatch.types import Report

if TYPE_CHECKING:
    import pandas as pd

    from mismatch.reports.elsewhere import Elsewhere

ORDER = (
    "headline", "causes", "explain", "normal", "square", "tokens", "patterns", "explorer", "where",
    "routing", "beside", "engines", "budget", "two_passes", "forecast", "kernels", "exact", "fixes",
    "corrections", "gradients", "checks", "ran",
)  # fmt: skip
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
    return Page(
        kind="train–inference check" + (f" · {created}" if created else ""),
        word=status,
        tone=TONES[status],
        reason=report.verdict.reason,
        title=summary.model_name(report),
        facts=(
            f"{comparison.rollout} against {comparison.train}",
            f"{summary.size(report)}; levels for {report.verdict.levels}",
            *(
                f"{question} {answer.status}: {answer.reason}"
                for question, answer in (
                    ("Is something broken?", report.verdict.correctness),
                    ("Will training bear it?", report.verdict.fitness),
                )
                if answer is not None
            ),
        ),
        sections=tuple(sections(report, tokens, names)),
        lead=summary.in_plain_words(report),
        steps=tuple(summary.next_steps(report)),
        command=summary.command(report),
    )


def sections(
    report: Report, tokens: pd.DataFrame | None = None, names: Elsewhere | None = None
) -> list[Section]:
    """Every section that this report has; analyses without a place in ORDER come last."""
    ids = [*ORDER, *(id for id in report.analyses if id not in ORDER)]
    shown: list[Section] = []
    for id in ids:
        made = _sections(id, report, tokens, names)
        shown += made if isinstance(made, tuple) else [made] if made else []
    return shown


def _sections(
    id: str, report: Report, tokens: pd.DataFrame | None, names: Elsewhere | None
) -> Sections:
    place, _, name = registry.section_of(id).partition(":")
    module = import_module(place)
    made: Sections = None
    if not name and hasattr(module, "of_report"):
        made = module.of_report(report)
    elif not name and hasattr(module, "of_names"):
        made = module.of_names(report, names)
    elif not name and hasattr(module, "of_tokens"):
        made = None if tokens is None else module.of_tokens(report, tokens)
    elif (result := report.result(id)) is not None:
        made = getattr(module, name or "section")(result, report)
    return made
