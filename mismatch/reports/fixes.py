"""The fixes that were tried, in words and rows, for every rendering.

Everything is said of uncorrected numbers. Fixes of the loss are listed apart: they change weights
and no log-probability, so they have no "after".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mismatch.analysis.corrections.recipes import Recipe
from mismatch.analysis.corrections.types import Preview
from mismatch.errors import MismatchError
from mismatch.experiments.fixes.base import EstimatorFix, FixOutcome, FixTable, check_command
from mismatch.experiments.fixes.catalogue import labels
from mismatch.experiments.fixes.pages import settings_of
from mismatch.experiments.fixes.planning import chosen_of
from mismatch.metrics.inference import LEVEL
from mismatch.reports import quantities
from mismatch.reports.fixes_said import K3, MEAN, sentences
from mismatch.reports.text import line
from mismatch.types import Estimate, Report

TITLE = "Fixes tried"
LEAD = (
    "Each fix was applied for real and the mismatch measured again, without any weight in the "
    "loss. Changes are after minus before: below 0 is better."
)
KINDS = {"train": "trainer", "engine": "engine", "both": "engine and trainer"}
RESULTS = {
    "better": "helps",
    "worse": "worsens",
    "mixed": "mixed",
    "none": "not significant",
    None: "not measured",
}
MARKS = {"better": "✓", "worse": "✕", "mixed": "!", "none": "~", None: "–"}
TONES = {"better": "healthy", "worse": "critical", "mixed": "warn", "none": "none", None: "none"}
REMOVES_NOTHING = "it reweighs the loss and removes nothing"
HIDES = "it hides the mismatch and does not remove it"
TAIL, ROUTES = "logprob_abs_diff_p999", "routing_disagree_layer"


@dataclass(frozen=True, slots=True)
class Cell:
    """A metric without and with the fix; "–" where it was not measured."""

    before: str
    after: str

    @property
    def both(self) -> str:
        return f"{self.before} → {self.after}"


@dataclass(frozen=True, slots=True)
class FixRow:
    """One fix as a line of a table; all texts.

    Attributes:
        change: of k3, with its 95 % interval.
        result: "helps", "worsens" …; "(mean)": by mean |delta| alone, not by k3.
        how: whether the change was measured on the same tokens.
        p: probability of such changes by chance, adjusted for all that were tried.
        tone: class of the badge.
    """

    id: str
    side: str
    summary: str
    flags: str
    k3: Cell
    mean: Cell
    tail: Cell
    routes: Cell
    change: str
    interval: str
    mean_change: str
    mean_interval: str
    how: str
    p: str
    result: str
    mark: str
    tone: str
    seconds: str
    memory: str
    verdict: str
    reason: str
    best: bool


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do about the best: the command, and each framework's setting."""

    id: str
    command: str
    recipes: tuple[tuple[str, tuple[Recipe, ...]], ...]


@dataclass(frozen=True, slots=True)
class LossRow:
    """A fix of the loss that was asked for, with what the corrections' preview says of it."""

    id: str
    label: str
    kept: str
    ess: str
    bias: str
    remark: str


def section(report: Report) -> dict[str, Any] | None:
    """What the HTML template shows; None where no fix was tried."""
    made = report.result("fixes")
    if made is None:
        return None
    return {
        "lead": LEAD,
        "sentences": sentences(report),
        "rows": measured_rows(made),
        "others": other_rows(made),
        "losses": loss_rows(report),
        "advice": advice(made),
        "method": line(made.method),
        "left_out": [line(reason) for reason in made.left_out],
    }


def measured_rows(made: FixTable) -> list[FixRow]:
    """Best first."""
    return [_row(made, one) for one in made.outcomes if one.measured]


def other_rows(made: FixTable) -> list[FixRow]:
    """What does not apply here, or failed while it ran; each with its reason."""
    return [_row(made, one) for one in made.outcomes if not one.measured]


def _row(made: FixTable, one: FixOutcome) -> FixRow:
    change = one.paired or one.difference or one.changes.get(K3)
    mean = one.changes.get(MEAN)
    how = "the same tokens" if one.paired else "sampled anew, by prompt"
    return FixRow(
        id=line(one.id),
        side=KINDS[one.side],
        summary=line(one.summary),
        flags=line(one.flags),
        k3=_cell(one, K3),
        mean=_cell(one, MEAN),
        tail=_cell(one, TAIL),
        routes=_cell(one, ROUTES),
        change=signed(change),
        interval=interval(change),
        mean_change=signed(mean),
        mean_interval=interval(mean),
        how=how if one.measured else "",
        p=_p_value(one),
        result=_result(one),
        mark=MARKS[one.outcome],
        tone=TONES[one.outcome],
        seconds=_seconds(one.cost.seconds),
        memory=_memory(one.cost.peak_bytes),
        verdict=one.verdict_after.status if one.verdict_after else quantities.MISSING,
        reason=line(one.reason),
        best=one.id in (made.best, made.best_together),
    )


def _result(one: FixOutcome) -> str:
    """In a word; where the change of k3 alone would not be significant it says so."""
    told = {metric for metric, p in one.p_values.items() if p <= LEVEL}
    return f"{RESULTS[one.outcome]}{' (mean)' if told == {MEAN} else ''}"


def _cell(one: FixOutcome, metric: str) -> Cell:
    write = quantities.percent if metric == ROUTES else quantities.number

    def text(values: dict[str, Estimate]) -> str:
        found = values.get(metric)
        return quantities.MISSING if found is None else write(found.value)

    return Cell(text(one.before), text(one.after))


def signed(estimate: Estimate | None) -> str:
    """A change, with its sign."""
    if estimate is None:
        return quantities.MISSING
    return ("+" if estimate.value > 0 else "") + quantities.number(estimate.value, 2)


def interval(estimate: Estimate | None) -> str:
    """Its 95 % interval."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return quantities.MISSING
    low, high = (
        ("+" if end > 0 else "") + quantities.number(end, 2)
        for end in (estimate.low, estimate.high)
    )
    return f"{low} … {high}"


def _p_value(one: FixOutcome) -> str:
    """The smaller of the metrics that decide; they are adjusted already."""
    if not one.p_values:
        return quantities.MISSING
    least = min(one.p_values.values())
    return "< 0.001" if least < 0.001 else quantities.number(least, 2)


def _seconds(seconds: float | None) -> str:
    return quantities.MISSING if seconds is None else f"{quantities.number(seconds, 2)} s"


def _memory(peak: int | None) -> str:
    if peak is None:
        return ""
    return f"{quantities.number(peak / 2**30, 2)} GiB"


def loss_rows(report: Report) -> list[LossRow]:
    """The fixes of the loss; they are never ranked among the others."""
    made = report.result("fixes")
    if made is None:
        return []
    previews = (
        {one.id: one for one in report.result("corrections").previews}
        if report.result("corrections")
        else {}
    )
    return [_loss_row(one, previews.get(one.correction or "")) for one in made.estimators]


def _loss_row(one: EstimatorFix, preview: Preview | None) -> LossRow:
    bias = preview.token.bias if preview and preview.token else None
    remark = HIDES if one.hides else REMOVES_NOTHING
    return LossRow(
        id=line(one.id),
        label=preview.label if preview else line(one.summary),
        kept=quantities.percent(preview.kept_tokens) if preview else quantities.MISSING,
        ess=quantities.percent(preview.ess.value)
        if preview and preview.ess
        else quantities.MISSING,
        bias=f"{signed(bias)} ({interval(bias)})" if bias else quantities.MISSING,
        remark=f"{remark}; {line(one.reason)}" if one.reason else remark,
    )


def advice(made: FixTable) -> list[Advice]:
    """How to use the best single fix and the best combination, where they help.

    Settings that stand with the first are not repeated with the second.
    """
    found: list[Advice] = []
    seen: set[str] = set()
    for name in dict.fromkeys(one for one in (made.best, made.best_together) if one):
        known = {label: label.partition("=")[0] for label in labels(name)}
        settings = [(one, settings_of(id)) for one, id in known.items() if id not in seen]
        seen.update(known.values())
        command = line(command_of(made.outcome(name)))
        found.append(Advice(line(name), command, tuple(settings)))
    return found


def command_of(row: FixOutcome) -> str:
    """The command that makes a check with a fix or a combination.

    From the catalogue; a row that another version wrote, with other flags, keeps its own text.
    """
    try:
        flags = [chosen.flags for chosen in chosen_of(row.id)]
    except MismatchError:  # no longer in the catalogue
        flags = []
    if " ".join(map(str, flags)) != row.flags:
        return f"mismatch check … {row.flags}"
    return check_command(flags)


__all__ = ["LEAD", "TITLE", "advice", "labels", "measured_rows", "section", "sentences"]
