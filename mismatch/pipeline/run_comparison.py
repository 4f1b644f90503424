"""Compare saved runs: every headline metric of each, and how it moved from the first run's.

Reads report.json and tokens.parquet alone. ``report A B C`` shows the comparison; ``compare NEW
--against OLD`` is the same comparison of two runs, refused where they cannot be compared, and with
a gate that says whether the new run fails. A run that lacks its tokens is compared by intervals,
which sees less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mismatch.analysis.levels import exit_code
from mismatch.analysis.results import Evidence, Standing
from mismatch.analysis.thresholds import Thresholds, default_thresholds
from mismatch.codec import to_json
from mismatch.errors import MismatchError, in_list
from mismatch.experiments.fixes.significance import per_prompt
from mismatch.experiments.results import RANKED_BY
from mismatch.metrics import METRICS
from mismatch.metrics.difference import Sample, difference, excludes_zero, paired
from mismatch.metrics.inference import mover
from mismatch.metrics.permutation import LEVEL, exchange, holm, prompts_to_tell
from mismatch.pipeline.saved_runs import (
    ABSENT,
    PLACES,
    UNVERIFIED,
    SavedRun,
    flat,
    judged_again,
    load_run,
    same_tokens,
    samples,
)
from mismatch.types import Estimate, Status, Verdict

SCHEMA = "mismatch.runs/1"
MARGIN = 0.1
# A change that may be chance for the test, but that is too large to be passed over: as many
# times as before, at a p (not adjusted) up to this.
TIMES, UNDECIDED = 3.0, 0.26
DECIDING = (*RANKED_BY, "routing_disagree_layer")
ALSO = ("logprob_abs_diff_p999", "logprob_abs_diff_max", "kl", "ratio_mean", "routing_disagree_any")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")

Outcome = Literal["better", "worse", "mixed", "undecided", "none", "not comparable"]
APART: Outcome = "not comparable"  # of runs that differ in more than an engine or a trainer
Basis = Literal["paired", "prompts", "intervals"]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the runs.

    Attributes:
        run: name of its directory, without the path.
        created: ISO time, or "".
        tokens: number that was compared; None: no tokens table.
        paired: it holds the same tokens as the first run.
        engine_mean, engine_max: |delta| of its engine from the first run's, on the same tokens.
    """

    run: str
    model: str
    engine: str
    created: str
    status: Status
    reason: str
    tokens: int | None
    paired: bool
    engine_mean: float | None
    engine_max: float | None


@dataclass(frozen=True, slots=True)
class Move:
    """How one metric of a run differs from the first run's.

    Attributes:
        change: this - first, with its 95 % interval where it has one.
        basis: "paired" token by token; "prompts": different tokens; "intervals": of the two
            reports, as if the runs were independent.
        p_value: of a metric that decides, by permutation within prompts, adjusted for all runs and
            deciding metrics (Holm); None elsewhere.
        outcome: of a metric that decides; by its interval where there is no p-value. "undecided":
            several times as large, and too rarely so by chance to be passed over.
        significant: p at most 5 %, else the change's own interval leaves 0 out.
        beyond: worse, and by more than the margin.
    """

    change: Estimate
    basis: Basis
    p_value: float | None = None
    outcome: Outcome | None = None
    significant: bool = False
    beyond: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """One metric: a value per run (None where it has none), a move per run (None for the first).

    Attributes:
        low_is_bad: by its levels; None where it decides nothing and has none.
    """

    metric: str
    low_is_bad: bool | None
    values: tuple[Estimate | None, ...]
    moves: tuple[Move | None, ...]


@dataclass(frozen=True, slots=True)
class SquareLine:
    """One number of the square in every run; None where a run does not have it.

    Attributes:
        evidence: "excess" of a scoring over rounding, or its "gap" in float32 (nats).
        standings: against its level.
    """

    evidence: Evidence
    scoring: str
    values: tuple[Estimate | None, ...]
    standings: tuple[Standing | None, ...]


@dataclass(frozen=True, slots=True)
class Fact:
    """A version, setting or kernel that is not the same in all runs."""

    where: str
    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gate:
    """Whether the second run fails against the first.

    Attributes:
        fails: worse by more than the margin, undecided, or the run's verdict fails.
        margin: share by which a deciding metric may rise, however sure that is.
    """

    fails: bool
    reason: str
    margin: float


@dataclass(frozen=True, slots=True, repr=False)
class RunComparison:
    """Two or more saved runs.

    Attributes:
        outcomes: of each run against the first, over the metrics that decide; None for the first.
        notes: what a reader has to know, one sentence each.
        gate: of ``compare NEW --against OLD``, whose runs are (old, new).
    """

    runs: tuple[Side, ...]
    outcomes: tuple[Outcome | None, ...]
    metrics: tuple[Line, ...]
    square: tuple[SquareLine, ...]
    facts: tuple[Fact, ...]
    notes: tuple[str, ...]
    gate: Gate | None = None

    def __repr__(self) -> str:
        runs = ", ".join(run.run for run in self.runs)
        return f"RunComparison({runs}: {', '.join(filter(None, self.outcomes))})"

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **to_json(self)}

    def second_moves(self) -> Iterator[tuple[Line, Move]]:
        """Yield the deciding metrics with their move in the second run."""
        for each in self.metrics:
            move = each.moves[1]
            if move is not None and move.outcome is not None:
                yield each, move


def compare_runs(paths: Sequence[Path]) -> RunComparison:
    """Compare saved runs with the first of them.

    One of other prompts, lengths, weights or another model shows its numbers, and is neither better
    nor worse.

    Raises:
        MismatchError: fewer than two different runs, or a report that is missing or damaged.
    """
    places = [path.resolve() for path in paths]
    if len(paths) < 2 or len(set(places)) < len(places):
        raise MismatchError("two or more different runs are needed", "mismatch report A B C")
    runs = [load_run(path) for path in paths]
    first, others = runs[0], runs[1:]
    notes = [
        f"{run.name} has no table of tokens: its changes are compared by interval"
        for run in runs
        if run.tokens is None
    ]
    notes.append(f"verdicts are {UNVERIFIED}")
    tests = len(DECIDING) * len(others)
    apart: set[int] = set()
    for at, run in enumerate(others, 1):
        for error in obstacles(first, run, tests):
            notes.append(f"{error.message}: {error.fix}")
            apart.add(at)
    return _without_moves(compared(runs, notes), apart)


def _without_moves(result: RunComparison, apart: set[int]) -> RunComparison:
    """Return the comparison in which some runs, by their place, are not compared."""
    outcomes = tuple(APART if at in apart else each for at, each in enumerate(result.outcomes))
    lines = [
        replace(
            line,
            moves=tuple(
                replace(move, p_value=None, outcome=None, significant=False)
                if move is not None and at in apart
                else move
                for at, move in enumerate(line.moves)
            ),
        )
        for line in result.metrics
    ]
    return replace(result, outcomes=outcomes, metrics=tuple(lines))


def against(
    old_run: Path,
    new_run: Path,
    *,
    margin: float = MARGIN,
    thresholds: Thresholds | None = None,
    fail_on: str = "unfit",
) -> RunComparison:
    """Compare a new run with an old one, and judge whether it fails.

    Args:
        thresholds: levels by which the verdicts of the two runs are judged again.
        fail_on: verdict of the new run itself from which it fails.

    Raises:
        MismatchError: a file is missing, or the runs cannot be compared (the reason is named).
    """
    runs = [load_run(old_run), load_run(new_run)]
    for at, run in enumerate(runs):
        if thresholds is not None and run.report.comparisons:
            own = judged_again(run.report, thresholds)
            runs[at] = replace(run, report=replace(run.report, verdict=own))
        if run.tokens is None:
            fault = f"{run.path} has no table of tokens, or one without prompts"
            fix = f"make it again from the scorings: mismatch compare {run.path}"
            raise MismatchError(fault, fix)
    old, new = runs
    for error in obstacles(old, new, len(DECIDING)):
        raise MismatchError(f"not comparable: {error.message}", error.fix)
    result = compared([old, new], [], margin)
    changes = {
        where: [fact.name for fact in result.facts if fact.where == where] for where in PLACES
    }
    notes = []
    if changes["trainer"]:
        named = in_list(changes["trainer"])
        notes.append(f"the trainer has changed as well ({named}): not all of it is the engine's")
    if not changes["engine"]:
        notes.append("nothing that the engine says of itself has changed")
    if not (old.weights or old.files) or not (new.weights or new.files):
        notes.append("weights: not compared, since a run has neither digests nor checksums of them")
    for run, other in ((old, new), (new, old)):
        notes += [
            f"{name}: only {run.name} has it, so not compared"
            for name in _names([old, new])
            if name in run.values and name not in other.values
        ]
        if run.report.result("square") is None:
            notes.append(f"{run.name} has no square: faults and rounding look alike there")
    gate = judged_gate(result, (old.report.verdict, new.report.verdict), margin, fail_on)
    gate = replace(gate, reason=f"{gate.reason}; both verdicts are {UNVERIFIED}")
    return replace(result, notes=tuple(notes), gate=gate)


def compared(
    runs: Sequence[SavedRun], notes: Sequence[str], margin: float | None = None
) -> RunComparison:
    """Compare loaded runs with the first; all tests of all runs are adjusted together (Holm).

    Args:
        margin: share by which a deciding metric may rise before that fails; None: no gate.
    """
    first, others = runs[0], runs[1:]
    names = [name for name in _names(runs) if sum(name in run.values for run in runs) > 1]
    raw: dict[tuple[str, int], Move] = {}
    for at, other in enumerate(others, 1):
        tokens, alike = samples(first, other), same_tokens(first, other)
        for name in names:
            if name in first.values and name in other.values:
                ends = first.values[name], other.values[name]
                raw[name, at] = raw_move(name, ends, tokens, alike)
    tested = {key: move.p_value for key, move in raw.items() if move.p_value is not None}
    adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
    moves: dict[tuple[str, int], Move] = {}
    for (name, at), move in raw.items():
        old, new = (run.values[name].value for run in (first, runs[at]))
        moves[name, at] = judged_move(name, move, old, new, adjusted.get((name, at)), margin)
    judgements = {item.metric: item for run in runs for item in run.report.verdict.judgements}
    lines = []
    for name in names:
        level = judgements.get(name)
        low_is_bad = False if name in DECIDING else None
        if level is not None:
            low_is_bad = level.healthy > level.unfit
        values = tuple(run.values.get(name) for run in runs)
        moved = (moves.get((name, at)) for at in range(1, len(runs)))
        lines.append(Line(name, low_is_bad, values, (None, *moved)))
    outcomes = (outcome_of([line.moves[at] for line in lines]) for at in range(1, len(runs)))
    return RunComparison(
        runs=tuple(_side(run, first) for run in runs),
        outcomes=(None, *outcomes),
        metrics=tuple(lines),
        square=tuple(_square_lines(runs)),
        facts=tuple(_facts(runs)),
        notes=tuple(notes),
    )


def raw_move(
    name: str, values: tuple[Estimate, Estimate], tokens: tuple[Sample, Sample] | None, alike: bool
) -> Move:
    """Measure a change, by tokens where both runs have what the metric needs.

    Args:
        alike: the two runs hold the same tokens.

    Returns:
        The move; its p-value is not adjusted yet.
    """
    metric = METRICS.get(name)
    if tokens is not None and metric is not None and set(metric.needs) <= tokens[0].arrays.keys():
        old, new = tokens
        try:
            change = paired(metric, old, new) if alike else difference(metric, old, new)
        except MismatchError:  # undefined on a side
            pass
        else:
            p_value = None
            if name in DECIDING and np.isin(old.prompt, new.prompt).any():
                p_value = exchange(*(per_prompt(name, sample) for sample in tokens))
            return Move(change, "paired" if alike else "prompts", p_value)
    before, after = values
    change = replace(after, value=after.value - before.value, low=None, high=None)
    ends = mover(before, after)
    if ends is not None and np.isfinite(change.value):
        change = replace(change, low=ends[0], high=ends[1])
    return Move(change, "intervals")


def judged_move(
    name: str, move: Move, old: float, new: float, p_value: float | None, margin: float | None
) -> Move:
    """Return a raw move with what it means; only metrics that decide have an outcome.

    Args:
        p_value: adjusted; None: the change is judged by its interval.
    """
    certain = excludes_zero(move.change)
    if name not in DECIDING or (p_value is None and certain is None):
        return replace(move, significant=bool(certain))
    outcome: Outcome = "none"
    significant = bool(certain) if p_value is None else p_value <= LEVEL and move.change.value != 0
    if significant:
        outcome = "worse" if move.change.value > 0 else "better"
    elif move.p_value is not None and move.p_value <= UNDECIDED and new > TIMES * old:
        outcome = "undecided"
    beyond = outcome == "worse" and margin is not None and not new <= (1.0 + margin) * old
    return replace(move, p_value=p_value, outcome=outcome, significant=significant, beyond=beyond)


def outcome_of(moves: Sequence[Move | None]) -> Outcome:
    """Sum up the metrics that decide."""
    outcomes = {move.outcome for move in moves if move is not None} - {None, "none"}
    sure = outcomes & {"better", "worse"}
    if len(sure) > 1:
        return "mixed"
    return "worse" if "worse" in sure else "better" if sure else "undecided" if outcomes else "none"


def judged_gate(
    result: RunComparison, verdicts: tuple[Verdict, Verdict], margin: float, fail_on: str
) -> Gate:
    """Say in one line what moved, and whether that fails.

    Args:
        verdicts: of the old run and of the new one, each by itself.
    """

    def named(*outcomes: Outcome, beyond: bool = False) -> str:
        return ", ".join(
            f"{line.metric} {line.values[0].value:.3g} → {line.values[1].value:.3g}"
            for line, move in result.second_moves()
            if move.outcome in outcomes and (move.beyond or not beyond)
            if line.values[0] is not None and line.values[1] is not None
        )

    beyond, worse = named("worse", beyond=True), named("worse")
    better, undecided = named("better"), named("undecided")
    if beyond:
        reason = f"{beyond}; more than the margin of {100 * margin:g} %"
    elif worse:
        reason = f"{worse}; within the margin of {100 * margin:g} %"
    elif better:
        reason = better
    elif undecided:
        reason = f"{undecided}; chance alone may do that: measure both runs with more prompts"
    else:
        reason = "no deciding metric moved by more than chance"
    if worse and better:
        reason += f"; better: {better}"
    before, own = verdicts
    failing = exit_code(own, fail_on) != 0
    if failing:
        also = ", as the old one is" if before.status == own.status else ""
        reason += f"; the new run by itself is {own.status}{also}: {own.reason}"
    return Gate(bool(beyond or undecided or failing), reason, margin)


# ---------------------------------------------------------------- what stands in the way


def obstacles(first: SavedRun, other: SavedRun, tests: int) -> Iterator[MismatchError]:
    """Yield why a comparison of two runs says little about an engine or a trainer.

    Args:
        tests: number of tests that the p-values are adjusted for.
    """
    pair = f"{other.name} and {first.name}"
    differing: list[str] = []
    if first.weights and other.weights:
        same = first.weights == other.weights
    elif first.files and other.files:
        named = sorted(first.files.keys() | other.files.keys())
        differing = [name for name in named if first.files.get(name) != other.files.get(name)]
        same = not differing
    else:
        same = first.model == other.model  # nothing else to go by
    if not same and first.model != other.model:
        fault = f"{other.name} is of another model than {first.name}: {other.model}, {first.model}"
        yield MismatchError(fault, "compare two runs of one model")
    elif not same:
        which = f": {in_list(differing)}" if differing else ""
        fix = "compare runs of the same checkpoint, with the same --weights and --layers"
        yield MismatchError(f"the trainers of {pair} loaded other weights{which}", fix)
    settings = [run.sampling for run in (first, other)]
    changed = [
        f"{name} {settings[0][name]:g} in {first.name}, {settings[1][name]:g} in {other.name}"
        for name in SAMPLING
        if name in settings[0] and name in settings[1] and settings[0][name] != settings[1][name]
    ]
    if changed:
        fix = "make the new run with the old one's flags: mismatch check --config FILE for both"
        yield MismatchError(f"{pair} sampled with other settings: {'; '.join(changed)}", fix)
    tokens = samples(first, other)
    if tokens is None:
        return
    ours, theirs = (set(sample.prompt.tolist()) for sample in tokens)
    shared, least = len(ours & theirs), prompts_to_tell(tests)
    if not len(ours) == len(theirs) == shared:
        yield MismatchError(
            f"other prompts: {first.name} has {len(ours)}, {other.name} {len(theirs)}, and "
            f"{shared} are the same tokens in both",
            "use the same prompts, --num-prompts and --seed; where these are the same, the "
            "tokeniser or its chat template has changed",
        )
    if shared < least:
        yield MismatchError(
            f"{other.name} and {first.name} share {shared} prompts; with fewer than {least} no "
            "change, however large, could be significant",
            f"make both runs with --num-prompts {least} at the least; the default is a better one",
        )


# ---------------------------------------------------------------- what is shown next to the metrics


def _names(runs: Sequence[SavedRun]) -> list[str]:
    """Metrics to compare: those that decide, those with levels, a few more."""
    judged = [item.metric for run in runs for item in run.report.verdict.judgements]
    return list(dict.fromkeys([*DECIDING, *default_thresholds(), *judged, *ALSO]))


def _side(run: SavedRun, first: SavedRun) -> Side:
    alike = run is not first and same_tokens(first, run)
    moved = None
    if alike and first.tokens is not None and run.tokens is not None:
        old, new = (
            table["rollout_logprob"].to_numpy(np.float64) for table in (first.tokens, run.tokens)
        )
        moved = np.abs(new - old)
    return Side(
        run=run.name,
        model=run.model,
        engine=run.engine,
        created=run.created,
        status=run.report.verdict.status,
        reason=run.report.verdict.reason,
        tokens=None if run.tokens is None else len(run.tokens),
        paired=alike,
        engine_mean=None if moved is None else float(moved.mean()),
        engine_max=None if moved is None else float(moved.max()),
    )


def _square_lines(runs: Sequence[SavedRun]) -> Iterator[SquareLine]:
    """Every excess and gap, those of the last run first."""
    squares = [run.report.result("square") for run in runs]
    findings = [
        {(each.evidence, each.scoring): each for each in square.findings} if square else {}
        for square in squares
    ]
    for key in dict.fromkeys(key for side in reversed(findings) for key in side):
        found = [side.get(key) for side in findings]
        standings = tuple(each and each.standing for each in found)
        yield SquareLine(key[0], key[1], tuple(each and each.value for each in found), standings)


def _facts(runs: Sequence[SavedRun]) -> Iterator[Fact]:
    """Engine first; what no run states, or all state alike, is left out."""
    for where in PLACES:
        sides = [dict(flat(run.facts[where])) for run in runs]
        # The version and versions first: they are what an upgrade is about.
        names = sorted({key for side in sides for key in side})
        for name in sorted(names, key=lambda n: (n != "version", not n.startswith("versions."))):
            values = tuple(side.get(name, ABSENT) for side in sides)
            if len(set(values)) > 1 and set(values) != {ABSENT, "null"}:  # unset, or unknown
                yield Fact(where, name, values)
