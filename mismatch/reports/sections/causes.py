"""Why the two sides differ: the leading cause, what speaks for it, and what was ruled out."""

from __future__ import annotations

from collections.abc import Iterable

from mismatch.analysis.diagnosis.catalogue import catalogue, title_of
from mismatch.analysis.diagnosis.detector import Evidence
from mismatch.analysis.diagnosis.ranking import Cause, Causes
from mismatch.reports.formatting import line, number, percent, plural, text
from mismatch.reports.section import Cell, Cells, Column, Section, Table
from mismatch.types import Report

LEAD = (
    "Suspected: its mark is in the data. Confirmed: the experiment that separates it was part of "
    "the run."
)
PAGE = "docs/causes.md"
SHOWN = 8  # rows of evidence beyond which they are folded
SIDES = {"engine": "the engine's side", "trainer": "the trainer's side", "either": "side not known"}
RANKED = (
    Column("cause", text, of=lambda cause: title_of(cause.id)),
    Column("id", text, 4, of="id", tone="code"),
    Column("", text, detail="how sure", of=lambda cause: _status(cause.status)),
    Column("side", text, 1, of="side"),
    Column("share", percent, interval=2, detail="of mean |delta|", of="effect"),
)
EVIDENCE = (Column("measured", text), Column("value", number), Column("normal", text, 1))


def _status(status: str) -> Cell:
    return Cell(status, "strong" if status == "confirmed" else "")


def section(result: Causes, report: Report) -> Section:
    """The leading cause first, then every other, then what was looked for and not there."""
    evidence = _evidence((cause.id, cause.evidence) for cause in result.ranked)
    looked = _evidence((each.detector, each.evidence) for each in result.ruled_out)
    several = result.ranked if len(result.ranked) > 1 else ()
    return Section(
        id="causes",
        title="Causes",
        warnings=tuple(
            f"The detector {line(failure.detector)} failed ({line(failure.error)}): its causes "
            "were not looked for."
            for failure in result.failures
        ),
        sentences=sentences(result) if result.ranked else (),
        parts=(
            Section(
                "causes-evidence",
                "Evidence",
                tables=(Table((Column("cause", text, 3), *EVIDENCE), evidence),),
                folded=len(evidence) > SHOWN,
            ),
            Section(
                "causes-ruled-out",
                "Looked for and not there",
                lead=f"What each cause looks like, and how it is confirmed: {PAGE}.",
                tables=(Table((Column("looked for", text, 3), *EVIDENCE), looked),),
                parts=(
                    Section(
                        "causes-not-tested",
                        "Causes not tested",
                        notes=[line(str(missing)) for missing in result.not_tested],
                        folded=False,
                    ),
                ),
            ),
            Section(
                "causes-ranked",
                f"{plural(len(result.ranked), 'cause')}, with shares",
                LEAD,
                tables=(Table.of(RANKED, several),),
            ),
        ),
        folded=not result.ranked,
        short="" if result.ranked else sentences(result)[0],
    )


def sentences(result: Causes) -> list[str]:
    """One paragraph a cause, with one action each; consequences get no advice."""
    if result.ranked:
        return [_told(cause, place) for place, cause in enumerate(result.ranked)]
    rest = f", {plural(len(result.not_tested), 'detector')} lacked data"
    return [
        f"None found: {plural(len(result.ruled_out), 'detector')} saw what a healthy pair has"
        f"{rest if result.not_tested else ''}."
    ]


def _told(cause: Cause, place: int) -> str:
    entry = catalogue().get(cause.id)
    lead = "Leading cause" if place == 0 else "Also"
    words = [f"{lead}: {line(title_of(cause.id))} ({cause.status}, {SIDES[cause.side]})"]
    if cause.effect is not None:
        words[0] += f", {percent(cause.effect.value)} of mean |delta|"
    else:
        words[0] += "; its share was not measured"
    if cause.alike:
        others = ", ".join(title_of(id).lower() for id in cause.alike[:4])
        words.append(f"These data cannot tell it from: {others}")
    if cause.consequences:
        gone = ", ".join(title_of(id).lower() for id in cause.consequences)
        words.append(f"Gone with it: {gone}")
    if entry is not None:
        words += [] if cause.status == "confirmed" else [f"To confirm: {entry.confirm}"]
        words.append(f"Do: {entry.mend}")
    return ". ".join(word.rstrip(".") for word in words) + "."


def _evidence(groups: Iterable[tuple[str, tuple[Evidence, ...]]]) -> list[Cells]:
    """A row for each, the name of its group in the first."""
    return [
        (name if place == 0 else "", each.what, each.value, each.normal)
        for name, evidence in groups
        for place, each in enumerate(evidence)
    ]
