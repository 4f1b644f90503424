"""Saved runs side by side: every headline metric of each, and which moved from the first.

Read from report.json and tokens.parquet alone. A run may lack its tokens; then a change is told by
the two intervals, which sees less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mismatch.codec import to_json
from mismatch.errors import MismatchError
from mismatch.experiments.fixes.significance import per_prompt
from mismatch.experiments.regression.run_comparison import ALSO, DECIDING, MARGIN, decided
from mismatch.experiments.regression.types import (
    ABSENT,
    AgainstRow,
    Outcome,
    fact_order,
    flat_facts,
)
from mismatch.metrics import METRICS
from mismatch.metrics.difference import Sample, difference, excludes_zero, paired
from mismatch.metrics.inference import mover
from mismatch.metrics.permutation import exchange, holm, prompts_to_tell
from mismatch.pipeline.saved_runs import SavedRun, flips, load_run, routed, same_tokens, samples
from mismatch.types import Estimate, Status

SCHEMA = "mismatch.side_by_side/1"
Basis = Literal["paired", "prompts", "intervals"]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the runs.

    Attributes:
        run: name of its directory, without the path.
        created: ISO time, or "".
        tokens: that were compared; None: no tokens table.
        paired: it holds the same tokens as the first run.
    """

    run: str
    model: str
    engine: str
    created: str
    status: Status
    reason: str
    tokens: int | None
    paired: bool


@dataclass(frozen=True, slots=True)
class Move:
    """How one metric of a run differs from the first run's.

    Attributes:
        change: this - first, with its 95 % interval where it has one.
        basis: "paired" token by token; "prompts": tokens of their own; "intervals": of the two
            reports, as if the runs were independent.
        p_value: of a metric that decides, by permutation within prompts, adjusted for all runs and
            deciding metrics (Holm); None elsewhere.
        outcome: of a metric that decides; by its interval where there is no p-value.
        significant: p at most 5 %, else the change's own interval leaves 0 out.
    """

    change: Estimate
    basis: Basis
    p_value: float | None
    outcome: Outcome | None
    significant: bool


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
class Fact:
    """A version, setting or kernel that is not the same in all runs."""

    where: str
    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Two or more saved runs.

    Attributes:
        outcomes: of each run against the first, over the metrics that decide; None for the first.
        notes: what a reader has to know, one sentence each.
    """

    runs: tuple[Side, ...]
    outcomes: tuple[Outcome | None, ...]
    metrics: tuple[Line, ...]
    facts: tuple[Fact, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **to_json(self)}


def side_by_side(paths: Sequence[Path]) -> SideBySide:
    """Compare what saved runs measured; the first is what the others are held against.

    Raises:
        MismatchError: fewer than two different runs, or a report that is missing or damaged.
    """
    places = [path.resolve() for path in paths]
    if len(paths) < 2 or len(set(places)) < len(places):
        raise MismatchError("two or more different runs are needed", "mismatch report A B C")
    runs = [load_run(path) for path in paths]
    first, others = runs[0], runs[1:]
    names = _wanted(runs)
    moves = _adjusted([_moves(first, other, names) for other in others])
    lines = tuple(
        Line(
            name,
            _low_is_bad(name, runs),
            tuple(run.values.get(name) for run in runs),
            (None, *(by_metric.get(name) for by_metric in moves)),
        )
        for name in names
    )
    return SideBySide(
        runs=tuple(_side(run, first) for run in runs),
        outcomes=(None, *(_outcome(by_metric) for by_metric in moves)),
        metrics=lines,
        facts=tuple(_facts(runs)),
        notes=(*_notes(runs), *_too_few(runs)),
    )


def _wanted(runs: Sequence[SavedRun]) -> list[str]:
    """Deciding metrics, judged ones, a few more: those that two runs have."""
    judged = [item.metric for run in runs for item in run.report.verdict.judgements]
    names = dict.fromkeys([*DECIDING, *judged, *ALSO])
    return [name for name in names if sum(name in run.values for run in runs) > 1]


def _low_is_bad(name: str, runs: Sequence[SavedRun]) -> bool | None:
    levels = [item for run in runs for item in run.report.verdict.judgements if item.metric == name]
    if levels:
        return levels[0].healthy > levels[0].unfit
    return False if name in DECIDING else None


def _side(run: SavedRun, first: SavedRun) -> Side:
    return Side(
        run=run.name,
        model=run.report.model,
        engine=run.engine,
        created=run.created,
        status=run.report.verdict.status,
        reason=run.report.verdict.reason,
        tokens=None if run.tokens is None else len(run.tokens),
        paired=run is not first and same_tokens(first, run),
    )


@dataclass(frozen=True, slots=True)
class _Raw:
    move: Move
    values: tuple[Estimate, Estimate]
    p_value: float | None


def _moves(first: SavedRun, other: SavedRun, names: Sequence[str]) -> dict[str, _Raw]:
    """Metrics that both runs have, with p-values that are not adjusted yet."""
    tokens, alike = samples(first, other), same_tokens(first, other)
    if tokens is not None and routed(first) and routed(other):
        tokens = tuple(  # type: ignore[assignment]
            replace(sample, arrays={**sample.arrays, "differs": flips(run)})
            for run, sample in zip((first, other), tokens, strict=True)
        )
    moves = {}
    for name in names:
        if name in first.values and name in other.values:
            values = first.values[name], other.values[name]
            moves[name] = _raw(name, values, tokens, alike)
    return moves


def _raw(
    name: str,
    values: tuple[Estimate, Estimate],
    tokens: tuple[Sample, Sample] | None,
    alike: bool,
) -> _Raw:
    metric = METRICS.get(name)
    if tokens is None or metric is None or not set(metric.needs) <= tokens[0].arrays.keys():
        return _Raw(_by_intervals(*values), values, None)
    before, after = tokens
    try:
        if alike:
            change = paired(
                metric, before.arrays, after.arrays, sequence=before.sequence, prompt=before.prompt
            )
        else:
            change = difference(metric, before, after)
    except MismatchError:  # undefined on a side
        return _Raw(_by_intervals(*values), values, None)
    shared = np.isin(before.prompt, after.prompt).any()
    raw = None
    if name in DECIDING and shared:
        raw = exchange(*(per_prompt(name, sample) for sample in tokens))
    basis: Basis = "paired" if alike else "prompts"
    move = Move(change, basis, None, None, bool(excludes_zero(change)))
    return _Raw(move, values, raw)


def _by_intervals(first: Estimate, other: Estimate) -> Move:
    """A difference of two numbers of which only their intervals are there."""
    change = replace(other, value=other.value - first.value, low=None, high=None)
    ends = mover(first, other)
    if ends is not None and np.isfinite(change.value):
        change = replace(change, low=ends[0], high=ends[1])
    return Move(change, "intervals", None, None, bool(excludes_zero(change)))


def _adjusted(runs: Sequence[dict[str, _Raw]]) -> list[dict[str, Move]]:
    """All tests of all runs together (Holm)."""
    keys = [
        (number, name)
        for number, moves in enumerate(runs)
        for name, raw in moves.items()
        if raw.p_value is not None
    ]
    pairs = [(number, name, runs[number][name].p_value or 0.0) for number, name in keys]
    adjusted = dict(zip(keys, holm([p for _, _, p in pairs]), strict=True))
    adjusted_moves: list[dict[str, Move]] = []
    for number, moves in enumerate(runs):
        adjusted_moves.append(
            {name: _judged(name, raw, adjusted.get((number, name))) for name, raw in moves.items()}
        )
    return adjusted_moves


def _judged(name: str, raw: _Raw, p_value: float | None) -> Move:
    move = raw.move
    if p_value is None or raw.p_value is None:
        if name not in DECIDING or excludes_zero(move.change) is None:
            return move
        direction: Outcome = "worse" if move.change.value > 0 else "better"
        return replace(move, outcome=direction if move.significant else "none")
    row = AgainstRow(name, *raw.values, move.change)
    outcome = decided(row, p_value, raw.p_value, MARGIN).outcome
    significant = outcome in ("better", "worse")
    return replace(move, p_value=p_value, outcome=outcome, significant=significant)


def _outcome(moves: dict[str, Move]) -> Outcome:
    outcomes = {move.outcome for move in moves.values()} - {None, "none"}
    sure = outcomes & {"better", "worse"}
    if len(sure) > 1:
        return "mixed"
    return "worse" if "worse" in sure else "better" if sure else "undecided" if outcomes else "none"


def _facts(runs: Sequence[SavedRun]) -> list[Fact]:
    """Engine first; what no run states, or all state alike, is left out."""
    facts = []
    for where in ("engine", "trainer", "machine"):
        sides = [dict(flat_facts(run.facts[where])) for run in runs]
        for name in sorted({key for side in sides for key in side}, key=fact_order):
            values = tuple(side.get(name, ABSENT) for side in sides)
            if len(set(values)) > 1 and set(values) != {ABSENT, "null"}:
                facts.append(Fact(where, name, values))
    return facts


def _notes(runs: Sequence[SavedRun]) -> list[str]:
    notes = []
    first = runs[0]
    for run in runs[1:]:
        if run.report.model != first.report.model:
            notes.append(f"{run.name} is of another model than {first.name}")
        elif run.weights and first.weights and run.weights != first.weights:
            notes.append(f"the trainers of {run.name} and {first.name} loaded other weights")
    for run in runs:
        if run.tokens is None:
            notes.append(f"{run.name} has no table of tokens: its changes are told by intervals")
    return notes


def _too_few(runs: Sequence[SavedRun]) -> list[str]:
    """Runs that share too few prompts with the first for any permutation to be significant."""
    first, notes = runs[0], []
    least = prompts_to_tell(len(DECIDING) * (len(runs) - 1))
    for run in runs[1:]:
        tokens = samples(first, run)
        if tokens is None:
            continue
        shared = len(np.intersect1d(tokens[0].prompt, tokens[1].prompt))
        if not shared:
            notes.append(
                f"{run.name} and {first.name} share no prompt: no p-value, changes by intervals"
            )
        elif shared < least:
            notes.append(
                f"{run.name} and {first.name} share {shared} prompts; with fewer than {least} no "
                "change could be significant"
            )
    return notes
