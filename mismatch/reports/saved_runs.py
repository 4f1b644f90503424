"""The page of several saved runs, and of a new run against an old one."""

from __future__ import annotations

from collections.abc import Sequence

from mismatch.pipeline.run_comparison import DECIDING, Line, Move, RunComparison, Side
from mismatch.reports.formatting import (
    Format,
    alike,
    capital,
    chance,
    line,
    number,
    plural,
    points,
    signed,
    text,
)
from mismatch.reports.section import Cell, Cells, Column, Page, Section, Table, Tone, status_cell
from mismatch.reports.sections.square import standing_cell
from mismatch.reports.summary import Row, metric_label
from mismatch.types import Estimate

# Of the new run and the old one.
SENTENCES = {
    "worse": "{} is worse than {}.",
    "better": "{} is better than {}.",
    "mixed": "{} is worse than {} in one metric and better in another.",
    "undecided": "{} may be worse than {}: too few prompts to say.",
    "none": "{} does not differ significantly from {}.",
    "not comparable": "{} is not comparable with {}.",
}
NO_CHANGE = {"none": "no significant difference"}  # other outcomes are words as they are
TONE_OF: dict[str | None, Tone] = {
    "worse": "warn",
    "mixed": "warn",
    "undecided": "warn",
    "better": "healthy",
}
LEAD = (
    "Each run compares an engine with a trainer. Every other run is compared with the "
    "first: ! is significantly worse than it, ✓ significantly better."
)
METHOD = (
    "k3, mean |delta| and routing flips decide: a permutation test within prompts, adjusted "
    "for all runs and metrics (Holm), at 5 %. Without p, and for all other metrics, a change is "
    "marked where its 95 % interval leaves 0 out, not adjusted."
)
BASIS = {
    "paired": "same tokens, paired",
    "prompts": "other tokens, by prompt",
    "intervals": "by the two intervals",
}
CHANGES = (
    Column("metric", text),
    Column("run", text),
    Column("change", signed, interval=1),
    Column("p", chance, 2),
    Column("result", text),
    Column("compared", text, 3),
)


def runs_page(result: RunComparison) -> Page:
    """Return the page with a column a run; the others are compared with the first."""
    first, *others = result.runs
    gate, outcomes = result.gate, result.outcomes[1:]
    words = [NO_CHANGE.get(str(outcome), str(outcome)) for outcome in outcomes]
    values = _values(result)
    about = [METHOD]
    if gate is not None:
        about.append(f"✕ is worse by more than the margin of {100 * gate.margin:g} %.")
    sections = (
        Section("side-by-side", "Side by side", LEAD, tables=[values], notes=about, folded=False),
        _changes(result),
        Section(
            "square",
            "Rounding or fault",
            "Excess over a plain forward's rounding, and gaps in float32 (nats), in each run.",
            tables=[_square(result)],
            folded=False,
        ),
        _facts(result),
    )
    facts = (*(_side(side) for side in result.runs), *(capital(line(n)) for n in result.notes))
    shown = tuple(section for section in sections if section.holds)
    if gate is not None:
        created = f" · {others[0].created}" if others[0].created else ""
        return Page(
            kind=f"a new run against an old one{created}",
            word=words[0],
            tone="critical" if gate.fails else TONE_OF.get(outcomes[0], "healthy"),
            reason=gate.reason,
            title=others[0].model,
            facts=(f"{others[0].run} (new) against {first.run} (old)", *facts),
            sections=shown,
            lead=SENTENCES[str(outcomes[0])].format(others[0].run, first.run),
            file="against",
        )
    worse = sum(TONE_OF.get(outcome) == "warn" for outcome in outcomes)
    apart = set(outcomes) == {"not comparable"}
    said = [
        SENTENCES[str(outcome)].format(side.run, first.run)
        for side, outcome in zip(others, outcomes, strict=True)
    ]
    return Page(
        kind=f"{len(result.runs)} runs side by side",
        word=f"{worse} of {len(others)} worse" if worse else words[0] if apart else "none worse",
        tone="warn" if worse or apart else "healthy",
        reason=" ".join(said).rstrip("."),
        title=first.model,
        facts=facts,
        sections=shown,
        table=values,
        file="side-by-side",
    )


def _side(side: Side) -> str:
    tokens = "no table of tokens" if side.tokens is None else plural(side.tokens, "token")
    date = f", {side.created[:10]}" if side.created else ""
    moved = ""
    if side.engine_mean is not None:
        apart = f"mean |delta| {number(side.engine_mean)}, largest {number(side.engine_max)}"
        moved = f"; its engine against the first run's on the same tokens: {apart}"
    engine = side.engine or "unknown engine"
    return f"{side.run}: {engine}{date}, {tokens}, {side.status}{moved}"


def _values(result: RunComparison) -> Table:
    runs = (Column(side.run, interval=index + 1) for index, side in enumerate(result.runs))
    rows: list[Cells] = [("verdict", *(status_cell(side.status) for side in result.runs))]
    for item in result.metrics:
        write = metric_format(item.metric, item.values)
        pairs = zip(item.values, item.moves, strict=True)
        cells = (Cell(value, _tone(item, move), format=write) for value, move in pairs)
        rows.append((metric_label(item.metric).label, *cells))
    return Table((Column("metric", text), *runs), rows)


def metric_format(metric: str, estimates: Sequence[Estimate | None]) -> Format:
    """Write a metric alike in all runs."""
    values = [value for value in estimates if value is not None]
    if not values:
        return number
    row = Row(metric, metric_label(metric), values[0])
    return alike((value.value for value in values), row.write)


def _tone(item: Line, move: Move | None) -> Tone:
    if move is None or not move.significant:
        return ""
    if move.beyond:
        return "critical"
    if item.low_is_bad is None:
        return "strong"
    return "healthy" if (move.change.value > 0) == item.low_is_bad else "warn"


def _changes(result: RunComparison) -> Section:
    """Every change of a metric that decides, and every other significant one."""
    deciding: list[Cells] = []
    moved: list[Cells] = []
    for item in result.metrics:
        label = metric_label(item.metric)
        for side, move in zip(result.runs, item.moves, strict=True):
            if move is None or not (item.metric in DECIDING or move.significant):
                continue
            word = "changed" if move.significant else ""
            if move.outcome:
                within = move.outcome == "worse" and not move.beyond and result.gate is not None
                word = NO_CHANGE.get(move.outcome, move.outcome)
                word += ", within the margin" if within else ""
            tone = "critical" if move.beyond else TONE_OF.get(move.outcome, "dim")
            write: Format = points if label.share else signed
            row: Cells = (
                label.label,
                side.run,
                Cell(move.change, "strong", format=write),
                move.p_value,
                Cell(word, tone),
                BASIS[move.basis],
            )
            (deciding if item.metric in DECIDING else moved).append(row)
    short = plural(len(moved), "significant change")
    other = Section("other-changes", "Other metrics", tables=[Table(CHANGES, moved)], short=short)
    return Section(
        "changes",
        f"Changes from {result.runs[0].run}",
        "The metrics that decide.",
        tables=[Table(CHANGES, deciding)],
        parts=[other],
        folded=False,
    )


def _square(result: RunComparison) -> Table:
    columns = [Column("scoring", text), Column("what", text)]
    for index, side in enumerate(result.runs):
        columns += [Column(side.run, interval=index + 1), Column("", text)]
    rows: list[Cells] = []
    for item in result.square:
        cells: list[Cell] = []
        for value, standing in zip(item.values, item.standings, strict=True):
            judged = Cell("") if standing is None else standing_cell(standing)
            cells += [Cell(value, format=number), judged]
        rows.append((item.scoring, item.evidence, *cells))
    return Table(tuple(columns), rows)


def _facts(result: RunComparison) -> Section:
    named = (Column(side.run, text) for side in result.runs)
    columns = (Column("where", text), Column("what", text), *named)
    rows: list[Cells] = [
        (fact.where, Cell(fact.name, "code"), *fact.values) for fact in result.facts
    ]
    return Section(
        "facts",
        "What differs",
        "Versions, settings and kernels as the runs themselves say.",
        tables=[Table(columns, rows)],
        sentences=() if rows else ["Nothing that the runs say of themselves."],
        folded=False,
    )
