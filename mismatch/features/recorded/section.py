"""What a dump says of the values in it, which rows are off, and the steps of a run."""

from __future__ import annotations

from mismatch.features.recorded.facts import RecordedReport
from mismatch.features.recorded.rows import LEAST_ROWS
from mismatch.reports.formatting import capital, count, number, percent, text
from mismatch.reports.section import Column, Section, Table
from mismatch.types import Report

FINDINGS = (
    Column("value", text, of="what"),
    Column("side", text, of="side"),
    Column("tokens", count, of="tokens"),
    Column("sequences", count, of="sequences"),
)
STEPS = (
    Column("step", count, of="step"),
    Column("tokens", count, 2, of="tokens"),
    Column("mean |delta|", number, detail="nats", of="abs_diff"),
    Column("k3 KL", number, detail="nats per token", of="k3"),
    Column("PPO clips", percent, 1, of="clipped"),
    Column("effective size", percent, 1, detail="of the sequences", of="ess"),
    Column("entropy", number, 2, detail="trainer, nats", of="entropy"),
    Column("reward", number, 2, of="reward"),
)
SHARED = (
    Column("attribute", text, of="attribute"),
    Column("values", text, of=lambda shared: ", ".join(shared.values)),
    Column("agrees with the groups", percent, of="agreement"),
)
# Bounds of k3 and mean |delta| whose first crossing is said: healthy and unfit (bf16, dense).
CROSSED = ((2e-3, "k3", "k3"), (0.013, "k3", "k3"), (0.08, "abs_diff", "mean |delta|"))


def section(result: RecordedReport, report: Report) -> Section:
    """Show the values that cannot be true, the rows that are off, and the steps."""
    found = result.rows.sentence() if result.rows is not None else ""
    grown = result.growth.sentence() if result.growth is not None else ""
    ratios = "" if result.ratios_agree else result.ratios
    warned = (result.columns.fault, grown, result.idle, result.hidden, found, ratios)
    sentences = []
    for bound, name, label in CROSSED:
        # k3 beyond every number is stored as null, and read as NaN.
        measured = [step for step in result.steps if step.tokens]
        step = next((step for step in measured if not getattr(step, name) <= bound), None)
        if step is not None:
            sentences.append(f"{label} is first above {bound:g} at step {step.step}.")
    for empty in (step.step for step in result.steps if not step.tokens):
        sentences.append(f"At step {empty} no token has a number on both sides.")
    if result.growth is not None:
        sentences.insert(0, f"{capital(result.growth.sentence())}.")
    if result.ratios:
        sentences.append(f"{capital(result.ratios)}.")
    if result.anchor:
        sentences.append(f"PPO's ratio is anchored to {result.anchor}.")
    if result.idle:
        sentences.insert(0, f"{capital(result.idle)}.")
    if result.hidden:
        sentences.insert(0, f"{capital(result.hidden)}.")
    enough = result.rows is not None and result.rows.rows >= LEAST_ROWS
    if result.rows is not None and enough and not found:
        sentences = [f"All {result.rows.rows} rows are about equally far apart.", *sentences]
    if (whole := result.whole) is not None:
        sentences = [
            f"All {whole.tokens:,} tokens in {whole.sequences:,} sequences: mean |delta| "
            f"{number(whole.abs_diff)} nats, k3 {number(whole.k3)} nats per token. The steps are "
            "of all of them, everything else is of sequences drawn by prompt.",
            *sentences,
        ]
    shared = () if result.rows is None else result.rows.shared
    return Section(
        "recorded",
        "The recorded run",
        f"Read from {result.file}, in the format of {result.format}.",
        warnings=[capital("; ".join(filter(None, warned)))] if any(warned) else [],
        sentences=sentences,
        tables=[
            Table.of(FINDINGS, result.findings),
            Table.of(SHARED, shared),
            Table.of(STEPS, result.steps),
        ],
        short=next(filter(None, warned), "")
        or ("All rows are about equally far apart." if enough else "Too few rows."),
    )
