"""The noise of this run: each side against itself and against float32."""

from __future__ import annotations

from mismatch.keys import REFERENCE, TRAIN, Key
from mismatch.reports.formatting import number, percent, text
from mismatch.reports.section import Cell, Column, Section, Table
from mismatch.reports.summary import HEADLINE, noise_rows
from mismatch.types import Report

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


def section(report: Report) -> Section | None:
    """Return the passes that repeat a side, or that show its rounding; None without them."""
    rows = noise_rows(report)
    if not rows:
        return None
    repeated = [row for row in rows if row.relative is not None and row.agree]
    largest = max(repeated, key=lambda row: row.relative or 0.0, default=None)
    if largest is None:
        itself = ""
    elif largest.relative:
        itself = f"At most {largest.beside} ({largest.words.label})."
    else:
        itself = "None: every pass that was repeated gave the same numbers."
    return Section(
        "noise",
        "Noise of this run",
        NOISE,
        sentences=float32(report),
        tables=[Table.of(PASSES, rows)],
        short=itself,
    )


def float32(report: Report) -> list[str]:
    """Return how far each side is from float32: the one that is further off is where to look."""
    sides = {
        "trainer" if Key(pair.left).side == TRAIN else "engine": pair.metrics[HEADLINE]
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
    return [f"{sentence}: the {far} is farther off."]
