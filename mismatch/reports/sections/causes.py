"""Why the two sides differ: the causes, what speaks for each, and the experiments that tell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mismatch.analysis.catalogue import catalogue, title_of
from mismatch.analysis.cause_results import Cause, Causes, Evidence
from mismatch.reports import summary
from mismatch.reports.documentation import of_cause
from mismatch.reports.formatting import line, number, percent, plural, text
from mismatch.reports.section import Cell, Cells, Column, Section, Table
from mismatch.reports.summary import what_to_do
from mismatch.types import Report

LEAD = (
    "Suspected: its mark is in the data. Confirmed: an experiment or a fix took it out, a side "
    "states it, or no other cause has its pattern; the sentence says which."
)
PAGE = "docs/reference/causes.md"
SHOWN = 5  # rows of evidence beyond which they are folded
SIDES = {"engine": "the engine's side", "trainer": "the trainer's side", "either": "side not known"}
RANKED = (
    Column("cause", text, of=lambda cause: title_of(cause.id)),
    Column("id", text, 4, of=lambda cause: Cell(cause.id, "code", explained=of_cause(cause.id))),
    Column("", text, detail="how sure", of=lambda cause: outcome_cell(cause.status)),
    Column("side", text, 1, of="side"),
    Column("share", percent, interval=2, detail="of mean |delta|", of="effect"),
)
EVIDENCE = (Column("measured", text), Column("value", number), Column("normal", text, 1))


def section(result: Causes, report: Report) -> Section:
    """Return the leading cause first, then every other, then what was looked for and not there."""
    evidence = _evidence("cause", ((cause.id, cause.evidence) for cause in result.ranked))
    looked = _evidence("looked for", ((each.detector, each.evidence) for each in result.ruled_out))
    missing = [line(str(reason)) for reason in result.not_tested]
    several = result.ranked if len(result.ranked) > 1 else ()
    about = f"What each cause looks like, and how it is confirmed: {PAGE}."
    return Section(
        "causes",
        "Causes",
        warnings=[
            f"The detector {line(failure.detector)} failed ({line(failure.error)}): its causes "
            "were not looked for."
            for failure in result.failures
        ],
        sentences=sentences(result, report) if result.ranked else (),
        parts=[
            Section(
                "causes-evidence", "Evidence", tables=[evidence], folded=len(evidence.rows) > SHOWN
            ),
            Section(
                "causes-ruled-out",
                "Looked for and not there",
                about,
                tables=[looked],
                parts=[
                    Section("causes-not-tested", "Causes not tested", notes=missing, folded=False)
                ],
            ),
            Section(
                "causes-ranked",
                f"{plural(len(result.ranked), 'cause')}, with shares",
                LEAD,
                tables=[Table.of(RANKED, [_as_known(report, each) for each in several])],
            ),
        ],
        folded=not result.ranked,
        short="" if result.ranked else sentences(result, report)[0],
    )


def sentences(result: Causes, report: Report) -> list[str]:
    """Return one paragraph a cause, with one action each; consequences get no advice."""
    if result.ranked:
        return [_paragraph(cause, rank, report) for rank, cause in enumerate(result.ranked)]
    return [none_found(result)]


def none_found(result: Causes) -> str:
    """Return how many of the known causes were checked, where none was found."""
    checked = {id for each in result.ruled_out for id in each.causes}
    return f"{len(checked)} of {plural(len(catalogue()), 'known cause')} checked, none found."


def _paragraph(cause: Cause, rank: int, report: Report) -> str:
    entry = catalogue().get(cause.id)
    known, share = summary.known_by(report, cause), "; its share was not measured"
    if known.share is not None:
        share = f", {percent(known.share.value)} of mean |delta|"
    lead = f"{'Also' if rank else 'Leading cause'}: {line(title_of(cause.id))}"
    parts = [f"{lead} ({known.how}, {SIDES[cause.side]}){share}"]
    for words, ids in (
        ("These data cannot separate it from", cause.alike[:4]),
        ("The same fault explains", cause.consequences),
    ):
        parts += [f"{words}: {', '.join(title_of(id).lower() for id in ids)}"] if ids else []
    if made := summary.replaced(report, cause):
        parts.append(f"What ran here can make it: {summary.in_place_of(made)}")
        parts.append(summary.own_setting(made))
    elif entry is not None:
        open_still = cause.status == "suspected" and not summary.foreign(report, cause)
        parts += [f"To confirm: {entry.confirm}"] if open_still else []
        parts.append(f"Do: {what_to_do(report, cause)}")
    return ". ".join(part.rstrip(".") for part in parts) + "."


def _as_known(report: Report, cause: Cause) -> Cause:
    """Return the cause with the share that every sentence gives it."""
    return replace(cause, effect=summary.known_by(report, cause).share)


def _evidence(title: str, groups: Iterable[tuple[str, tuple[Evidence, ...]]]) -> Table:
    """Return a row for each, the name of its group in the first: causes have a page."""
    known = catalogue()
    rows: list[Cells] = [
        (
            "" if index else Cell(name, explained=of_cause(name) if name in known else ""),
            *(each.what, each.value, each.normal),
        )
        for name, evidence in groups
        for index, each in enumerate(evidence)
    ]
    return Table((Column(title, text, 3), *EVIDENCE), rows)


def outcome_cell(outcome: str, note: str = "") -> Cell:
    return Cell(outcome, "strong" if outcome == "confirmed" else "", note)
