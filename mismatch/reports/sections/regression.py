"""A new run against an old one: a page of its own."""

from __future__ import annotations

from mismatch.experiments.regression.types import Against, AgainstRow, RunSide
from mismatch.reports.formatting import (
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
from mismatch.reports.metric_labels import words_for
from mismatch.reports.section import Cell, Cells, Column, Page, Section, Table, Tone
from mismatch.reports.sections.square import standing_cell
from mismatch.reports.summary import Row
from mismatch.types import Estimate

TONES: dict[str, Tone] = {"worse": "warn", "mixed": "warn"}  # of an outcome that fails nothing
WORDS = {
    "worse": "worse",
    "better": "better",
    "mixed": "mixed",
    "undecided": "undecided",
    "none": "no significant difference",
}
RESULTS: dict[str | None, str] = {
    "worse": "worse",
    "better": "better",
    "undecided": "larger, but undecided",
    "none": "not significant",
    None: "",
}
LEAD = (
    "Each run compares its own engine with its own trainer. The change is new minus old, in nats "
    "unless it is a share. For the metrics that decide, below 0 is better."
)
CHANGED = "Versions, settings and kernels as the runs themselves say."
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
FACTS = (
    Column("where", text, of="where"),
    Column("what", text, of="name", tone="code"),
    Column("old", text, of="old"),
    Column("new", text, of="new"),
)


def page(result: Against) -> Page:
    """What moved, and what has changed between the runs."""
    old, new = result.old, result.new
    return Page(
        kind="a new run against an old one" + (f" · {new.created}" if new.created else ""),
        word=WORDS[result.outcome],
        tone="critical" if result.fails else TONES.get(result.outcome, "healthy"),
        reason=result.reason,
        title=new.model,
        facts=(
            f"{new.run} (new) against {old.run} (old)",
            _side(old),
            _side(new),
        ),
        sections=(_moved(result), *_square(result), _changed(result)),
        file="against",
    )


def _moved(result: Against) -> Section:
    """Deciding metrics first."""
    rows = sorted(result.rows, key=lambda row: row.p_value is None)
    return Section(
        id="moved",
        title="What moved",
        lead=LEAD,
        sentences=sentences(result),
        tables=(Table(MOVED, [_row(row) for row in rows]),),
        notes=(f"{result.method} Margin: {result.margin_text}.",),
        folded=False,
    )


def _row(row: AgainstRow) -> Cells:
    words = words_for(row.metric)
    metric = Row(row.metric, words, row.new)
    outcome = row.outcome or ""
    tones: dict[str, Tone] = {"worse": "critical" if row.beyond else "warn", "better": "healthy"}
    tones["undecided"] = "warn"
    return (
        Cell(words.label, note=words.meaning),
        Cell(row.metric, "code"),
        Cell(row.old, format=metric.write),
        Cell(row.new, format=metric.write),
        Cell(row.change, "strong", format=points if words.share else signed),
        "" if row.p_value is None else row.p_value,
        Cell(_outcome(row), tones.get(outcome, "dim")),
    )


def _outcome(row: AgainstRow) -> str:
    within = ", within the margin" if row.outcome == "worse" and not row.beyond else ""
    return RESULTS[row.outcome] + within


def _side(run: RunSide) -> str:
    """A run in one line."""
    size = f"{plural(run.tokens, 'token')}, {plural(run.sequences, 'sequence')}"
    own = run.verdict.status if run.verdict else "not judged"
    return f"{run.run}: {run.engine} {run.version}".rstrip() + f", {size}, by itself {own}"


def sentences(result: Against) -> list[str]:
    """What the numbers rest on."""
    said = [
        f"{words_for(row.metric).label}: {_outcome(row)}, p {chance(row.p_value)}."
        for row in result.rows
        if row.p_value is not None
    ]
    if result.same_tokens:
        said.append("Both runs hold the same tokens: every change is of the same tokens.")
    else:
        said.append(
            f"{count(result.same_sequences)} of {plural(result.old.sequences, 'sequence')} are the "
            "same in both runs; the engines sampled tokens of their own, so changes are by prompt."
        )
    if result.engines is not None:
        values: dict[str, Estimate] = result.engines.metrics
        mean, most = values["logprob_abs_diff_mean"].value, values["logprob_abs_diff_max"].value
        said.append(
            f"New engine against old engine on these tokens: mean |delta| {number(mean)}, "
            f"largest {number(most)}."
        )
    return said + [f"{capital(line(note))}." for note in result.notes]


def _square(result: Against) -> list[Section]:
    """Excess and gap of both runs; nothing where neither has them."""
    section = Section(
        id="square",
        title="Rounding or fault",
        lead="Excess over a plain forward's rounding, and gaps in float32 (nats), in each run.",
        tables=(Table.of(SQUARE, result.square),),
        folded=False,
    )
    return [section] if result.square else []


def _changed(result: Against) -> Section:
    return Section(
        id="changed",
        title="What changed",
        lead=CHANGED if result.changed else "Nothing of what both runs say of themselves.",
        tables=(Table.of(FACTS, result.changed),),
        folded=False,
    )
