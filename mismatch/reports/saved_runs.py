"""Pages of several saved runs: a new run against an old one, and runs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING

from mismatch.experiments.regression.run_comparison import DECIDING
from mismatch.experiments.regression.types import ABSENT, Against, AgainstRow, RunSide
from mismatch.pipeline.side_by_side import Line, Move, Side, SideBySide
from mismatch.reports.formatting import (
    Format,
    alike,
    capital,
    chance,
    count,
    line,
    number,
    plural,
    points,
    signed,
    text,
)
from mismatch.reports.metric_labels import metric_label
from mismatch.reports.section import (
    Cell,
    Cells,
    Column,
    Page,
    Section,
    Table,
    Tone,
    status_cell,
)
from mismatch.reports.sections.square import standing_cell
from mismatch.reports.summary import Row
from mismatch.types import Estimate

if TYPE_CHECKING:
    pass

NO_CHANGE = {"none": "no significant difference"}  # other outcomes are words as they are
TONE_OF: dict[str | None, Tone] = {
    "worse": "warn", "mixed": "warn", "undecided": "warn", "better": "healthy",
}  # fmt: skip
SAID = "Versions, settings and kernels as the runs themselves say."
WHERE_WHAT = Column("where", text, of="where"), Column("what", text, of="name", tone="code")


def _change(metric: str) -> Format:
    return points if metric_label(metric).share else signed


# ---------------------------------------------------------------- a new run against an old one

AGAINST_LEAD = (
    "Each run compares its own engine with its own trainer. The change is new minus old, in nats "
    "unless it is a share. For the metrics that decide, below 0 is better."
)
RESULTS = {"undecided": "larger, but undecided", "none": "not significant", None: ""}
MOVED = (
    Column("metric", text),
    Column("name", text, 9),
    Column("old", interval=8),
    Column("new", interval=8),
    Column("change", signed, interval=1),
    Column("p", chance, 2),
    Column("result", text),
)
SQUARE = (
    Column("scoring", text, of="scoring"),
    Column("what", text, of="evidence"),
    Column("old", interval=8, of=lambda row: Cell(row.old, format=number)),
    Column("new", interval=8, of=lambda row: Cell(row.new, format=number)),
    Column("the new one", text, of=lambda row: standing_cell(row.after) if row.after else ""),
)
FACTS = (*WHERE_WHAT, Column("old", text, of="old"), Column("new", text, of="new"))


def against_page(result: Against) -> Page:
    """What moved, deciding metrics first, and what has changed between the runs."""
    old, new, outcome = result.old, result.new, result.outcome
    tone: Tone = "warn" if outcome in ("worse", "mixed") else "healthy"
    moved = sorted(result.rows, key=lambda row: row.p_value is None)
    sections = (
        Section(
            "moved",
            "What moved",
            AGAINST_LEAD,
            sentences=[*_rests_on(result)],
            tables=[Table(MOVED, [_moved(row) for row in moved])],
            notes=[f"{result.method} Margin: {result.margin_text}."],
            folded=False,
        ),
        Section(
            "square",
            "Rounding or fault",
            "Excess over a plain forward's rounding, and gaps in float32 (nats), in each run.",
            tables=[Table.of(SQUARE, result.square)],
            folded=False,
        ),
        Section(
            "changed",
            "What changed",
            SAID if result.changed else "Nothing of what both runs say of themselves.",
            tables=[Table.of(FACTS, result.changed)],
            folded=False,
        ),
    )
    return Page(
        kind="a new run against an old one" + (f" · {new.created}" if new.created else ""),
        word=NO_CHANGE.get(outcome, outcome),
        tone="critical" if result.fails else tone,
        reason=result.reason,
        title=new.model,
        facts=(f"{new.run} (new) against {old.run} (old)", _run_side(old), _run_side(new)),
        sections=tuple(each for each in sections if each.id != "square" or each.holds),
        file="against",
    )


def _moved(row: AgainstRow) -> Cells:
    words = metric_label(row.metric)
    write = Row(row.metric, words, row.new).write
    tone: Tone = "critical" if row.beyond else TONE_OF.get(row.outcome, "dim")
    return (
        Cell(words.label, note=words.meaning),
        Cell(row.metric, "code"),
        Cell(row.old, format=write),
        Cell(row.new, format=write),
        Cell(row.change, "strong", format=_change(row.metric)),
        "" if row.p_value is None else row.p_value,
        Cell(_outcome(row), tone),
    )


def _outcome(row: AgainstRow) -> str:
    within = ", within the margin" if row.outcome == "worse" and not row.beyond else ""
    return RESULTS.get(row.outcome, row.outcome or "") + within


def _run_side(run: RunSide) -> str:
    size = f"{plural(run.tokens, 'token')}, {plural(run.sequences, 'sequence')}"
    own = run.verdict.status if run.verdict else "not judged"
    return f"{run.run}: {run.engine} {run.version}".rstrip() + f", {size}, by itself {own}"


def _rests_on(result: Against) -> Iterator[str]:
    """What the numbers rest on."""
    for row in result.rows:
        if row.p_value is not None:
            yield f"{metric_label(row.metric).label}: {_outcome(row)}, p {chance(row.p_value)}."
    if result.same_tokens:
        yield "Both runs hold the same tokens: every change is of the same tokens."
    else:
        yield (
            f"{count(result.same_sequences)} of {plural(result.old.sequences, 'sequence')} are the "
            "same in both runs; the engines sampled tokens of their own, so changes are by prompt."
        )
    if result.engines is not None:
        values: dict[str, Estimate] = result.engines.metrics
        mean, most = values["logprob_abs_diff_mean"].value, values["logprob_abs_diff_max"].value
        yield (
            f"New engine against old engine on these tokens: mean |delta| {number(mean)}, "
            f"largest {number(most)}."
        )
    yield from (f"{capital(line(note))}." for note in result.notes)


# ---------------------------------------------------------------- side by side

BESIDE_LEAD = (
    "Each run compares its own engine with its own trainer. Every other run is held against the "
    "first: ! is significantly worse than it, ✓ significantly better."
)
BASIS = {
    "paired": "same tokens, paired",
    "prompts": "tokens of their own, by prompt",
    "intervals": "by the two intervals",
}
METHOD = (
    "k3, mean |delta| and routing flips decide: a permutation test within prompts, adjusted "
    "for all runs and metrics (Holm), at 5 %; without p, and for all other metrics, a change is "
    "marked where its own 95 % interval leaves 0 out, not adjusted."
)
CHANGES = (
    Column("metric", text),
    Column("run", text),
    Column("change", signed, interval=1),
    Column("p", chance, 2),
    Column("result", text),
    Column("told by", text, 3),
)


def beside_page(result: SideBySide) -> Page:
    """A column a run; the first is what the others are held against."""
    first, *others = result.runs
    outcomes = [outcome for outcome in result.outcomes if outcome]
    worse = sum(TONE_OF.get(outcome) == "warn" for outcome in outcomes)
    words = [NO_CHANGE.get(outcome, outcome) for outcome in outcomes]
    against = [f"{side.run} {word}" for side, word in zip(others, words, strict=True)]
    table = _values(result)
    metrics = Section(
        "side-by-side", "Side by side", BESIDE_LEAD, tables=[table], notes=[METHOD], folded=False
    )
    return Page(
        kind=f"{len(result.runs)} runs side by side",
        word=f"{worse} of {len(others)} worse" if worse else "none worse",
        tone="warn" if worse else "healthy",
        reason=f"against {first.run}: {', '.join(against)}",
        title=_model(first.model),
        facts=(*map(_side, result.runs), *map(line, result.notes)),
        sections=(metrics, _changes(result), _facts(result)),
        table=table,
        file="side-by-side",
    )


def _model(model: str) -> str:
    path = PurePath(model)
    return path.name if path.is_absolute() and path.name else model


def _side(side: Side) -> str:
    tokens = "no table of tokens" if side.tokens is None else plural(side.tokens, "token")
    date = f", {side.created[:10]}" if side.created else ""
    return f"{side.run}: {side.engine or 'unknown engine'}{date}, {tokens}, {side.status}"


def _values(result: SideBySide) -> Table:
    runs = (Column(side.run, interval=index + 1) for index, side in enumerate(result.runs))
    rows: list[Cells] = [("verdict", *(status_cell(side.status) for side in result.runs))]
    for item in result.metrics:
        write = metric_format(item.metric, item.values)
        pairs = zip(item.values, item.moves, strict=True)
        cells = (Cell(value, _tone(item, move), format=write) for value, move in pairs)
        rows.append((metric_label(item.metric).label, *cells))
    return Table((Column("metric", text), *runs), rows)


def metric_format(metric: str, estimates: Sequence[Estimate | None]) -> Format:
    """One way of writing a metric in all runs."""
    values = [value for value in estimates if value is not None]
    if not values:
        return number
    row = Row(metric, metric_label(metric), values[0])
    return alike((value.value for value in values), row.write)


def _tone(item: Line, move: Move | None) -> Tone:
    if move is None or not move.significant:
        return ""
    if item.low_is_bad is None:
        return "strong"
    return "healthy" if (move.change.value > 0) == item.low_is_bad else "warn"


def _changes(result: SideBySide) -> Section:
    """Every change with interval and p."""
    deciding: list[Cells] = []
    moved: list[Cells] = []
    for item in result.metrics:
        decides = item.metric in DECIDING
        for side, move in zip(result.runs, item.moves, strict=True):
            if move is not None and (decides or move.significant):
                word = "moved" if move.significant else ""
                word = NO_CHANGE.get(move.outcome, move.outcome) if move.outcome else word
                row = (
                    metric_label(item.metric).label,
                    side.run,
                    Cell(move.change, "strong", format=_change(item.metric)),
                    move.p_value,
                    Cell(word, TONE_OF.get(move.outcome, "dim")),
                    BASIS[move.basis],
                )
                (deciding if decides else moved).append(row)
    other = Section(
        "other-changes",
        "Other metrics",
        tables=[Table(CHANGES, moved)],
        short=plural(len(moved), "significant change"),
    )
    return Section(
        "changes",
        f"Changes from {result.runs[0].run}",
        "The metrics that decide.",
        tables=[Table(CHANGES, deciding)],
        parts=[other],
        folded=False,
    )


def _facts(result: SideBySide) -> Section:
    runs = (
        Column(side.run, text, of=partial(lambda at, fact: fact.values[at], index))
        for index, side in enumerate(result.runs)
    )
    columns = (*WHERE_WHAT, *runs)
    partly = [
        fact
        for fact in result.facts
        if ABSENT in fact.values and not fact.name.startswith("environment.")
    ]
    named = [fact for fact in result.facts if fact not in partly]
    other = Section(
        "partly-known",
        "Said by some of the runs alone",
        tables=[Table.of(columns, partly)],
        short=f"{plural(len(partly), 'fact')}: other versions of mismatch record other facts",
    )
    return Section(
        "facts",
        "What differs",
        SAID,
        tables=[Table.of(columns, named)],
        sentences=() if named else ["No version, setting or kernel that all runs name differs."],
        parts=[other],
        folded=False,
    )
