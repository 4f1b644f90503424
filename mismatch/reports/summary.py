"""Facts of a report that several sections tell: rows of metrics, noise, next steps."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from mismatch.analysis.catalogue import catalogue
from mismatch.analysis.cause_results import KINDS, LITTLE, Cause
from mismatch.analysis.explained import lead_of
from mismatch.analysis.levels import (
    ENTROPY,
    MORE,
    MORE_PROMPTS,
    ONE_FORM,
    TOO_LITTLE,
    prompts_to_decide,
)
from mismatch.analysis.results import ORDER, Finding, check_id
from mismatch.errors import in_list
from mismatch.facts import Replaced
from mismatch.frameworks import BY_TITLE
from mismatch.keys import REFERENCE, Key
from mismatch.metrics import METRICS
from mismatch.metrics.inference import KINDS_SEEN
from mismatch.reports.formatting import (
    Format,
    bound,
    capital,
    line,
    near_one,
    number,
    percent,
    plural,
    text,
    times,
    wording,
)
from mismatch.reports.section import RUN, Cell, Column, Table
from mismatch.specs import FILE_SCORER, OWN_SCORER
from mismatch.types import Check, Comparison, Estimate, Judgement, NotTested, Report, SidePair

if TYPE_CHECKING:
    from mismatch.experiments.results import FixOutcome


@dataclass(frozen=True, slots=True)
class MetricLabel:
    """How one metric is introduced to a stranger.

    Attributes:
        label: at most 24 characters, for tables.
        meaning: one sentence.
        share: whether the value is a share, written in percent.
    """

    label: str
    meaning: str
    share: bool = False


def metric_label(name: str, *, sampled_by_left: bool = True) -> MetricLabel:
    """Return the words of a metric; one that this page does not know keeps the metric's name.

    Where neither side sampled the tokens, the KL estimators estimate no KL and are called scores.
    """
    metric = METRICS.get(name)
    words = MetricLabel(name, "")
    if metric is not None:
        words = MetricLabel(metric.label, metric.meaning, share=metric.unit == "share")
    if sampled_by_left or "KL" not in words.label or name.startswith("exact_"):
        return words
    meaning = "the KL formula on tokens that neither side sampled: a score, no estimate of a KL"
    return MetricLabel(words.label.replace("KL", "divergence score"), meaning)


def noise_label(pair: SidePair) -> MetricLabel:
    """Return what a pair of the noise floor compares, from the scorings' names."""
    left, right = pair.left, pair.right
    engine = {"decode", "prefill"}
    kinds = {Key(name).kind for name in (left, right)}
    if kinds == engine:
        words = ("engine: prefill / decode", "the engine reads back the tokens it sampled")
    elif REFERENCE in (left, right):
        side = "engine" if kinds & engine else "trainer"
        words = (f"{side} vs float32", f"what the {side}'s precision and kernels cost")
    else:
        apart = (f"{left} vs {right}", "two passes that should agree")
        words = next((words for kind, words in _TRAINER.items() if kind in kinds), apart)
    return MetricLabel(*words)


_TRAINER = {
    "regrouped": ("trainer: regrouped", "the same tokens in other micro-batches"),
    "grad": ("trainer: gradients on", "the training forward against the scoring forward"),
    "alone": ("trainer: alone", "one sequence per forward pass"),
    "repeated": ("trainer: repeated", "the same pass once more"),
}


# Close to 1 three significant digits hide everything that matters.
AROUND_ONE = {"token_mult_prob_error", "probs_pearson", "ratio_mean", "ratio_min", "ratio_max"}
HEADLINE, MEDIAN = "logprob_abs_diff_mean", "logprob_abs_diff_p50"
TELLING = (HEADLINE, "k3_kl", "ratio_outside_2", "clip_fraction", "ess_seq", "exact_kl")


@dataclass(frozen=True, slots=True)
class Row:
    """One metric as a line of a table, with its level where it has one."""

    metric: str
    words: MetricLabel
    estimate: Estimate
    judgement: Judgement | None = None

    of_a_part: bool = False
    """The number that decides is of a part of the run, and not of what was compared."""

    @property
    def value(self) -> str:
        return self.write(self.estimate.value)

    @property
    def cell(self) -> Cell:
        """Value and interval, as this metric is written."""
        return Cell(self.estimate, format=self.write)

    def healthy(self, bound: float) -> str:
        """Return the healthy bound with its direction."""
        return f"{'≥' if self.low_is_bad else '≤'} {self._bound(bound)}"

    def unfit(self, bound: float) -> str:
        """Return the unfit bound with its direction; "never" where no value can lie beyond it."""
        if self.low_is_bad and bound <= 0.0:
            return "never"
        return f"{'<' if self.low_is_bad else '>'} {self._bound(bound)}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader has to know before trusting the number."""
        words = wording("flags")
        notes = [words.get(flag, line(flag)) for flag in self.estimate.flags]
        judgement = self.judgement
        if self.of_a_part:
            notes.append("of the worst step, which decides")
        if judgement and judgement.inconclusive and judgement.status == "healthy":
            notes.append("its interval spans a level; k3 of all tokens, the same KL, decides")
        elif judgement and judgement.inconclusive:
            wanted = judgement.deciding_prompts
            decides = f"; about {plural(wanted, 'prompt')} would decide" if wanted else ""
            notes.append(f"the interval spans a level{decides}")
        return tuple(notes)

    @property
    def low_is_bad(self) -> bool:
        return self.judgement is not None and self.judgement.healthy > self.judgement.unfit

    def _bound(self, value: float) -> str:
        return f"{100 * value:g} %" if self.words.share else bound(value)

    @property
    def write(self) -> Format:
        """How its values are written."""
        if self.words.share:
            return percent
        return near_one if self.metric in AROUND_ONE else number


def headline(report: Report) -> Comparison:
    """Return the comparison that the verdict is about: what sampled against the trainer.

    Where a check failed so early that nothing could be compared, the names of the two sides
    without any metric.
    """
    if report.comparisons:
        return report.comparisons[0]
    names = {side.get("mode"): name for name, side in reversed(report.fingerprints.items())}
    return Comparison(names.get("decode", "rollout"), names.get("train", "train"), False, {})


def trainer_code(report: Report) -> tuple[str, ...]:
    """Return whose code computed the trainer's log-probabilities, where that is to be said."""
    facts = report.fingerprints.get(headline(report).train, {})
    if code := facts.get("code"):
        own = "" if facts.get("backend") == FILE_SCORER else " (the framework's code)"
        return (f"trainer: {line(str(code))}{own}",)
    preset = (report.run.get("spec") or {}).get("preset")
    return (f"trainer: mismatch's FSDP2 loop; stored preset: {line(preset)}",) * bool(preset)


def replaced(report: Report, cause: Cause | None = None) -> list[Replaced]:
    """Return the trainer's settings that could not run here, with what ran in their place.

    Args:
        cause: those alone that can make this cause; None: all.
    """
    facts = report.fingerprints.get(headline(report).train, {})
    found = facts.get("replaced") or []
    if cause is None:
        return found
    return [each for each in found if cause.id in each["causes"] and cause.side != "engine"]


@dataclass(frozen=True, slots=True)
class Known:
    """How a cause is known, and how much of the mismatch it is.

    Attributes:
        how: as a phrase.
        share: of mean |delta|, which the measured fix or the experiment removed, or else the
            detector computed; None: not measured.
        gone: an experiment or a measured fix took it out of the run.
    """

    how: str
    share: Estimate | None
    gone: bool = False


def known_by(report: Report, cause: Cause) -> Known:
    """Return how a cause is known: what was measured of it comes first."""
    table, told = report.result("fixes"), report.result("explain")
    for row in table.outcomes if table else ():
        from mismatch.experiments.results import TESTS  # there already: a row is of that module

        taken = TESTS.get(row.id.partition("=")[0])
        if taken is not None and cause.id in taken.own and row.outcome == "better":
            share = row.removed.get(HEADLINE)
            return Known(f"confirmed by fix {row.id}", share, share is not None)
    for each in told.experiments if told else ():
        if each.outcome == "confirmed" and cause.id in (*each.tests, each.names):
            share = cause.effect if each.gone is None else each.gone
            return Known(f"confirmed by experiment {each.id}", share, each.gone is not None)
    if cause.status == LITTLE:
        return Known("stated by a side, and of little weight by experiment", cause.effect)
    if cause.status != "confirmed":
        open_still = "--explain confirms or rules it out"
        if told is not None:
            open_still = "no experiment decided"
        elif headline(report).rollout == Key.of("recorded", "decode"):
            open_still = "a dump cannot be run again to confirm it"
        return Known(f"suspected, {open_still}", cause.effect)
    if cause.scored_again:
        return Known("confirmed by another scoring, on one rank", cause.effect)
    stated = cause.stated or cause.fact
    how = "stated by a side and " * stated + "located in its module"
    plain = "stated by a side" if stated else "decided by its pattern in the data"
    return Known(how if cause.located else plain, cause.effect)


def in_place_of(found: Sequence[Replaced]) -> str:
    """Return settings that were replaced, as a phrase."""
    return "; ".join(line(f"{r['what']} {r['ran']} in place of {r['asked']}") for r in found)


def own_setting(found: Sequence[Replaced]) -> str:
    """Return how the run's own settings would be measured; "": nothing was replaced."""
    if not found:
        return ""
    how = [line(each["instead"]) for each in found if each["instead"]]
    also = f"; if your run sets {in_list(how)}, check again with it" if how else ""
    return f"Check on a GPU before you change your run{also}"


def framework_of(report: Report) -> str:
    """Return the title of the framework whose trainer it is; "" where nothing says it."""
    facts = report.fingerprints.get(headline(report).train, {})
    preset = (report.run.get("spec") or {}).get("preset")
    stated = [
        str(name).lower() for name in (facts.get("backend"), facts.get("code"), preset) if name
    ]
    for title in BY_TITLE:
        if any(re.match(rf"{re.escape(title.lower())}\b", name) for name in stated):
            return title
    return ""


def what_to_do(report: Report, cause: Cause) -> str:
    """Return the fix of a cause: how the run's own framework sets it, then the fix itself."""
    entry = catalogue().get(cause.id)
    if entry is None:
        return ""
    setting = entry.frameworks.get(framework_of(report), "")
    own = _in_framework(report, fixes_of(cause), setting)
    return f"{own}{cause.advice or (FOREIGN if foreign(report, cause) else entry.mend)}"


def _in_framework(report: Report, fixes: Sequence[str], setting: str = "") -> str:
    """Return how the run's own framework sets the first fix that it can; "": it is not known.

    Args:
        setting: that is known of it already.
    """
    from mismatch.experiments.fixes.guides import settings_of

    title = framework_of(report)
    for fix in fixes if title else ():
        lines = [line for recipe in settings_of(fix) if recipe.framework == title
                 for line in recipe.lines]  # fmt: skip
        setting = setting or "; ".join(f"`{line}`" for line in lines)
    return f"In {title}: {setting.rstrip('.')}. " if setting else ""


def fixes_of(cause: Cause) -> list[str]:
    """Return the fixes that take out one cause alone, or one among few."""
    from mismatch.experiments.fixes.catalogue import FIXES
    from mismatch.experiments.results import TESTS

    known = {fix.id for fix in FIXES}
    return [id for id, taken in TESTS.items() if cause.id in taken.own and id in known]


def trial_of(report: Report, cause: Cause) -> str:
    """Return the command that measures a cause's fix in this run; "": nothing can be run again."""
    if headline(report).rollout == Key.of("recorded", "decode") or not command(report):
        return ""
    return f"mismatch check --resume {RUN} --fix {(fixes_of(cause) or ['all'])[0]}"


FOREIGN = (
    "Compare the trainer's code with transformers' own model: its attention, head, masks and "
    "positions. A check without --scorer says whether the model itself agrees."
)


def foreign(report: Report, cause: Cause) -> bool:
    """Return whether a cause only says that a trainer is off whose modules cannot be run alone."""
    train = (report.run.get("spec") or {}).get("train") or {}
    others = train.get("scorer", OWN_SCORER) != OWN_SCORER
    return others and cause.side == "trainer" and cause.id in KINDS


def cause_step(report: Report, cause: Cause) -> str:
    """Return the step that fixes a cause."""
    do = what_to_do(report, cause) or "see Causes"
    trial = trial_of(report, cause) if report.result("fixes") is None else ""
    measure = f" Measure it: {trial}" if trial else ""
    return f"Fix {line(cause.id)}: {line(do)}{measure}"


def model_name(report: Report) -> str:
    """Return the model as people call it: the last part of a local path, else the whole hub id."""
    path = PurePath(report.model)
    return line(path.name if path.is_absolute() and path.name else report.model)


def judged_rows(report: Report) -> list[Row]:
    """Return the metrics with levels, in the order of the judgements."""
    comparison = headline(report)
    return [
        _row(comparison, judgement.metric, judgement)
        for judgement in report.verdict.judgements
        if judgement.metric in comparison.metrics
    ]


def most_telling(report: Report) -> list[Row]:
    """Return six judged metrics: none that is left out is worse than one that is shown."""
    rows = judged_rows(report)
    severity = {"broken": 0, "unfit": 0, "inconclusive": 1, "tolerable": 1}

    def rank(row: Row) -> tuple[int, int]:
        status = row.judgement.status if row.judgement else ""
        index = TELLING.index(row.metric) if row.metric in TELLING else len(TELLING)
        return severity.get(status, 2), index

    kept = sorted(rows, key=rank)[:6]
    return [row for row in rows if row in kept]


def all_rows(comparison: Comparison) -> list[Row]:
    """Return every metric of a comparison, without levels."""
    return [_row(comparison, name) for name in [*comparison.metrics, *comparison.routing]]


def _row(comparison: Comparison, name: str, judgement: Judgement | None = None) -> Row:
    estimate = comparison.metrics.get(name) or comparison.routing[name]
    words = metric_label(name, sampled_by_left=comparison.sampled_by_left)
    decides = judgement.value if judgement is not None else math.nan
    if decides != estimate.value and not math.isnan(decides) and not math.isnan(estimate.value):
        estimate = replace(estimate, value=decides, low=None, high=None, flags=())
        return Row(name, words, estimate, judgement, of_a_part=True)
    return Row(name, words, estimate, judgement)


COLUMNS = (
    Column("metric", text, of=lambda row: Cell(row.words.label, note=row.words.meaning)),
    Column("value", interval=0, of="cell"),
)


def metric_tables(rows: list[Row]) -> tuple[Table, ...]:
    """Metrics without levels: numbers in one table, shares in another, the first row's first."""
    kinds = dict.fromkeys(row.words.share for row in rows)
    return tuple(
        Table.of(COLUMNS, [row for row in rows if row.words.share == share]) for share in kinds
    )


def size(report: Report) -> str:
    """Return how much was measured.

    Example: "5,063 tokens, 64 sequences, 16 prompts".
    """
    first = next(iter(headline(report).metrics.values()), None)
    if first is None:
        return "nothing compared"
    counts = ("token", first.n_tokens), ("sequence", first.n_sequences), ("prompt", first.n_prompts)
    return ", ".join(plural(value, noun) for noun, value in counts)


def in_plain_words(report: Report) -> str:
    """Say by how much the two sides differ: the median token, the mean, the tail.

    The mean is ruled by the few tokens that are far off.
    """
    metrics = headline(report).metrics
    mean = metrics.get(HEADLINE)
    if mean is None or not math.isfinite(mean.value):
        return "The two sides could not be compared token by token."
    if mean.value == 0:
        return "Both sides give every token exactly the same probability."
    median, far = metrics.get(MEDIAN), metrics.get("ratio_outside_2")
    parts = []
    if median is not None:
        same = median.value == 0
        parts.append(f"Median token: {'no difference' if same else _off_by(median.value)}")
    parts.append(f"mean |delta| {number(mean.value, 2)} nats")
    if far is not None:
        share = "no token differs" if far.value == 0 else f"{percent(far.value)} of tokens differ"
        parts.append(f"{share} by more than 2×")
    return f"{capital('; '.join(parts))}."


def _off_by(size: float) -> str:
    """Return a distance of log-probabilities as one of probabilities."""
    gap = math.expm1(min(size, 700.0))
    if gap < 1e-5:
        return "less than 0.001 % apart"
    return f"{percent(gap)} apart" if gap < 1 else f"{times(gap + 1)} apart"


@dataclass(frozen=True, slots=True)
class Noise:
    """One pair of the noise floor compared with the headline's mean |delta|.

    Attributes:
        mean, largest: |delta|; None where it was not measured.
        relative: its mean |delta| over the headline's; None where that cannot be said.
        agree: whether the two should agree: one side with itself, not a side with float32.
    """

    words: MetricLabel
    pair: str
    agree: bool
    mean: Estimate | None
    largest: Estimate | None
    relative: float | None

    @property
    def beside(self) -> str:
        """Its size against the headline's, as a phrase."""
        share = self.relative
        if share is not None and share >= 1:
            return f"{times(share)} the headline's mean |delta|"
        return f"{percent(share)} of the headline's mean |delta|"


def noise_rows(report: Report) -> list[Noise]:
    """Return every pair next to the headline, with how large it is against that."""
    whole = headline(report).metrics.get(HEADLINE)
    rows = []
    for pair in report.noise_floor:
        mean, largest = pair.metrics.get(HEADLINE), pair.metrics.get("logprob_abs_diff_max")
        share = mean.value / whole.value if mean and whole and whole.value > 0 else None
        agree = REFERENCE not in (pair.left, pair.right)
        names = f"{pair.left} / {pair.right}"
        rows.append(Noise(noise_label(pair), names, agree, mean, largest, share))
    return rows


def deciding(report: Report) -> Check | Row | None:
    """Return what the verdict rests on: the check or the metric that decided; None: neither did."""
    verdict = report.verdict
    if verdict.correctness is not None and verdict.correctness.status == verdict.status:
        status = {"broken": "failed", "inconclusive": "inconclusive"}.get(verdict.status, "warning")
        found = [check for check in checks(report, status) if check.id not in ("causes", ENTROPY)]
        if verdict.status == "inconclusive":
            found = [c for c in checks(report, "warning") if c.id in TOO_LITTLE] + found
        lead = lead_of(report.result("causes"), report.checks)
        measured = findings(report)
        # A number before a statement; what the leading cause explains before what it does not.
        own = [each for each in found if lead and each in lead.checks] or found
        said = [each for each in own if each.id in measured] or own
        if said and verdict.status != "healthy":
            return said[0]
    rows = [row for row in judged_rows(report) if row.judgement]
    worst = [row for row in rows if row.judgement and row.judgement.status == verdict.status]
    worst.sort(key=lambda row: row.judgement.inconclusive if row.judgement else False)
    k3 = [row for row in rows if row.metric == "k3_kl"]
    return next(iter((worst if verdict.status != "healthy" else k3) or k3), None)


def findings(report: Report) -> dict[str, Finding]:
    """Return the square's worst finding by the id of its check."""
    square = report.result("square")
    worst_last = (
        sorted(square.findings, key=lambda each: ORDER.index(each.standing)) if square else []
    )
    return {check_id(each): each for each in worst_last}


def checks(report: Report, *statuses: str) -> list[Check]:
    """Return the checks of the given statuses, in that order."""
    return [check for status in statuses for check in report.checks if check.status == status]


def cautions(rows: list[Row]) -> list[str]:
    """Return the notes of several rows, each said once for all metrics that it concerns."""
    concerned: dict[str, list[str]] = {}
    for row in rows:
        for note in row.notes:
            concerned.setdefault(note, []).append(row.words.label.split(",")[0])
    return [
        f"{'all' if len(labels) == len(rows) > 1 else ', '.join(labels)}: {note}"
        for note, labels in concerned.items()
    ]


def untested(report: Report) -> list[NotTested]:
    """Return what the run could not see, each once: a check may be named in both lists."""
    skipped = [NotTested(check.id, check.detail) for check in checks(report, "not_tested")]
    return list(dict.fromkeys([*skipped, *report.not_tested]))


def next_steps(report: Report) -> list[str]:
    """Return what to do now, most urgent first; never empty.

    What an inconclusive verdict lacks comes first. Then a confirmed cause; checks that follow from
    it have no step. Fix failures first, then warnings, which may be consequences of them. A fix
    that was measured to end well leaves nothing else to do.
    """
    causes = report.result("causes")
    made = replaced(report, causes.ranked[0]) if causes and causes.ranked else []
    steps, ends_well = [*filter(None, [own_setting(made)]), *_missing(report)], False
    fixes = report.result("fixes")
    if fixes is not None and fixes.best_together is not None:
        best = fixes.outcome(fixes.best_together)
        from mismatch.experiments.fixes.catalogue import labels

        own = _in_framework(report, [id.partition("=")[0] for id in labels(best.id)])
        again = f"check again: {line(applied(report, best))}" if best.flags else ""
        then = f". {line(own)}Then {again}" if own else f", then {again}" if again else ""
        steps.append(f"Apply {line(best.id)}{then}")
        after = best.verdict_after
        ends_well = after is not None and after.status in ("healthy", "tolerable")
    known = bool(steps)
    lead = None if ends_well else lead_of(report.result("causes"), report.checks)
    first = causes.ranked[0] if causes and causes.ranked and not ends_well else None
    first = lead.cause if lead is not None else first
    if first is not None and not first.made_here and report.verdict.status != "healthy":
        steps.append(cause_step(report, first))
    explained = lead.checks if lead is not None else ()
    rest = [check for check in report.checks if check not in explained]
    wrong = [check for check in rest if check.status in ("failed", "inconclusive")]
    # One that has no fix follows from others, and that of the causes is said with the cause.
    wrong = wrong or [c for c in rest if c.status == "warning" and c.fix and c.id != "causes"]
    wrong = [] if ends_well else wrong
    more = any(map(_wants_more, wrong))
    if report.verdict.status == "inconclusive":
        wrong = [check for check in wrong if check.id != ENTROPY]
    if report.verdict.status in ("inconclusive", "tolerable"):  # these end with a number of prompts
        wrong = [check for check in wrong if not _wants_more(check)]
    steps += [f"Fix {line(check.id)}: {line(check.fix or check.detail)}" for check in wrong]
    if report.verdict.status == "broken" and not (causes and causes.ranked):
        # A dump has nothing that could be run again.
        none = report.result("explain") or headline(report).rollout == Key.of("recorded", "decode")
        steps += [] if none else _experiment(wrong)
    if report.verdict.status == "tolerable":
        steps += [_measure(report)] if more else _more_prompts(report)
    # Weights in two forms are a cause already, and the float32 reference holds only one of them.
    two_forms = any(check.fix == ONE_FORM for check in checks(report, "warning"))
    off = any(item.status != "healthy" for item in report.verdict.judgements)
    undecided = off and report.verdict.status not in ("healthy", "inconclusive")
    if undecided and not (two_forms or checks(report, "failed") or known):
        steps.append(_where_to_look(report))
    return steps or [f"None. After an upgrade check again: mismatch compare NEW --against {RUN}"]


def applied(report: Report, best: FixOutcome) -> str:
    """Return the command that makes this check with a fix."""
    from mismatch.reports.sections.fixes import command_of

    return command_of(best, command(report))


def _experiment(wrong: Sequence[Check]) -> list[str]:
    """Return the experiment that would name the cause of a broken run for which none is named."""
    failed = [check.id for check in wrong if check.status == "failed"]
    how = f"mismatch check --resume {RUN} --explain"
    if any(id in OF_ENGINES_PATH for id in failed):
        return [
            f"No cause was named. {how} scores the tokens in a fresh engine and reads its prefix "
            "cache: that tells a decode path, a cache and a batch apart"
        ]
    return [f"No cause was named. {how} takes out one after another"] if failed else []


OF_ENGINES_PATH = ("displaced-engine", "engine-self-agreement", "excess-engine")


def _missing(report: Report) -> list[str]:
    """Return the step that answers the reason of an inconclusive verdict, as it was reasoned.

    The order is that of mismatch/analysis/levels.py: correctness before fitness.
    """
    verdict, spec = report.verdict, report.run.get("spec") or {}
    if verdict.status != "inconclusive":
        return []
    if verdict.correctness is not None and verdict.correctness.status == "inconclusive":
        if report.result("recorded") is not None:  # a dump cannot be made longer
            return [_float32(report, spec)]
        if little := [check for check in checks(report, "warning") if check.id in TOO_LITTLE]:
            fix = little[0].fix
            return [_measure(report) if fix == MORE else capital(line(fix))]
        undecided = [each for each in checks(report, "inconclusive") if each.id != ENTROPY]
        if undecided:  # one that data does not decide has a different fix
            return [_measure(report)] if any(map(_wants_more, undecided)) else []
        if report.result("square") is None:
            return [_float32(report, spec)]
    certain = [check for check in checks(report, "inconclusive") if check.id == ENTROPY]
    if certain and not any(item.status == "inconclusive" for item in verdict.judgements):
        return [capital(line(certain[0].fix))]
    if not verdict.judgements:
        how = "VLLM_SERVER_DEV_MODE=1 for vLLM, --dtype for SGLang"
        return [f"Start the servers so that they state their dtype: {how}"]
    return _more_prompts(report)


def _wants_more(check: Check) -> bool:
    """Return whether only more data answers a check: it comes first, with a number."""
    return check.id in TOO_LITTLE or check.fix in (MORE, MORE_PROMPTS)


def _float32(report: Report, spec: dict[str, Any]) -> str:
    """Return how to get the passes that tell a fault from rounding."""
    if headline(report).rollout == "recorded:decode":
        how = "Score the tokens with the model (mismatch read-rollouts, then score)"
    elif spec.get("quick"):
        how = "Run again without --depth quick"
    elif not spec.get("noise_floor", True):
        how = "Run again without --no-noise-floor"
    else:
        how = "Let the float32 passes run (an engine started here; --dry-run names what fits)"
    return f"{how}: only the float32 passes tell a fault from rounding"


def _measure(report: Report) -> str:
    """Return how many prompts make intervals half as wide, and decide every metric that is open.

    Intervals of fewer than KINDS_SEEN also reach to what may not have been drawn.
    """
    measured = headline(report).metrics.values()
    half = 4 * max((estimate.n_prompts for estimate in measured), default=16)
    decide = [item.deciding_prompts or 0 for item in report.verdict.judgements]
    return f"Measure more: --num-prompts {max([half, KINDS_SEEN, *decide])}"


def _more_prompts(report: Report) -> list[str]:
    """Return how many prompts would decide the metrics whose intervals span a level."""
    verdict, measured = report.verdict, headline(report).metrics
    judged = [item for item in verdict.judgements if item.status != "healthy"]
    spans = [item for item in judged if item.inconclusive and item.metric in measured]
    deciding = [item for item in spans if item.status == verdict.status] or spans
    if wanted := prompts_to_decide(deciding):
        return [f"Measure more: --num-prompts {wanted} would decide the verdict"]
    few = any(measured[item.metric].n_prompts < KINDS_SEEN for item in deciding)
    if deciding and (verdict.status == "inconclusive" or few):
        return [f"{_measure(report)}; a few tokens carry the number: look at them"]
    alone = "More prompts alone will not decide this: look at the worst tokens and prompts"
    return [alone] if deciding else []


def _where_to_look(report: Report) -> str:
    """Of passes that should agree: a side's distance from float32 may be healthy rounding."""
    noise = [row for row in noise_rows(report) if row.agree and row.relative is not None]
    largest = max(noise, key=lambda row: row.relative or 0.0, default=None)
    if largest is None or not largest.relative or largest.relative < 0.1:
        step = "Look at what ran on each side (attention, experts, precision)"
        agrees = ": each side agrees with itself, so the difference is between them"
        return step + (agrees if largest is not None else "")
    return (
        f"Look first at “{largest.words.label}” ({largest.words.meaning}): it alone is "
        f"{largest.beside}"
    )


def command(report: Report) -> str:
    """Return the command that made this report, "" where the run does not say."""
    made_by = report.run.get("command", "")
    return line(" ".join(map(str, made_by)) if isinstance(made_by, list | tuple) else made_by)
