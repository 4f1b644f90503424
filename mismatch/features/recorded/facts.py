"""What a dump says apart from numbers, as an artefact of the run and an analysis of the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mismatch.analysis.cause_results import Cause
from mismatch.codec import from_json
from mismatch.features.recorded import told
from mismatch.features.recorded.ratios import Ratios
from mismatch.features.recorded.rows import LEAST_ROWS, RowGroups, row_groups
from mismatch.keys import TRAIN
from mismatch.metrics.row_sums import Step
from mismatch.metrics.token import exp_minus_linear
from mismatch.reports.formatting import plural
from mismatch.run.manifest import damage_named
from mismatch.specs import CheckSpec
from mismatch.types import Check, CheckStatus, Estimate, Judgement, Pair

FILE = "recorded.json"
SCHEMA = "mismatch.recorded/1"


@dataclass(frozen=True)
class Finding:
    """Values of a dump that cannot be true."""

    what: str
    """E.g. ``NaN or null``, or how the lengths of arrays differ."""
    side: str
    """rollout or trainer; "": of neither alone."""
    tokens: int
    sequences: int
    first: str = ""
    """Where the first of them is."""

    def __str__(self) -> str:
        where = f"{self.side}: " if self.side else ""
        rows = plural(self.sequences, "sequence")
        of = f"{plural(self.tokens, 'token')} in {rows}" if self.tokens else rows
        at = f", the first at {self.first}" if self.first else ""
        return f"{where}{self.what} ({of}{at})"


@dataclass(frozen=True)
class RecordedFacts:
    """The file recorded.json."""

    file: str
    format: str
    findings: tuple[Finding, ...] = ()
    attributes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Attribute -> its value for every sequence of the rollout."""
    steps: tuple[Step, ...] = ()
    """Of all sequences of the dump, as is ``whole``."""
    whole: Step | None = None
    ratios: Ratios = field(default_factory=Ratios)
    schema: str = SCHEMA


@dataclass(frozen=True)
class RecordedReport:
    """What a report says of a dump."""

    file: str
    format: str
    findings: tuple[Finding, ...] = ()
    rows: RowGroups | None = None
    """None: the dump holds one side only."""
    steps: tuple[Step, ...] = ()
    """Empty where the dump holds a single step."""
    whole: Step | None = None
    """Of all sequences, where the report holds a part of them; else None."""
    growth: told.Growth | None = None
    """None: the mismatch does not grow over the steps."""
    columns: told.Columns = field(default_factory=told.Columns)
    ratios: str = ""
    """What the recorded importance ratios are; "": there are none."""
    ratios_agree: bool = True
    """They are of the two columns."""
    anchor: str = ""
    """Which policy PPO's ratio is anchored to."""
    idle: str = ""
    """That PPO's clip acts on nothing while the sides move apart."""
    hidden: str = ""
    """What all tokens or a step show, and the compared tokens do not."""

    @property
    def unseen(self) -> tuple[str, ...]:
        """What could not be looked for."""
        return (self.columns.unseen,) if self.columns.unseen else ()


def of_run(run_dir: Path, spec: CheckSpec) -> RecordedReport | None:
    """Return what a run's dump says; None where the run was not made of one."""
    from mismatch.run import store

    if not (run_dir / FILE).exists():
        return None
    rows: RowGroups | None = None
    whole: Step | None = None
    columns, k3 = told.Columns(), 0.0
    with damage_named(run_dir / FILE):
        facts = from_json(RecordedFacts, store.load_document(run_dir, FILE))
        if {TRAIN, "recorded:decode"} <= set(store.scoring_names(run_dir)):
            rollout = store.load_rollout(run_dir)
            decode = store.load_scoring(run_dir, "recorded:decode")
            train = store.load_scoring(run_dir, TRAIN)
            pair = Pair.of(rollout, decode, train)
            rows = row_groups(pair, rollout, facts.attributes)
            if facts.whole is not None and facts.whole.tokens > rollout.n_actions:
                whole = facts.whole
            columns = told.columns_of(pair)
            with np.errstate(over="ignore"):
                k3 = float(exp_minus_linear(pair.delta).mean())
    steps = facts.steps if len(facts.steps) > 1 else ()
    hidden = told.disagreement(whole, steps, k3, rollout.n_actions) if rows is not None else ""
    return RecordedReport(
        facts.file, facts.format, facts.findings, rows, steps, whole,
        told.growth_of(steps) if rows is not None else None, columns,
        facts.ratios.sentence(), facts.ratios.agree(),
        "" if rows is None else facts.ratios.anchor(facts.format), facts.ratios.idle(steps), hidden,
    )  # fmt: skip


def causes(result: RecordedReport) -> tuple[Cause, ...]:
    """Return what rows and steps say of causes."""
    return told.causes_of(result.rows, result.growth, result.steps)


def reason(result: RecordedReport) -> str:
    """Return what is said behind the verdict's reason."""
    return result.growth.sentence() if result.growth is not None else ""


def measured(result: RecordedReport, metrics: dict[str, Estimate]) -> dict[str, Estimate]:
    """Return metrics of all tokens, where a part of them was compared."""
    return metrics if result.whole is None else told.of_all(metrics, result.whole)


def judged(result: RecordedReport, judgements: tuple[Judgement, ...]) -> tuple[Judgement, ...]:
    """Return judgements in which the worst step has its say."""
    return told.judged_by_steps(judgements, result.steps)


def checks(result: RecordedReport) -> tuple[Check, ...]:
    """Return the checks that the verdict reads: values that cannot be true, and rows apart."""
    values = Check("recorded-values", "passed", "every recorded log-probability is a number")
    if result.findings:
        # Values are missing where a list was made longer, too.
        lists = any(not finding.tokens for finding in result.findings)
        fix = "find where these values arise; a trainer's NaN is often an overflow of fp16"
        if lists:
            fix = "write a value for every sampled token on both sides: one is lost or added where "
            fix += "the lists are made, e.g. for the end of a response"
        fix += ". The numbers are of all others"
        values = Check("recorded-values", "failed", "; ".join(map(str, result.findings)), fix)
    if result.rows is None:
        return (values,)
    more = []
    if (found := result.columns).fault:
        more.append(Check("recorded-columns", "inconclusive", found.fault, found.fix))
    if result.growth is not None:
        fix = "compare the weights of both sides after a sync: mismatch sync-probe"
        more.append(Check("recorded-growth", "warning", result.growth.sentence(), fix))
    if result.ratios:
        fix = "compare the log-probabilities that its ratio is made of with these columns: another "
        fix += "pass, another version of the weights, or a correction that this page does not know"
        status: CheckStatus = "passed" if result.ratios_agree else "warning"
        fix = "" if result.ratios_agree else fix
        more.append(Check("recorded-ratios", status, result.ratios, fix))
    if result.idle:
        fix = "anchor the ratio to the sampler, or correct by exp(trainer - rollout): mismatch "
        more.append(Check("recorded-clip", "warning", result.idle, f"{fix}corrections RUN"))
    if result.hidden:
        worst = told.worst_of(result.steps, "k3")
        fix = (
            f"look at this step alone: --step {worst.step}"
            if worst
            else "look at parts of the dump alone: some prompts that were not drawn are far apart"
        )
        more.append(Check("recorded-steps", "warning", result.hidden, fix))
    return *more, *_of_rows(result, result.rows, values)


def _of_rows(result: RecordedReport, rows: RowGroups, values: Check) -> tuple[Check, ...]:
    if found := rows.sentence():
        return values, Check("which-rows", "warning", found, rows.advice())
    if rows.rows < LEAST_ROWS:
        few = f"{rows.rows} rows could be scored, {LEAST_ROWS} are needed"
        return values, Check("which-rows", "not_tested", few)
    return values, Check("which-rows", "passed", "all sequences are equally far apart")
