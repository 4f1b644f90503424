"""What a dump says of the values in it, which rows are off, and the steps of a run."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from mismatch.features.recorded.facts import RecordedReport
from mismatch.features.recorded.rows import LEAST_ROWS
from mismatch.features.recorded.told import FEW_STEPS
from mismatch.metrics.row_sums import Step
from mismatch.reports.formatting import capital, count, number, percent, text
from mismatch.reports.section import Column, Figure, Section, Table
from mismatch.reports.svg import ACCENT, SECOND
from mismatch.types import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    Column("ESS", percent, 1, detail="of sequences", of="ess"),
    Column("entropy", number, 2, detail="trainer, nats", of="entropy"),
    Column("reward", number, 2, of="reward"),
)
SHARED = (
    Column("attribute", text, of="attribute"),
    Column("values", text, of=lambda shared: ", ".join(shared.values)),
    Column("agrees with the groups", percent, of="agreement"),
)
# Metrics of the levels table whose first crossing is said; what a step has of them.
CROSSED = {"k3_kl": ("k3", "k3"), "logprob_abs_diff_mean": ("abs_diff", "mean |delta|")}


def section(result: RecordedReport, report: Report) -> Section:
    """Show the values that cannot be true, the rows that are off, and the steps."""
    found = result.rows.sentence() if result.rows is not None else ""
    grown = result.growth.sentence() if result.growth is not None else ""
    ratios = "" if result.ratios_agree else result.ratios
    warned = (result.columns.fault, result.idle, result.hidden, found, ratios)
    sentences = []
    measured = [step for step in result.steps if step.tokens]
    for judged in report.verdict.judgements if len(measured) > 1 else ():
        if judged.metric not in CROSSED:
            continue
        name, label = CROSSED[judged.metric]
        for word, bound in (("healthy", judged.healthy), ("unfit", judged.unfit)):
            # k3 beyond every number is stored as null, and read as NaN.
            step = next((step for step in measured if not getattr(step, name) <= bound), None)
            if step is not None:
                text = f"{label} is first beyond its {word} level, {bound:g}, at step {step.step}."
                sentences.append(text)
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
    if result.rows is not None and enough and not found and result.growth is None:
        sentences = [f"All {result.rows.rows:,} rows are about equally far apart.", *sentences]
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
        figures=_figures(measured, result, report),
        folded=result.growth is None,
        tables=[
            Table.of(FINDINGS, result.findings),
            Table.of(SHARED, shared),
            Table.of(STEPS, result.steps),
        ],
        short=next(filter(None, (grown, *warned)), "")
        or ("All rows are about equally far apart." if enough else "Too few rows."),
    )


def _figures(steps: list[Step], result: RecordedReport, report: Report) -> tuple[Figure, ...]:
    """Draw k3 over the steps, where there are three of them with a k3 above 0."""
    if len(steps) < FEW_STEPS or not all(0 < step.k3 < math.inf for step in steps):
        return ()
    title = f"k3 from {number(steps[0].k3)} at step {steps[0].step} to {number(steps[-1].k3)}"
    caption = "k3 in nats per token by step; log axis. Dashed: healthy and unfit levels."
    name, paint = "recorded-steps", partial(_curve, steps, report)
    return (Figure(name, f"{title} at step {steps[-1].step}", caption, paint),)


def _curve(steps: list[Step], report: Report, axes: Axes) -> str:
    axes.plot([step.step for step in steps], [step.k3 for step in steps], "o-", ms=3, color=ACCENT)
    for judged in report.verdict.judgements:
        for bound in (judged.healthy, judged.unfit) if judged.metric == "k3_kl" else ():
            axes.axhline(bound, color=SECOND, lw=1.2, dashes=(4, 3))
    axes.set(xlabel="step", ylabel="k3, nats per token (log)", yscale="log")
    axes.set_xticks([step.step for step in steps][:: 1 + len(steps) // 10])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    return ""
