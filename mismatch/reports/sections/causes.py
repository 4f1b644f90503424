"""Why the two sides differ: the leading cause, what speaks for it, and what was ruled out."""

from __future__ import annotations

from mismatch.analysis.diagnosis.catalogue import Entry, catalogue, title_of
from mismatch.analysis.diagnosis.detector import Evidence
from mismatch.analysis.diagnosis.ranking import Cause, Causes
from mismatch.reports.formatting import line, number, percent, plural, text
from mismatch.reports.section import Cell, Column, Section, Table, Value
from mismatch.types import Report

LEAD = (
    "Suspected: its mark is in the data. Confirmed: the experiment that separates it was part of "
    "the run."
)
PAGE = "docs/causes.md"
SHOWN = 8  # rows of evidence beyond which they are folded
SIDES = {"engine": "the engine's side", "trainer": "the trainer's side", "either": "side not known"}
RANKED = (
    Column("cause", text),
    Column("id", text, 4),
    Column("", text, detail="how sure"),
    Column("side", text, 1),
    Column("share", percent, interval=2, detail="of mean |delta|"),
)
EVIDENCE = (
    Column("cause", text, 3),
    Column("measured", text),
    Column("value", number),
    Column("normal", text, 1),
)
LOOKED = (
    Column("looked for", text, 3),
    Column("measured", text),
    Column("value", number),
    Column("normal", text, 1),
)


def section(result: Causes, report: Report) -> Section:
    """The leading cause first, then every other, then what was looked for and not there."""
    parts = [part for part in (_evidence(result), _ruled_out(result), _not_tested(result)) if part]
    every = Section(
        "causes-ranked",
        f"{plural(len(result.ranked), 'cause')}, with shares",
        LEAD,
        tables=(Table(RANKED, tuple(_row(cause) for cause in result.ranked)),),
    )
    return Section(
        id="causes",
        title="Causes",
        warnings=tuple(
            f"The detector {line(failure.detector)} failed ({line(failure.error)}): its causes "
            "were not looked for."
            for failure in result.failures
        ),
        sentences=tuple(sentences(result)) if result.ranked else (),
        parts=(*parts, every) if len(result.ranked) > 1 else tuple(parts),
        folded=not result.ranked,
        short="" if result.ranked else _nothing(result),
    )


def sentences(result: Causes) -> list[str]:
    """One paragraph a cause, with one action each; consequences get no advice."""
    if not result.ranked:
        return [_nothing(result)]
    return [_told(cause, place) for place, cause in enumerate(result.ranked)]


def _nothing(result: Causes) -> str:
    count = len(result.ruled_out)
    rest = plural(len(result.not_tested), "detector")
    return (
        f"None found: {plural(count, 'detector')} saw what a healthy pair has"
        f"{f', {rest} lacked data' if result.not_tested else ''}."
    )


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
    words += _advice(entry, cause)
    return ". ".join(word.rstrip(".") for word in words) + "."


def _advice(entry: Entry | None, cause: Cause) -> list[str]:
    if entry is None:
        return []
    mend = f"Do: {entry.mend}"
    return [mend] if cause.status == "confirmed" else [f"To confirm: {entry.confirm}", mend]


def _row(cause: Cause) -> tuple[Cell | Value, ...]:
    return (
        title_of(cause.id),
        Cell(cause.id, "code"),
        Cell(cause.status, "strong" if cause.status == "confirmed" else ""),
        cause.side,
        cause.effect,
    )


def _lines(name: str, evidence: tuple[Evidence, ...]) -> list[tuple[Cell | Value, ...]]:
    return [
        (name if place == 0 else "", each.what, each.value, each.normal)
        for place, each in enumerate(evidence)
    ]


def _evidence(result: Causes) -> Section | None:
    rows = [row for cause in result.ranked for row in _lines(cause.id, cause.evidence)]
    if not rows:
        return None
    few = len(rows) <= SHOWN
    return Section(
        "causes-evidence", "Evidence", tables=(Table(EVIDENCE, tuple(rows)),), folded=not few
    )


def _ruled_out(result: Causes) -> Section | None:
    rows = [row for each in result.ruled_out for row in _lines(each.detector, each.evidence)]
    if not rows:
        return None
    return Section(
        "causes-ruled-out",
        "Looked for and not there",
        lead=f"What each cause looks like, and how it is confirmed: {PAGE}.",
        tables=(Table(LOOKED, tuple(rows)),),
    )


def _not_tested(result: Causes) -> Section | None:
    if not result.not_tested:
        return None
    return Section(
        "causes-not-tested",
        "Causes not tested",
        notes=tuple(line(str(missing)) for missing in result.not_tested),
    )
