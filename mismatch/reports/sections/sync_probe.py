"""A probe of the weight sync: what became of every parameter, push by push."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mismatch.experiments.sync.judge import WORDS, judge, kept_caches, kind_of
from mismatch.experiments.sync.types import (
    BACK,
    ExportReport,
    ExportRow,
    Outcome,
    Parameter,
    Status,
    SyncReport,
    Word,
)
from mismatch.reports.formatting import Tone, count, number, text
from mismatch.reports.section import Cell, Column, Page, Section, Table
from mismatch.types import Report

LEAD = (
    "Known updates of every parameter, two of them, then the first weights again; after each push "
    "read back as the engine's kernels hold it."
)
TONES: dict[Word, Tone] = {"healthy": "healthy", "inconclusive": "warn", "broken": "critical"}
STATES = {0: "before", 1: "push 1", 2: "push 2", BACK: "back"}
MOST_PARTS = 3  # that are named in a cell
KIND_COLUMNS = (
    Column("parameters", text),
    Column("how many", count),
    Column("push 1", text),
    Column("push 2", text),
    Column("back", text, 1),
    Column("where", text, 1),
)
SCORE_COLUMNS = (
    Column("state", text),
    Column("tokens", count, 1),
    Column("engine to trainer", number, detail="mean |delta|, nats"),
    Column("trainer moved", number, detail="nats"),
    Column("engine moved", number, detail="nats"),
)
CACHE_COLUMNS = (
    Column("after", text),
    Column("prompts", count),
    Column("answered otherwise", count),
    Column("largest difference", number, detail="nats"),
)


def section(result: SyncReport, report: Report | None = None) -> Section:
    """Faults by kind of parameter; every parameter, scores and caches below."""
    verdict = judge(result)
    scores = Table(
        SCORE_COLUMNS,
        tuple(
            (STATES[r.push], r.tokens, r.apart, r.trainer_moved, r.engine_moved)
            for r in result.scores
        ),
    )
    caches = Table(
        CACHE_COLUMNS,
        tuple((STATES[r.push], r.prompts, r.differ, r.largest) for r in result.caches),
    )
    every = Table(KIND_COLUMNS, tuple(_row(p.name, [p]) for p in result.parameters))
    return Section(
        id="sync-probe",
        title="Weight sync",
        lead=f"{LEAD} Engine {result.engine}, path {result.path}.",
        sentences=tuple(_sentences(result)),
        tables=(_kinds(result),),
        notes=tuple(f"Not tested: {entry}" for entry in result.not_tested),
        parts=(
            Section("sync-scores", "Both sides on the same tokens", tables=(scores,)),
            Section("sync-caches", "The same prompts, warm and cold", tables=(caches,)),
            Section("sync-parameters", "Every parameter", tables=(every,), page_only=True),
        ),
        short=f"{verdict.word}: {verdict.reason}",
    )


def _sentences(result: SyncReport) -> Iterator[str]:
    arrived = len(result.of_status("arrived"))
    yield f"{arrived} of {len(result.parameters)} parameters arrived in every push."
    hidden = [p for p in result.faults if p.outcomes and p.outcomes[-1].status == "arrived"]
    if hidden and len(hidden) == len(result.faults):
        yield "With the first weights back all is as before: a round trip hides this."
    apart = [f"{number(r.apart)} {STATES[r.push]}" for r in result.scores if r.apart is not None]
    if apart:
        yield f"Engine and trainer on the same tokens, nats apart: {', '.join(apart)}."
    for row in kept_caches(result)[:1]:
        yield (
            f"After {STATES[row.push]} {row.differ} of {row.prompts} prompts were answered from "
            "keys and values of the old weights: reset the prefix cache after the sync."
        )
    for push, why in result.push_failed.items():
        yield f"{STATES[push]} failed: {why}"


def _kinds(result: SyncReport) -> Table:
    """What did not arrive, gathered over layers and experts."""
    groups: dict[tuple[str, Status], list[Parameter]] = {}
    for parameter in (*result.faults, *result.of_status("not_compared")):
        groups.setdefault((kind_of(parameter.name), parameter.status), []).append(parameter)
    return Table(KIND_COLUMNS, tuple(_row(name, found) for (name, _), found in groups.items()))


def _row(name: str, found: Sequence[Parameter]) -> tuple[Cell | str | int, ...]:
    outcomes = {push: [o for p in found for o in p.outcomes if o.push == push] for push in STATES}
    where = _where(found)
    cells = [_cell(outcomes[push], found) for push in (1, 2, BACK)]
    return (Cell(name, "code"), len(found), *cells, where)


def _cell(outcomes: Sequence[Outcome], found: Sequence[Parameter]) -> Cell:
    statuses: list[Status] = list(dict.fromkeys(o.status for o in outcomes))
    if not statuses:
        return Cell(WORDS["not_compared"] if found[0].status == "not_compared" else "–", "warn")
    words = [WORDS[status] for status in statuses]
    factors = [o.factor for o in outcomes if o.factor is not None]
    if factors:
        words.append(f"x {number(factors[0])}")
    if any(o.rounded for o in outcomes):
        words.append("rounded")
    return Cell(", ".join(words), "healthy" if statuses == ["arrived"] else "critical")


def _where(found: Sequence[Parameter]) -> str:
    """Experts and blocks of the first parameter that has any, or why it was not compared."""
    for parameter in found:
        if parameter.reason and not parameter.outcomes:
            return parameter.reason
        for outcome in parameter.outcomes:
            if outcome.parts:
                return "; ".join(_labels(*item) for item in outcome.parts.items())
    return ""


def _labels(status: str, labels: Sequence[str]) -> str:
    more = f" and {len(labels) - MOST_PARTS} more" if len(labels) > MOST_PARTS else ""
    return f"{status}: {', '.join(labels[:MOST_PARTS])}{more}"


def page(result: SyncReport) -> Page:
    """The probe as a page of its own."""
    verdict = judge(result)
    rows = tuple(
        (f"{name}: {key}" if key else name, str(each))
        for name, value in result.facts.items()
        for key, each in (value if isinstance(value, dict) else {"": value}).items()
        if each is not None
    )
    facts = Table((Column("", text), Column("", text)), rows)
    size = f"updates of {number(result.size)} of each parameter's size, seed {result.seed}"
    return Page(
        kind="probe of the weight sync",
        word=verdict.word,
        tone=TONES[verdict.word],
        reason=verdict.reason,
        title=Path(result.model).name,
        facts=(f"{result.engine}, path {result.path}; {size}",),
        sections=(section(result), Section("probe", "This probe", tables=(facts,))),
        file="sync-probe",
    )


EXPORTED_COLUMNS = (
    Column("tensor", text),
    Column("difference", text),
    Column("checkpoint", text),
    Column("exported", text),
)


def exported_section(result: ExportReport) -> Section:
    """The first rows that differ, worst first."""
    more = len(result.rows) - 12  # on a screen
    return Section(
        id="exported-weights",
        title="Exported weights",
        lead=f"{result.folder} beside {result.compared} tensors of {result.model}.",
        tables=(Table(EXPORTED_COLUMNS, [_exported_row(row) for row in result.rows[:12]]),),
        notes=(f"and {more} more: --json has all of them" if more > 0 else "",),
        short=result.line,
    )


def _exported_row(row: ExportRow) -> tuple[Cell | str, ...]:
    tone: Tone = "warn" if row.difference == "dtype" else "critical"
    return (
        Cell(row.name, "code"),
        Cell(row.detail or row.difference, tone),
        _exported_shape(row.expected),
        _exported_shape(row.exported),
    )


def _exported_shape(shape: tuple[int, ...] | None) -> str:
    return "–" if shape is None else " × ".join(map(str, shape))
