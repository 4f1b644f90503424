"""What every rendering says: rows, sides, noise and next steps, as text without a layout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import PurePath

from mismatch.reports import quantities
from mismatch.reports.formatting import text
from mismatch.reports.section import Cell, Column, Table
from mismatch.reports.text import line
from mismatch.reports.words import ROUTING, Words, noise_words, words_for
from mismatch.types import Check, Comparison, Estimate, Judgement, Report

HEADLINE = "logprob_abs_diff_mean"
# Shown below the judged metrics, where the comparison has them.
UNJUDGED = ("kl", "ratio_mean", "ess_token", "logprob_abs_diff_p99", "logprob_abs_diff_max")


@dataclass(frozen=True, slots=True)
class Row:
    """One metric as a line of a table. All texts; "–" where there is nothing to say."""

    metric: str
    words: Words
    estimate: Estimate
    judgement: Judgement | None = None

    @property
    def value(self) -> str:
        return self.write(self.estimate.value)

    @property
    def interval(self) -> str:
        """The 95 % interval."""
        low, high = self.estimate.low, self.estimate.high
        if low is None or high is None:
            return quantities.MISSING
        return f"{self.write(low)} … {self.write(high)}"

    @property
    def status(self) -> str:
        return self.judgement.status if self.judgement else ""

    @property
    def healthy(self) -> str:
        """The healthy bound with its direction."""
        return self._bound(("≤", "≥"), self.judgement.healthy) if self.judgement else ""

    @property
    def critical(self) -> str:
        """The critical bound with its direction."""
        return self._bound((">", "<"), self.judgement.critical) if self.judgement else ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader has to know before trusting the number."""
        known = {
            "heavy-tail": "a few tokens carry it, so the interval may be too narrow",
            "heavy-prompts": "a few prompts carry it, so the interval may be too narrow",
            "few-prompts": "few prompts, so the interval may be too narrow",
            "one-prompt": "one prompt only, hence no interval",
            "few-tokens": "too few tokens for an interval",
            "no-events": "no such token was seen: the upper end is a one-sided bound",
            "overflow": "too large for a number",
        }
        notes = [known.get(flag, line(flag)) for flag in self.estimate.flags]
        judgement = self.judgement
        if judgement and judgement.inconclusive:
            wanted = judgement.deciding_prompts
            decides = (
                f"; about {quantities.plural(wanted, 'prompt')} would decide" if wanted else ""
            )
            notes.append(f"the interval spans a level{decides}")
        return tuple(notes)

    @property
    def low_is_bad(self) -> bool:
        return self.judgement is not None and self.judgement.healthy > self.judgement.critical

    def _bound(self, signs: tuple[str, str], value: float) -> str:
        text = f"{100 * value:g} %" if self.words.share else quantities.bound(value)
        return f"{signs[self.low_is_bad]} {text}"

    def write(self, value: float) -> str:
        if self.words.share:
            return quantities.percent(value)
        near_one = 0.9 < value < 1.1 and self.metric in _AROUND_ONE
        return f"{value:.4f}" if near_one else quantities.number(value)


# Close to 1 three significant digits hide everything that matters.
_AROUND_ONE = {
    "token_mult_prob_error",
    "probs_pearson",
    "ratio_mean",
    "ppl_ratio",
    "ratio_min",
    "ratio_max",
    "seq_mult_prob_error_max",
    "seq_mult_prob_error_mean",
    "seq_mult_prob_error_min",
    "seq_ratio_geo",
    "seq_ratio_geo_min",
    "seq_ratio_geo_max",
}


def headline(report: Report) -> Comparison:
    """The comparison that the verdict speaks of: the law that sampled against the trainer.

    Where a check failed so early that nothing could be compared, the names of the two sides
    without any metric.
    """
    if report.comparisons:
        return report.comparisons[0]
    names = {side.get("mode"): name for name, side in reversed(report.fingerprints.items())}
    return Comparison(names.get("decode", "rollout"), names.get("train", "train"), False, {})


def model_name(report: Report) -> str:
    """The model as people call it: the last part of a local path, else the whole hub id."""
    path = PurePath(report.model)
    return line(path.name if path.is_absolute() and path.name else report.model)


def judged_rows(report: Report) -> list[Row]:
    """The metrics with levels, in the order of the judgements."""
    comparison = headline(report)
    return [
        _row(comparison, judgement.metric, judgement)
        for judgement in report.verdict.judgements
        if judgement.metric in comparison.metrics
    ]


def other_rows(report: Report) -> list[Row]:
    """A few metrics without levels, for context."""
    comparison = headline(report)
    judged = {row.metric for row in judged_rows(report)}
    return [
        _row(comparison, name)
        for name in UNJUDGED
        if name in comparison.metrics and name not in judged
    ]


def all_rows(comparison: Comparison) -> list[Row]:
    """Every metric of a comparison, without levels."""
    return [_row(comparison, name) for name in [*comparison.metrics, *comparison.routing]]


def routing_rows(report: Report) -> list[Row]:
    """The routing table of the headline comparison, known names first."""
    routing = headline(report).routing
    known = [name for name in ROUTING if name in routing]
    return [_row(headline(report), name) for name in [*known, *(routing.keys() - set(known))]]


def _row(comparison: Comparison, name: str, judgement: Judgement | None = None) -> Row:
    estimate = comparison.metrics.get(name) or comparison.routing[name]
    words = words_for(name, sampled_by_left=comparison.sampled_by_left)
    return Row(name, words, estimate, judgement)


def metric_table(rows: list[Row]) -> Table:
    """Metrics without levels; what each means is small print."""
    columns = (Column("metric", text), Column("value", interval=0))
    return Table(
        columns,
        tuple(
            (
                Cell(row.words.label, note=row.words.meaning),
                Cell(row.estimate, format=row.write),
            )
            for row in rows
        ),
    )


def size(report: Report) -> str:
    """How much was measured.

    Example: "5,063 tokens, 64 sequences, 16 prompts".
    """
    estimate = next(iter(headline(report).metrics.values()), None)
    if estimate is None:
        return "nothing compared"
    counts = {
        "token": estimate.n_tokens,
        "sequence": estimate.n_sequences,
        "prompt": estimate.n_prompts,
    }
    return ", ".join(quantities.plural(value, noun) for noun, value in counts.items())


def in_plain_words(report: Report) -> str:
    """By how much the two sides differ, as a sentence without a Greek letter."""
    estimate = headline(report).metrics.get(HEADLINE)
    if estimate is None or not math.isfinite(estimate.value):
        return "The two sides could not be compared token by token."
    if estimate.value == 0:
        return "Both sides give every token exactly the same probability."
    gap = math.expm1(min(estimate.value, 700.0))
    amount = quantities.percent(gap) if gap < 1 else f"a factor of {quantities.number(gap + 1, 2)}"
    sentence = f"The two sides' probabilities of a token typically differ by {amount}"
    far = headline(report).metrics.get("ratio_outside_2")
    if far is None:
        return sentence + "."
    share = "no token" if far.value == 0 else f"{quantities.percent(far.value)} of the tokens"
    return f"{sentence}; {share} by more than a factor of 2."


@dataclass(frozen=True, slots=True)
class Noise:
    """One pair of the noise floor beside the headline's mean |delta|.

    Attributes:
        relative: its mean |delta| over the headline's; None where that cannot be said.
    """

    words: Words
    pair: str
    mean: str
    largest: str
    relative: float | None

    @property
    def beside(self) -> str:
        """Its size against the headline's, as a phrase."""
        of = "of" if self.relative is not None and self.relative < 1 else ""
        return f"{self.share} {of} the headline's mean |delta|".replace("  ", " ")

    @property
    def share(self) -> str:
        if self.relative is None:
            return quantities.MISSING
        return (
            quantities.percent(self.relative)
            if self.relative < 1
            else quantities.times(self.relative)
        )


def noise_rows(report: Report) -> list[Noise]:
    """Every pair that should agree, with how large it is against the headline."""
    whole = headline(report).metrics.get(HEADLINE)
    rows = []
    for pair in report.noise_floor:
        mean = pair.metrics.get(HEADLINE)
        largest = pair.metrics.get("logprob_abs_diff_max")
        relative = mean.value / whole.value if mean and whole and whole.value > 0 else None
        rows.append(
            Noise(
                noise_words(pair),
                f"{line(pair.left)} / {line(pair.right)}",
                quantities.number(mean.value if mean else None),
                quantities.number(largest.value if largest else None),
                relative,
            )
        )
    return rows


def checks(report: Report, *statuses: str) -> list[Check]:
    """The checks of the given statuses, in that order."""
    return [check for status in statuses for check in report.checks if check.status == status]


def cautions(rows: list[Row]) -> list[str]:
    """The notes of several rows, each said once for all metrics that it concerns."""
    concerned: dict[str, list[str]] = {}
    for row in rows:
        for note in row.notes:
            concerned.setdefault(note, []).append(row.words.label.split(",")[0])
    return [
        f"{'all' if len(labels) == len(rows) > 1 else ', '.join(labels)}: {note}"
        for note, labels in concerned.items()
    ]


def untested(report: Report) -> list[str]:
    """What the run could not see, each once: a check may be named in both lists."""
    skipped = [f"{check.id}: {check.detail}" for check in checks(report, "not_tested")]
    return [line(reason) for reason in dict.fromkeys([*skipped, *report.not_tested])]


def next_steps(report: Report) -> list[str]:
    """What to do now, most urgent first; never empty."""
    steps = [
        f"Fix {line(check.id)}: {line(check.fix or check.detail)}"
        for check in checks(report, "failed", "warning")
    ]
    rows = judged_rows(report)
    wanted = [
        row.judgement.deciding_prompts or 0
        for row in rows
        if row.judgement and row.judgement.inconclusive
    ]
    if report.verdict.status == "warn" and wanted:
        if all(wanted):
            step = f"Measure more: --num-prompts {max(wanted)} would narrow the interval enough"
            steps.append(f"{step} to decide")
        elif any(check.id == "enough-data" for check in checks(report, "warning")):
            pass  # its fix says so
        else:
            steps.append(
                "More prompts alone will not decide this: look at the worst tokens and prompts"
            )
    steps += _fixes(report)
    # Weights in two forms are a cause already, and the float32 reference holds only one of them.
    known = any(check.id == "weights-as-loaded" for check in checks(report, "warning"))
    if report.verdict.status != "healthy" and not (
        known or checks(report, "failed") or _fixes(report)
    ):
        steps.append(_where_to_look(report))
    if not steps:
        steps.append(
            "Nothing to mend. Keep report.json, and check again after a change of engine, kernel, "
            "dtype or model"
        )
    return steps


def _fixes(report: Report) -> list[str]:
    """The fixes that helped, where some were tried."""
    made = report.result("fixes")
    if made is None or made.best_together is None:
        return []
    best = made.outcome(made.best_together)
    how = f" ({line(best.flags)})" if best.flags else ""
    return [f"Use {line(best.id)}{how}: “Fixes tried” says how much it helps, and how to set it"]


def _where_to_look(report: Report) -> str:
    noise = [row for row in noise_rows(report) if row.relative is not None]
    largest = max(noise, key=lambda row: row.relative or 0.0, default=None)
    if largest is None or not largest.relative or largest.relative < 0.1:
        return (
            "Look at what ran on each side (attention, experts, precision): no pass that should "
            "agree with itself explains the difference"
        )
    return (
        f"Look first at “{largest.words.label}” ({largest.words.meaning}): it alone is "
        f"{largest.beside}"
    )


def verdict_line(report: Report) -> str:
    """The last line of the terminal's output, and the first of every other rendering.

    Example: "verdict: HEALTHY – mean |delta| 0.0111 nats, within the level for bf16 MoE".
    """
    return f"verdict: {report.verdict.status.upper()} – {line(report.verdict.reason)}"


def command(report: Report) -> str:
    """The command that made this report, "" where the run does not say."""
    made_by = report.run.get("command", "")
    return line(" ".join(map(str, made_by)) if isinstance(made_by, list | tuple) else made_by)
