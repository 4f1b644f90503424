"""“Is this normal?”: this run beside others' measurements and beside its own noise."""

from __future__ import annotations

import math
from statistics import median

from mismatch.analysis.thresholds import Reference, references_for
from mismatch.reports.formatting import line, number, percent, text, times
from mismatch.reports.metric_labels import metric_label
from mismatch.reports.section import Cell, Cells, Column, Section, Table
from mismatch.reports.summary import HEADLINE, headline, model_name, noise_rows
from mismatch.run.store import REFERENCE, TRAIN
from mismatch.types import Report

COMPARED = (HEADLINE, "k3_kl")
ORDERS = "Other models, lengths and reductions: orders of magnitude, no levels."
NEITHER = "neither side clearly more"
NOISE = (
    "A side against itself, which should agree, and each side against float32, on the same tokens. "
    "Rows are independent comparisons; they do not sum."
)
PASSES = (
    Column(
        "pass", text, of=lambda row: Cell(row.words.label, note=f"{row.words.meaning} · {row.pair}")
    ),
    Column("mean |delta|", of="mean"),
    Column("largest", of="largest"),
    Column("of headline", percent, of="relative", tone="bar"),
)


def section(report: Report) -> tuple[Section, ...]:
    """Values published for stacks of this class; then passes beside the headline's."""
    ladders = [ladder for metric in COMPARED if (ladder := _ladder(report, metric))]
    normal = Section(
        "normal",
        "Published values",
        tables=ladders,
        notes=[ORDERS] if ladders else (),
        short=_beside_others(report),
    )
    noise = Section(
        "noise",
        "Noise of this run",
        NOISE,
        sentences=float32(report),
        tables=[Table.of(PASSES, noise_rows(report))],
        short="".join(_itself(report)),
    )
    return (normal, noise) if noise.tables else (normal,)


def published(report: Report, metric: str) -> tuple[Reference, ...]:
    """Values of a metric on working stacks of the same class."""
    return references_for(metric, report.verdict.levels)


def _ladder(report: Report, metric: str) -> Table | None:
    """This run among published values of one metric, largest first."""
    others = published(report, metric)
    estimate = headline(report).metrics.get(metric)
    if not others or estimate is None:
        return None
    rows: list[tuple[float, Cells]] = [
        (other.value, (other.value, Cell(f"{other.model}, {other.stack}", note=other.note),
                       other.source))
        for other in others
    ]  # fmt: skip
    ours = Cell(f"this run: {model_name(report)}", "strong")
    rows.append((estimate.value, (Cell(estimate.value, "strong"), ours, None)))
    columns = (
        Column(metric_label(metric).label, number),
        Column("measured on", text),
        Column("source", text, 1),
    )
    return Table(columns, [row for _, row in sorted(rows, key=lambda row: -row[0])])


def _beside_others(report: Report) -> str:
    """Against published values, as a ratio to their median."""
    others = published(report, HEADLINE)
    estimate = headline(report).metrics.get(HEADLINE)
    stack = line(report.verdict.levels)
    if estimate is None:
        return "Unknown: there is no mean |delta| to compare."
    if not others:
        return f"No published mean |delta| for stacks of this class ({stack}) is known to us."
    ratio = times(estimate.value / median(other.value for other in others))
    return f"Mean |delta| is {ratio} the median of {len(others)} values published for {stack}."


def _itself(report: Report) -> list[str]:
    noise = [row for row in noise_rows(report) if row.relative is not None and row.agree]
    if not noise:
        return []
    largest = max(noise, key=lambda row: row.relative or 0.0)
    if not largest.relative:
        return ["None: every pass that was repeated gave the same numbers."]
    return [f"At most {largest.beside} ({largest.words.label})."]


def float32(report: Report) -> list[str]:
    """How far each side is from float32: the one that is further off is where to look."""
    sides = {
        "trainer" if pair.left.partition(":")[0] == TRAIN else "engine": pair.metrics[HEADLINE]
        for pair in report.noise_floor
        if pair.right == REFERENCE and HEADLINE in pair.metrics
    }
    if len(sides) < 2:
        return []
    near, far = sorted(sides, key=lambda side: sides[side].value)
    sentence = (
        f"Against float32 the trainer is off by {number(sides['trainer'].value)} nats, the engine "
        f"by {number(sides['engine'].value)}"
    )
    low, high = sides[far].low, sides[near].high
    if low is None or high is None or low <= high:
        return [f"{sentence}: {NEITHER}."]
    ratio = sides[far].value / sides[near].value if sides[near].value > 0 else math.inf
    return [f"{sentence}: the {far} is {times(ratio)} as far off."]
