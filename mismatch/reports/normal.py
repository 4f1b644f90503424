"""“Is this normal?”: the measured value beside what others measured on the same class of stack."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from mismatch.analysis.published_values import Reference, references_for
from mismatch.reports import summary
from mismatch.reports.quantities import number, plural, times
from mismatch.reports.text import line
from mismatch.reports.words import words_for
from mismatch.types import Report

COMPARED = (summary.HEADLINE, "k3_kl")


@dataclass(frozen=True, slots=True)
class Rung:
    """One value on the ladder of measurements; ``ours`` is the run that is reported."""

    value: str
    who: str
    note: str = ""
    source: str = ""
    ours: bool = False

    @property
    def detail(self) -> str:
        return f"{self.note}; {self.source}" if self.note else self.source


@dataclass(frozen=True, slots=True)
class Ladder:
    """This run among published values of one metric, largest first."""

    label: str
    rungs: tuple[Rung, ...]


def elsewhere(report: Report, metric: str) -> tuple[Reference, ...]:
    """Published values of a metric on working stacks of the same class."""
    return references_for(metric, report.verdict.levels)


def marks(report: Report, metric: str) -> list[tuple[float, str]]:
    """The same values for a gauge: (value, what it is)."""
    return [
        (other.value, f"{number(other.value)}: {other.model}, {other.stack} ({other.source})")
        for other in elsewhere(report, metric)
    ]


def ladders(report: Report) -> list[Ladder]:
    """A ladder per compared metric for which something was published."""
    found = [_ladder(report, metric) for metric in COMPARED]
    return [ladder for ladder in found if ladder is not None]


def _ladder(report: Report, metric: str) -> Ladder | None:
    others = elsewhere(report, metric)
    estimate = summary.headline(report).metrics.get(metric)
    if not others or estimate is None:
        return None
    rungs = [
        (
            other.value,
            Rung(number(other.value), f"{other.model}, {other.stack}", other.note, other.source),
        )
        for other in others
    ]
    ours = Rung(number(estimate.value), f"this run: {summary.model_name(report)}", ours=True)
    rungs.append((estimate.value, ours))
    rungs.sort(key=lambda rung: -rung[0])
    return Ladder(words_for(metric).label, tuple(rung for _, rung in rungs))


def sentences(report: Report) -> list[str]:
    """The same in two sentences: against others, and against this run's own noise."""
    others = elsewhere(report, summary.HEADLINE)
    estimate = summary.headline(report).metrics.get(summary.HEADLINE)
    stack = line(report.verdict.levels)
    said = []
    if others and estimate is not None:
        ratio = times(estimate.value / median(other.value for other in others))
        values = plural(len(others), "value")
        said.append(f"mean |delta| is {ratio} the median of {values} published for {stack}.")
    elif estimate is not None:
        said.append(f"No published mean |delta| for stacks of this class ({stack}) is known to us.")
    else:
        said.append("Unknown: there is no mean |delta| to set beside others'.")
    return said + _beside_noise(report)


def _beside_noise(report: Report) -> list[str]:
    noise = [row for row in summary.noise_rows(report) if row.relative is not None]
    if not noise:
        return []
    largest = max(noise, key=lambda row: row.relative or 0.0)
    if not largest.relative:
        return ["This run's own noise is 0: every pass that should agree with another one does."]
    return [
        f"Of this run's passes that should agree, “{largest.words.label}” are furthest apart: "
        f"{largest.beside}."
    ]
