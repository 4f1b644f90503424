"""Why the two sides differ: the causes, what speaks for each, and the experiments that tell."""

from __future__ import annotations

from collections.abc import Iterable

from mismatch.analysis.diagnosis.catalogue import catalogue, title_of
from mismatch.analysis.diagnosis.results import LITTLE, Cause, Causes, Evidence
from mismatch.experiments.results import GONE, STAYS, Experiment, Explanation
from mismatch.reports import summary
from mismatch.reports.documentation import of_cause
from mismatch.reports.formatting import line, number, percent, plural, text
from mismatch.reports.section import Cell, Cells, Column, Section, Table
from mismatch.reports.summary import what_to_do
from mismatch.types import Report

LEAD = (
    "Suspected: its mark is in the data. Confirmed: the experiment that separates it was part of "
    "the run."
)
PAGE = "docs/reference/causes.md"
SHOWN = 5  # rows of evidence beyond which they are folded
SIDES = {"engine": "the engine's side", "trainer": "the trainer's side", "either": "side not known"}
RANKED = (
    Column("cause", text, of=lambda cause: title_of(cause.id)),
    Column("id", text, 4, of=lambda cause: Cell(cause.id, "code", explained=of_cause(cause.id))),
    Column("", text, detail="how sure", of=lambda cause: _outcome(cause.status)),
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
                tables=[Table.of(RANKED, several)],
            ),
        ],
        folded=not result.ranked,
        short="" if result.ranked else sentences(result, report)[0],
    )


def sentences(result: Causes, report: Report) -> list[str]:
    """Return one paragraph a cause, with one action each; consequences get no advice."""
    if result.ranked:
        return [_paragraph(cause, rank, report) for rank, cause in enumerate(result.ranked)]
    rest = f", {plural(len(result.not_tested), 'detector')} lacked data"
    return [
        f"None found: {plural(len(result.ruled_out), 'detector')} saw what a healthy pair has"
        f"{rest if result.not_tested else ''}."
    ]


def _paragraph(cause: Cause, rank: int, report: Report) -> str:
    entry = catalogue().get(cause.id)
    share = "; its share was not measured"
    if cause.effect is not None:
        share = f", {percent(cause.effect.value)} of mean |delta|"
    lead = f"{'Also' if rank else 'Leading cause'}: {line(title_of(cause.id))}"
    parts = [f"{lead} ({cause.status}, {SIDES[cause.side]}){share}"]
    for words, ids in (
        ("These data cannot separate it from", cause.alike[:4]),
        ("The same fault explains", cause.consequences),
    ):
        parts += [f"{words}: {', '.join(title_of(id).lower() for id in ids)}"] if ids else []
    if made := summary.replaced(report, cause):
        parts.append(f"What ran here can make it: {summary.in_place_of(made)}")
        parts.append(summary.own_setting(made))
    elif entry is not None:
        parts += [f"To confirm: {entry.confirm}"] if cause.status == "suspected" else []
        parts.append(f"Do: {what_to_do(report, cause)}")
    return ". ".join(part.rstrip(".") for part in parts) + "."


def _evidence(title: str, groups: Iterable[tuple[str, tuple[Evidence, ...]]]) -> Table:
    """Return a row for each, the name of its group in the first."""
    rows: list[Cells] = [
        ("" if index else _name(name), each.what, each.value, each.normal)
        for name, evidence in groups
        for index, each in enumerate(evidence)
    ]
    return Table((Column(title, text, 3), *EVIDENCE), rows)


def _name(name: str) -> Cell:
    """Return a cause, which has a page, or a detector, which has none."""
    return Cell(name, explained=of_cause(name) if name in catalogue() else "")


# ---------------------------------------------------------------- experiments

EXPLAIN_LEAD = (
    "Each experiment takes some causes out. Where this removes mean |delta|, one of them is at "
    f"work (more than {percent(GONE)} of it, by the whole interval): confirmed, if the experiment "
    f"separates it from the others; where it stays (less than {percent(STAYS)}, and less than the "
    "cause would take along), they are ruled out. Fixes of --fix come first, then those of "
    "--explain, which ask about the leading cause."
)
EXPERIMENTS = (
    Column(
        "experiment",
        text,
        of=lambda each: Cell(each.id, "code", "" if each.same_tokens else "sampled again"),
    ),
    Column(
        "", text, detail="what it says", of=lambda each: _outcome(each.outcome, _measured(each))
    ),
    Column("side", text, 2, detail="at fault, if it confirms", of="side"),
    Column("gone", percent, interval=1, detail="share of mean |delta|", of="gone"),
    Column("seconds", number, 2, of="seconds"),
    Column("causes", text, 3, detail="that it takes out", of=lambda each: ", ".join(each.tests)),
)


def explain(result: Explanation, report: Report) -> Section:
    """Return what was confirmed, what was ruled out, then every experiment."""
    texts = explained(result)
    table = Table.of(EXPERIMENTS, result.experiments)
    return Section(
        "explain",
        "Experiments",
        EXPLAIN_LEAD,
        sentences=texts,
        tables=[table],
        short=" ".join(texts),
    )


def explained(result: Explanation) -> list[str]:
    """Return a sentence each for what was confirmed, ruled out, and could not be made."""
    if not result.experiments:
        return ["No experiment was made: none could single out a suspected cause."]
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


def _outcome(outcome: str, note: str = "") -> Cell:
    return Cell(outcome, "strong" if outcome == "confirmed" else "", note)
