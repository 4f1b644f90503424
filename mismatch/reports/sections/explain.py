"""Experiments, of --explain and --fix: what each confirmed or ruled out, and what it took."""

from __future__ import annotations

from mismatch.analysis.diagnosis.catalogue import title_of
from mismatch.experiments.explanation import GONE, STAYS, Experiment, Explanation
from mismatch.reports.formatting import line, number, percent, plural, text
from mismatch.reports.section import Cell, Column, Section, Table
from mismatch.types import Report

LEAD = (
    "Each experiment takes some causes out. Where mean |delta| goes with it, one of them is at "
    f"work (more than {percent(GONE)} of it, by the whole interval): confirmed, if the experiment "
    f"tells it from the others; where it stays (less than {percent(STAYS)}, and less than the "
    "cause would take along), they are ruled out. Fixes of --fix come first, then those of "
    "--explain by the information expected per second."
)


def section(result: Explanation, report: Report) -> Section:
    """What was confirmed, what was ruled out, then every experiment."""
    told = sentences(result)
    return Section(
        id="explain",
        title="Experiments",
        lead=LEAD,
        sentences=told,
        tables=(Table.of(COLUMNS, result.experiments),),
        short=" ".join(told),
    )


def sentences(result: Explanation) -> list[str]:
    """One sentence each for what was confirmed, what was ruled out and what could not be made."""
    if not result.experiments:
        return ["No experiment was made: no suspected cause has one that could tell it apart."]
    cost = (
        f"{plural(len([e for e in result.experiments if e.seconds is not None]), 'experiment')}, "
        f"{result.seconds:.0f} s"
    )
    confirmed = f"Confirmed: {_names(result.confirmed)}"
    words = [f"{confirmed if result.confirmed else 'No cause was confirmed'} ({cost})."]
    if result.ruled_out:
        words.append(f"Ruled out: {_names(result.ruled_out)}.")
    words += [
        f"{line(one.id)} was not measured: {line(one.reason)}."
        for one in result.experiments
        if one.reason
    ]
    return words


def _names(ids: tuple[str, ...]) -> str:
    return "; ".join(f"{line(title_of(id)).rstrip('.').lower()} ({id})" for id in ids)


def _note(one: Experiment) -> str:
    """Why it was not made, or what it measured beside the share that is gone."""
    if one.reason:
        return line(one.reason)
    return "; ".join(
        f"{item.what}: {text(item.value) if isinstance(item.value, str) else number(item.value)}"
        f" ({item.normal})"
        for item in one.evidence
    )


def _outcome(one: Experiment) -> Cell:
    return Cell(one.outcome, "strong" if one.outcome == "confirmed" else "", _note(one))


def _experiment(one: Experiment) -> Cell:
    return Cell(one.id, "code", "" if one.same_tokens else "sampled anew")


COLUMNS = (
    Column("experiment", text, of=_experiment),
    Column("", text, detail="what it says", of=_outcome),
    Column("side", text, 2, detail="at fault, if it confirms", of="side"),
    Column("gone", percent, interval=1, detail="share of mean |delta|", of="gone"),
    Column("seconds", number, 2, of="seconds"),
    Column("causes", text, 3, detail="that it takes out", of=lambda one: ", ".join(one.tests)),
)
