"""A new run against an old one: every headline metric, by how much it moved, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.analysis.comparison import compare, inputs, is_sampling_law, paired_routing
from mismatch.analysis.diagnosis.pass_checks import by_finiteness, pass_checks
from mismatch.analysis.levels import default_thresholds, exit_code
from mismatch.analysis.plugins import RunArtefacts
from mismatch.analysis.scored_rollout import ScoredRollout
from mismatch.analysis.square import Evidence, Finding, Square, measure
from mismatch.analysis.square_checks import square_checks
from mismatch.errors import MismatchError
from mismatch.experiments.fixes.base import RANKED_BY
from mismatch.experiments.fixes.significance import per_prompt
from mismatch.experiments.regression.types import (
    Against,
    AgainstRow,
    Changed,
    Outcome,
    RunSide,
    SquareRow,
    changed,
    require_comparable,
    require_enough,
    unknown_machine,
)
from mismatch.metrics import METRICS
from mismatch.metrics.difference import Sample, common_prompts, difference, paired
from mismatch.metrics.permutation import LEVEL, exchange, holm
from mismatch.metrics.registry import Metric
from mismatch.run import store
from mismatch.run.directory import invocations, load_spec
from mismatch.run.store import TRAIN
from mismatch.types import Check, Comparison, Estimate, Ints, NotTested, Rollout

if TYPE_CHECKING:
    from mismatch.analysis.levels import Thresholds


@dataclass(frozen=True, slots=True)
class OtherPasses:
    """What the other passes of one run say.

    Attributes:
        square: None without one, ``reason`` says why; in float32 on both sides none is needed.
    """

    checks: tuple[Check, ...]
    square: Square | None
    reason: str

    @classmethod
    def of(cls, run: Path, sides: ScoredRollout, comparison: Comparison) -> OtherPasses:
        """Read and judge them.

        Raises:
            MismatchError: a scoring is damaged.
        """
        headline = {sides.decode.name: sides.decode, sides.train.name: sides.train}
        names = [n for n in store.scoring_names(run) if not n.startswith(store.FIX_PREFIX)]
        scorings = headline | {n: store.load_scoring(run, n) for n in names if n not in headline}
        usable, refused = by_finiteness(scorings)
        checks = pass_checks(sides.rollout, sides.decode, sides.train, scorings)
        measured = RunArtefacts(
            sides.rollout, sides.decode, sides.train, comparison, usable, refused
        )
        try:
            square = measure(measured, load_spec(run))
        except MismatchError:
            square = NotTested("the square", "its spec.json is missing, or of another version")
        if isinstance(square, NotTested):
            return cls(tuple(checks), None, square.reason)
        return cls((*checks, *square_checks(square)), square, "")


def square_rows(old: Square | None, new: Square | None) -> tuple[SquareRow, ...]:
    """Every excess and gap of either run, the new run's first."""
    sides: list[dict[tuple[Evidence, str], Finding]] = [
        {(f.evidence, f.scoring): f for f in square.findings} if square else {}
        for square in (old, new)
    ]
    rows = []
    for key in dict.fromkeys((*sides[1], *sides[0])):
        before, after = (side.get(key) for side in sides)
        rows.append(
            SquareRow(
                evidence=key[0],
                scoring=key[1],
                old=before.value if before else None,
                new=after.value if after else None,
                before=before.standing if before else None,
                after=after.standing if after else None,
            )
        )
    return tuple(rows)


def square_notes(old: OtherPasses, new: OtherPasses) -> list[str]:
    """What of the two squares cannot be compared, one sentence each."""
    return [
        f"the square of the {name} run: not compared, {passes.reason}"
        for name, passes in (("old", old), ("new", new))
        if passes.square is None
    ]


MARGIN = 0.1
TIMES, UNDECIDED = 3.0, 0.26  # as much as before, at a p (not adjusted) up to this
DECIDING = (*RANKED_BY, "routing_disagree_layer")
ALSO = ("logprob_abs_diff_p999", "logprob_abs_diff_max", "kl", "ratio_mean", "routing_disagree_any")
METHOD = (
    "k3, mean |delta| and routing flips decide: a permutation test that exchanges the two runs "
    "within prompts, adjusted for all of them (Holm), at 5 %. Intervals are 95 % each, by prompt, "
    "not adjusted."
)


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One of the two runs with its numbers.

    Attributes:
        values: metric -> estimate, of those that the run has.
        sample: the arrays behind them, prompts numbered alike in both runs.
        beside: what its other passes say.
    """

    path: Path
    sides: ScoredRollout
    comparison: Comparison
    sample: Sample
    beside: OtherPasses

    @classmethod
    def of(
        cls, path: Path, sides: ScoredRollout, prompt: Ints, names: list[str], seed: int
    ) -> MeasuredRun:
        pair = sides.pair
        arrays = inputs(pair, sides.decode, sides.train)
        replayed = sides.train.fingerprint.get("replay")
        routes = None if replayed else paired_routing(sides.rollout, sides.decode, sides.train)
        sample = Sample(arrays | (routes.arrays if routes else {}), pair.sequence, prompt)
        comparison = sides.comparison(names, seed)
        return cls(path, sides, comparison, sample, OtherPasses.of(path, sides, comparison))

    @property
    def values(self) -> dict[str, Estimate]:
        return self.comparison.metrics | self.comparison.routing

    def facts(self) -> dict[str, dict[str, Any]]:
        """What the fingerprints and the journal say of engine, trainer and machine."""
        noted = _provenance(self.path)
        machine = {key: noted[key] for key in ("platform", "environment") if key in noted}
        own = noted.get("versions", {}).get("train-infer-mismatch")
        return {
            "engine": self.sides.decode.fingerprint,
            "trainer": self.sides.train.fingerprint,
            "machine": machine | ({"mismatch": own} if own else {}),
        }

    def side(self, thresholds: Thresholds | None) -> RunSide:
        facts = self.sides.decode.fingerprint
        return RunSide(
            run=self.path.resolve().name,
            model=Path(str(facts.get("model") or "unknown model")).name,
            engine=str(facts.get("engine", "")),
            version=str(facts.get("version", "")),
            created=str(_provenance(self.path).get("created", "")),
            verdict=self.sides.verdict(
                self.comparison, thresholds, self.beside.checks, self.beside.reason
            ),
            tokens=self.sides.rollout.n_actions,
            sequences=self.sides.rollout.n_sequences,
        )


def against(
    old_run: Path,
    new_run: Path,
    *,
    margin: float = MARGIN,
    thresholds: Thresholds | None = None,
    fail_on: str = "unfit",
    seed: int = 0,
) -> Against:
    """Compare what two runs measured between their engine and their trainer.

    Args:
        margin: share by which a deciding metric may rise, however sure that is, before it fails.
        fail_on: verdict of the new run itself from which it fails.

    Raises:
        MismatchError: artefacts missing, or runs that cannot be compared (the reason is named).
    """
    names = _wanted(thresholds)
    loaded = load_sides(old_run), load_sides(new_run)
    prompts = common_prompts(loaded[0].rollout, loaded[1].rollout)
    notes = require_comparable(*loaded, prompts)
    require_enough(len(np.unique(prompts[0])), len(DECIDING))
    old, new = (
        MeasuredRun.of(path, sides, prompt, names, seed)
        for path, sides, prompt in zip((old_run, new_run), loaded, prompts, strict=True)
    )
    same = same_tokens(old.sides.rollout, new.sides.rollout)
    rows = judged(_rows(names, old, new, same, seed), (old.sample, new.sample), margin, seed)
    facts = old.facts(), new.facts()
    notes += unknown_machine(*facts)
    changes = changed(*facts)
    regression = Against(
        old=old.side(thresholds),
        new=new.side(thresholds),
        prompts=len(np.unique(prompts[0])),
        same_tokens=same,
        same_sequences=same_sequences(old.sides.rollout, new.sides.rollout),
        rows=rows,
        square=square_rows(old.beside.square, new.beside.square),
        changed=changes,
        engines=_engines(old.sides, new.sides, seed) if same else None,
        outcome=outcome_of(rows),
        margin=margin,
        fails=False,
        reason="",
        notes=(
            *notes,
            *_one_sided(names, old, new),
            *square_notes(old.beside, new.beside),
            *_notes(changes),
        ),
        method=METHOD,
    )
    return concluded(regression, fail_on)


def load_sides(run: Path) -> ScoredRollout:
    """A run's tokens with what its engine and its trainer say of them; the artefacts alone."""
    rollout = store.load_rollout(run)
    engine = rollout.fingerprint.get("engine")
    if engine is None:
        raise MismatchError(f"{run}: its rollout does not say which engine sampled", "sample again")
    return ScoredRollout.load(run, str(engine), TRAIN)


def same_tokens(old: Rollout, new: Rollout) -> bool:
    """Both runs hold the same sequences in the same order, sampled at the same places."""
    return (
        np.array_equal(old.offsets, new.offsets)
        and np.array_equal(old.token_ids, new.token_ids)
        and np.array_equal(old.action_mask, new.action_mask)
    )


def same_sequences(old: Rollout, new: Rollout) -> int:
    """Sequences that are the same, place by place."""
    pairs = zip(old.sequences(), new.sequences(), strict=False)  # of unequal numbers: the first
    return sum(np.array_equal(before, after) for before, after in pairs)


def judged(
    rows: Sequence[AgainstRow], samples: tuple[Sample, Sample], margin: float, seed: int
) -> tuple[AgainstRow, ...]:
    """Rows with adjusted p-values and what they mean, where they decide."""
    deciding = [row.metric for row in rows if row.metric in DECIDING]
    raw = [
        exchange(*(per_prompt(metric, sample) for sample in samples), seed=seed)
        for metric in deciding
    ]
    p_values = dict(zip(deciding, zip(holm(raw), raw, strict=True), strict=True))
    return tuple(
        decided(row, *p_values[row.metric], margin) if row.metric in p_values else row
        for row in rows
    )


def decided(row: AgainstRow, p_value: float, raw: float, margin: float) -> AgainstRow:
    """A deciding metric with what its change means.

    Args:
        p_value: adjusted; raw: not.
    """
    outcome: Outcome = "none"
    if p_value <= LEVEL and row.change.value != 0:
        outcome = "worse" if row.change.value > 0 else "better"
    elif raw <= UNDECIDED and row.new.value > TIMES * row.old.value:
        outcome = "undecided"
    beyond = outcome == "worse" and not row.new.value <= (1.0 + margin) * row.old.value
    return replace(row, p_value=p_value, outcome=outcome, beyond=beyond)


def outcome_of(rows: Sequence[AgainstRow]) -> Outcome:
    """Of all rows that decide."""
    outcomes = {row.outcome for row in rows if row.outcome not in (None, "none", "undecided")}
    if not outcomes:
        return "undecided" if any(row.outcome == "undecided" for row in rows) else "none"
    return "mixed" if len(outcomes) > 1 else "worse" if "worse" in outcomes else "better"


def concluded(regression: Against, fail_on: str) -> Against:
    """With the verdict: what fails, and why, in one line."""
    own = regression.new.verdict
    failing = own is not None and exit_code(own, fail_on) != 0
    beyond = [row for row in regression.rows if row.beyond]
    worse = [row for row in regression.rows if row.outcome == "worse"]
    better = [row for row in regression.rows if row.outcome == "better"]
    undecided = [row for row in regression.rows if row.outcome == "undecided"]
    if beyond:
        text = f"{_moves(beyond)}; more than the margin of {regression.margin_text}"
    elif worse:
        text = f"{_moves(worse)}; within the margin of {regression.margin_text}"
    elif better:
        text = _moves(better)
    elif undecided:
        text = f"{_moves(undecided)}; chance alone may do that: measure both runs with more prompts"
    else:
        text = f"no deciding metric moved by more than chance, {regression.prompts} prompts"
    if worse and better:
        text += f"; better: {_moves(better)}"
    if own is not None and failing:
        before = regression.old.verdict
        alike = before is not None and before.status == own.status
        also = ", as the old one is" if alike else ""
        text += f"; the new run by itself is {own.status}{also}: {own.reason}"
    return replace(regression, fails=bool(beyond) or bool(undecided) or failing, reason=text)


def _moves(rows: Sequence[AgainstRow]) -> str:
    return ", ".join(f"{row.metric} {row.old.value:.3g} → {row.new.value:.3g}" for row in rows)


def _wanted(thresholds: Thresholds | None) -> list[str]:
    judged_by = default_thresholds() if thresholds is None else thresholds
    return list(dict.fromkeys([*DECIDING, *judged_by, *ALSO]))


def _rows(
    names: list[str], old: MeasuredRun, new: MeasuredRun, same: bool, seed: int
) -> list[AgainstRow]:
    """The metrics that both runs have, each with its change."""
    samples = old.sample, new.sample
    return [
        AgainstRow(
            name, old.values[name], new.values[name], _change(METRICS[name], samples, same, seed)
        )
        for name in names
        if name in old.values and name in new.values
    ]


def _one_sided(names: list[str], old: MeasuredRun, new: MeasuredRun) -> list[str]:
    """Metrics that one run has and the other has not: they are compared nowhere."""
    return [
        f"{name}: only the {'old' if name in old.values else 'new'} run has it, so not compared"
        for name in names
        if (name in old.values) != (name in new.values)
    ]


def _change(metric: Metric, samples: tuple[Sample, Sample], same: bool, seed: int) -> Estimate:
    old, new = samples
    if not same:
        return difference(metric, old, new, seed=seed)
    return paired(
        metric, old.arrays, new.arrays, sequence=old.sequence, prompt=old.prompt, seed=seed
    )


def _provenance(run: Path) -> dict[str, Any]:
    """What the run's first command noted; nothing where only artefacts were copied."""
    try:
        past = invocations(run)
    except MismatchError:  # damaged, or of another version: the artefacts are what counts
        return {}
    return past[0] if past else {}


def _notes(changes: Sequence[Changed]) -> list[str]:
    trainer = [change.name for change in changes if change.where == "trainer"]
    notes = []
    if trainer:
        named = ", ".join(trainer[:4]) + (" …" if len(trainer) > 4 else "")
        notes.append(f"the trainer has changed as well ({named}): not all of it is the engine's")
    if not any(change.where == "engine" for change in changes):
        notes.append("nothing that the engine says of itself has changed")
    return notes


def _engines(old: ScoredRollout, new: ScoredRollout, seed: int) -> Comparison:
    """Old engine against new engine, token by token."""
    return compare(
        old.rollout,
        replace(old.decode, name=f"old {old.decode.name}"),
        replace(new.decode, name=f"new {new.decode.name}"),
        sampled_by_left=is_sampling_law(old.rollout, old.decode),
        seed=seed,
        headline_only=True,
    )
