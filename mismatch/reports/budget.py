"""The error budget of a run: which scorings form its chain, and how it is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.analysis.growth import BESIDE, ENGINE_REPEATED
from mismatch.metrics.budget import Step
from mismatch.reports import quantities
from mismatch.reports.figures import Picture
from mismatch.reports.svg import ACCENT, FAINT, INK, SECOND, drawing, to_svg
from mismatch.reports.text import line
from mismatch.run.scorings import TRAIN
from mismatch.types import Estimate, Report

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """One step as texts; "–" where there is nothing to say.

    Attributes:
        label: at most 26 characters.
        pair: the two scorings.
        told: whether the step's mean can be told from 0.
    """

    label: str
    pair: str
    mean: str
    mean_interval: str
    size: str
    share: str
    share_interval: str
    told: bool


_LABELS = {
    ("decode", "prefill"): "engine: decode → prefill",
    ("decode", "reference"): "engine decode → float32",
    ("decode", "train"): "engine decode → trainer",
    ("prefill", "reference"): "engine prefill → float32",
    ("prefill", "train"): "engine prefill → trainer",
    ("reference", "train"): "float32 → trainer",
}


def steps(report: Report) -> list[BudgetRow]:
    """The chain, in order; then what it adds up to."""
    budget = report.result("budget")
    if budget is None:
        return []
    whole = BudgetRow(
        "together",
        f"{line(budget.left)} / {line(budget.right)}",
        quantities.number(budget.mean.value),
        _interval(budget.mean, quantities.number),
        quantities.MISSING,
        "100.0 %" if budget.spread.value > 0 else quantities.MISSING,
        quantities.MISSING,
        _told(budget.mean),
    )
    return [*(_row(step, _label(step)) for step in budget.steps), whole]


def beside(report: Report) -> list[BudgetRow]:
    """What was measured beside the chain."""
    if report.result("budget") is None:
        return []
    return [_row(step, _beside_label(step)) for step in report.result("budget").beside]


def remarks(report: Report) -> list[str]:
    """What was not run and why, and what else a reader must know; one sentence each."""
    if report.result("budget") is None:
        return []
    gaps = [
        f"{line(gap.step)}: not run, because {line(gap.reason)}"
        for gap in report.result("budget").gaps
    ]
    carried = [
        f"{_label(step)}: a few tokens carry it, so the interval of its share may be too narrow"
        for step in report.result("budget").steps
        if step.share is not None and "heavy-tail" in step.share.flags
    ]
    return gaps + carried + [line(note) for note in report.result("budget").notes]


def largest(report: Report) -> str:
    """Which step carries most of the spread, as a sentence; empty without a choice."""
    budget = report.result("budget")
    if budget is None or len(budget.steps) < 2:
        return ""
    known = [step for step in budget.steps if step.share is not None]
    if not known:
        return "Every step is exactly 0."
    step = max(known, key=lambda one: one.share.value if one.share else 0.0)
    assert step.share is not None
    return (
        f"{_label(step)} carries {_percent(step.share.value)} of the spread of delta "
        f"({_interval(step.share, _percent)})."
    )


def _row(step: Step, label: str) -> BudgetRow:
    share = step.share
    return BudgetRow(
        label,
        f"{line(step.left)} / {line(step.right)}",
        quantities.number(step.mean.value),
        _interval(step.mean, quantities.number),
        quantities.number(step.size.value),
        _percent(share.value) if share else quantities.MISSING,
        _interval(share, _percent) if share else quantities.MISSING,
        _told(step.mean),
    )


def _percent(share: float) -> str:
    """One decimal: shares below that decide nothing."""
    if not np.isfinite(share):
        return quantities.MISSING
    text = f"{100.0 * share:.1f}"
    return f"{'0' if text in ('-0.0', '0.0') else text} %"


def _interval(estimate: Estimate, write: Callable[[float], str]) -> str:
    if estimate.low is None or estimate.high is None:
        return quantities.MISSING
    return f"{write(estimate.low)} … {write(estimate.high)}"


def _told(estimate: Estimate) -> bool:
    low, high = estimate.low, estimate.high
    return low is not None and high is not None and (low > 0 or high < 0)


def _label(step: Step) -> str:
    kinds = _kind(step.left), _kind(step.right)
    return _LABELS.get(kinds, f"{line(step.left)} → {line(step.right)}")


def _kind(name: str) -> str:
    engine, _, variant = name.partition(":")
    return "reference" if engine == "reference" else variant or "train"


def _beside_label(step: Step) -> str:
    variant = _kind(step.right)
    if not step.right.startswith(TRAIN):
        return ENGINE_REPEATED
    return BESIDE.get(variant, line(step.right))


def pictures(report: Report) -> list[Picture]:
    """Waterfalls of the spread and of mean delta; none for a chain of one step."""
    budget = report.result("budget")
    if budget is None or len(budget.steps) < 2:
        return []
    shares = [step.share for step in budget.steps if step.share is not None]
    labels = [_short(step) for step in budget.steps]
    made = []
    if len(shares) == len(budget.steps):
        made.append(
            Picture(
                "budget-spread",
                "Which step makes delta vary",
                "Each bar starts where the one before ended; a step that undoes part of another "
                "goes down. The shares add up to 100 %. Lines: 95 % intervals of the step.",
                _waterfall("budget-spread", labels, shares, 100.0, "share of the spread, %"),
            )
        )
    made.append(
        Picture(
            "budget-mean",
            "Which step moves the mean",
            "Mean delta is the one number that adds up exactly along the chain. A bar whose line "
            "crosses its own start cannot be told from 0.",
            _waterfall(
                "budget-mean", labels, [s.mean for s in budget.steps], 1.0, "mean delta, nats"
            ),
        )
    )
    return made


def _short(step: Step) -> str:
    names = {"reference": "float32", "train": "trainer"}
    left, right = (names.get(kind, kind) for kind in (_kind(step.left), _kind(step.right)))
    return f"{left} →\n{right}"


def _waterfall(name: str, labels: list[str], parts: list[Estimate], scale: float, axis: str) -> str:
    values = np.array([part.value for part in parts]) * scale
    tops = np.cumsum(values)
    starts = tops - values
    with drawing() as (figure, axes):
        x = np.arange(len(parts) + 1)
        colors = [ACCENT if value >= 0 else SECOND for value in values]
        axes.bar(x[:-1], values, bottom=starts, color=colors, width=0.6)
        axes.bar(x[-1:], tops[-1:], color=FAINT, width=0.6)
        for index, part in enumerate(parts):
            axes.plot([x[index] - 0.3, x[index] + 1.3], [tops[index]] * 2, color=INK, lw=0.8)
            if part.low is not None and part.high is not None:
                ends = [starts[index] + scale * end for end in (part.low, part.high)]
                axes.plot([x[index]] * 2, ends, color=INK, lw=1.2)
        axes.axhline(0.0, color=INK, lw=0.8)
        axes.set_xticks(x, [*labels, "together"])
        axes.margins(y=0.12)
        axes.set_ylabel(axis)
        return to_svg(figure, name, f"Waterfall: {axis} per step")


def view(report: Report) -> dict[str, Any] | None:
    """What the HTML section shows; None without a budget."""
    if report.result("budget") is None:
        return None
    return {
        "steps": steps(report),
        "beside": beside(report),
        "remarks": remarks(report),
        "largest": largest(report),
        "pictures": pictures(report),
    }
