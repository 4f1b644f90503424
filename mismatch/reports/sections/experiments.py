"""Experiments: what they confirmed, what they ruled out."""

from __future__ import annotations

from mismatch.analysis.catalogue import title_of
from mismatch.analysis.cause_results import LITTLE
from mismatch.experiments.results import GONE, STAYS, Experiment, Explanation
from mismatch.reports.formatting import line, number, percent, plural, text
from mismatch.reports.section import Cell, Column, Section, Table
from mismatch.reports.sections.causes import outcome_cell
from mismatch.types import Report

LEAD = (
    "Each experiment takes some causes out of the run and measures what share of mean |delta| "
    f"that removes. Confirmed: over {percent(GONE)}, by the whole interval, and no other cause can "
    f"be the reason. Ruled out: under {percent(STAYS)}, and less than the cause would explain. "
    "Fixes of --fix come first, then the experiments of --explain."
)
EXPERIMENTS = (
    Column(
        "experiment",
        text,
        of=lambda each: Cell(each.id, "code", "" if each.same_tokens else "sampled again"),
    ),
    Column(
        "", text, detail="what it says", of=lambda each: outcome_cell(each.outcome, _measured(each))
    ),
    Column("side", text, 2, detail="at fault, if it confirms", of="side"),
    Column("gone", percent, interval=1, detail="share of mean |delta|", of="gone"),
    Column("seconds", number, 2, of="seconds"),
    Column("causes", text, 3, detail="that it takes out", of=lambda each: ", ".join(each.tests)),
)


def section(result: Explanation, report: Report) -> Section:
    """Return what was confirmed, what was ruled out, then every experiment."""
    texts = explained(result)
    table = Table.of(EXPERIMENTS, result.experiments)
    return Section(
        "explain",
        "Experiments",
        LEAD,
        sentences=texts,
        tables=[table],
        short=" ".join(texts),
    )


def explained(result: Explanation) -> list[str]:
    """Return a sentence each for what was confirmed, ruled out, and could not be made."""
    if not result.experiments:
        return ["No experiment was run: none could single out a suspected cause."]
    measured = len([each for each in result.experiments if each.seconds is not None])
    confirmed = "No cause was confirmed"
    if result.confirmed:
        confirmed = f"Confirmed: {_names(result.confirmed)}"
    return [
        f"{confirmed} ({plural(measured, 'experiment')}, {result.seconds:.0f} s).",
        *([f"Ruled out: {_names(result.ruled_out)}."] if result.ruled_out else ()),
        *(
            f"{line(each.id)} was not measured: {line(each.reason)}."
            for each in result.experiments
            if each.reason
        ),
    ]


def _names(ids: tuple[str, ...]) -> str:
    return "; ".join(f"{line(title_of(id)).rstrip('.').lower()} ({id})" for id in ids)


def _measured(experiment: Experiment) -> str:
    """Why it was not made, or what it measured in addition to the share that is gone."""
    if experiment.outcome == LITTLE:
        return "stated by a side, and the mismatch stays"
    return line(experiment.reason) or "; ".join(
        f"{item.what}: {text(item.value) if isinstance(item.value, str) else number(item.value)}"
        f" ({item.normal})"
        for item in experiment.evidence
    )
