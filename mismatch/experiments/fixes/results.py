"""What a run with fixes left in its directory, compared and ranked."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch.analysis.diagnosis.pass_checks import by_finiteness, enough_data
from mismatch.analysis.levels import default_thresholds
from mismatch.analysis.plugins import RunArtefacts
from mismatch.analysis.scored_rollout import ScoredRollout
from mismatch.analysis.square import Square, measure
from mismatch.analysis.square_checks import square_checks
from mismatch.errors import MismatchError
from mismatch.experiments.fixes.base import (
    RANKED_BY,
    SHOWN,
    EstimatorFix,
    FixCost,
    FixOutcome,
    FixTable,
)
from mismatch.experiments.fixes.planning import DIRECTORY, Variant, bare, chosen_of
from mismatch.experiments.fixes.significance import (
    METHOD,
    TokenDeltas,
    Tried,
    best_of,
    change_of,
    held_out,
    judged,
    p_value,
    ranked,
    removed_share,
)
from mismatch.metrics import METRICS
from mismatch.metrics.difference import common_prompts
from mismatch.metrics.permutation import LEVEL, holm
from mismatch.run import store
from mismatch.run.directory import invocations
from mismatch.run.store import FIX_PREFIX, TRAIN
from mismatch.specs import CheckSpec
from mismatch.types import Check, Comparison, Estimate, Report, Scoring

if TYPE_CHECKING:
    from mismatch.analysis.levels import Thresholds

WORTH = 0.1  # less than that is no reason to change a second setting
ANEW = "with this fix the engine sampled anew, and no float32 pass was made of its tokens"
STATE, STATE_SCHEMA = f"{DIRECTORY}/state.json", "mismatch.fixes/1"


def with_fixes(
    report: Report, run_dir: Path, spec: CheckSpec, thresholds: Thresholds | None
) -> Report:
    """The report with its table of fixes, and after them the verdict if that was asked for."""
    if not spec.fixes or not (run_dir / STATE).exists():
        return report
    table = table_of(run_dir, spec, thresholds, report)
    if spec.verdict == "as-is" or table.best_together is None:
        return report.with_analyses(fixes=replace(table, verdict=spec.verdict))
    after = table.outcome(table.best_together).verdict_after
    if after is None:
        return report.with_analyses(fixes=replace(table, verdict=spec.verdict))
    verdict = replace(after, reason=f"after {table.best_together}: {after.reason}")
    table = replace(table, verdict=spec.verdict, verdict_as_is=report.verdict)
    return replace(report.with_analyses(fixes=table), verdict=verdict)


def table_of(
    run_dir: Path,
    spec: CheckSpec,
    thresholds: Thresholds | None = None,
    report: Report | None = None,
) -> FixTable:
    """Compare every variant that was measured with the run as it is.

    Args:
        report: the run's own, for what it says of corrections.

    Raises:
        MismatchError: no fixes were tried here, or the run itself cannot be compared.
    """
    state = state_of(run_dir)
    rows, raw, tried = outcomes(run_dir, spec, state, thresholds)
    order = ranked(judged([*rows, *_refused(state)], raw))
    single, together = best_of(order)
    if single and together and single != together:
        places = {entry["id"]: entry["place"] for entry in state["variants"]}
        first, second = (
            ScoredRollout.load(
                run_dir / places[name], spec.rollout.engine.engine, f"{FIX_PREFIX}{name}"
            )
            for name in (single, together)
        )
        together = together if adds(first, second, spec.seed) else single
    confirmed = held_out(together, tried, spec.seed) if together else None
    return FixTable(
        outcomes=order,
        estimators=_estimators(state, report),
        best=single,
        best_together=together,
        left_out=tuple(state["left_out"]),
        method=METHOD,
        seconds=state["seconds"],
        held_out=confirmed,
    )


def state_of(run_dir: Path, file: str = STATE, schema: str = STATE_SCHEMA) -> dict[str, Any]:
    """What was tried in a run, as it was saved.

    Raises:
        MismatchError: nothing was tried here, or by another version.
    """
    state: dict[str, Any] = store.load_document(run_dir, file)
    if state.get("schema") != schema:
        raise MismatchError(f"{run_dir / file} is of another version", "make the run again")
    return state


def outcomes(
    run_dir: Path, spec: CheckSpec, state: dict[str, Any], thresholds: Thresholds | None
) -> tuple[list[FixOutcome], dict[str, dict[str, float]], list[Tried]]:
    """Rows with their numbers, p-values that are not adjusted yet, and what they are made of."""
    engine = spec.rollout.engine.engine
    base, unsound = _base(run_dir, engine)
    before = base.comparison(_wanted(thresholds), spec.seed) if base else None
    rows: list[FixOutcome] = []
    raw: dict[str, dict[str, float]] = {}
    tried: list[Tried] = []
    corners = Corners(run_dir, spec)
    for entry in state["variants"]:
        variant = variant_of(spec, entry["id"], entry["place"])
        if entry["failed"]:
            rows.append(variant.outcome(entry["failed"]))
            continue
        directory = run_dir / variant.folder
        try:
            sides = ScoredRollout.load(directory, engine, variant.scoring.name)
            if base is None or before is None:
                rows.append(_alone(variant, sides, unsound, corners, thresholds))
                continue
            pair = measured(base, sides)
            row, raw[variant.id] = _compared(variant, pair, sides, before, corners, thresholds)
        except MismatchError as error:
            rows.append(variant.outcome(error.message))
            continue
        tried.append(Tried(row, *pair))
        rows.append(replace(row, cost=cost_of(sides, run_dir, variant)))
    return rows, raw, tried


def _base(run_dir: Path, engine: str) -> tuple[ScoredRollout | None, str]:
    """The run as it is, or why it cannot be compared: its logprobs are not finite, for one."""
    try:
        return ScoredRollout.load(run_dir, engine, TRAIN), ""
    except MismatchError as error:
        return None, error.message


def _alone(
    variant: Variant,
    sides: ScoredRollout,
    unsound: str,
    corners: Corners,
    thresholds: Thresholds | None,
) -> FixOutcome:
    """A row where there is nothing to compare with: no change, only where a run with it ends."""
    after = sides.comparison(_wanted(thresholds), corners.spec.seed)
    row = variant.outcome(f"the run without it cannot be compared: {unsound}")
    correct = corners.correctness(sides, after, same_tokens=not variant.folder)
    return replace(row, verdict_after=sides.verdict(after, thresholds, *correct))


def adds(single: ScoredRollout, together: ScoredRollout, seed: int) -> bool:
    """Whether a combination is worth more than the best single fix: a tenth less, and not by
    chance. If not, that fix will do.
    """
    alone, both = measured(single, together)
    p_values = holm([p_value(metric, alone, both, seed) for metric in RANKED_BY])
    sizes = [[METRICS[metric](delta=side.delta) for side in (alone, both)] for metric in RANKED_BY]
    return any(
        p <= LEVEL and after <= (1.0 - WORTH) * before
        for p, (before, after) in zip(p_values, sizes, strict=True)
    )


def measured(before: ScoredRollout, after: ScoredRollout) -> tuple[TokenDeltas, TokenDeltas]:
    """Log-ratios of two sides, their prompts numbered alike."""
    numbers = common_prompts(before.rollout, after.rollout)
    first, second = (
        TokenDeltas(side.pair.delta, side.pair.sequence, prompt)
        for side, prompt in zip((before, after), numbers, strict=True)
    )
    return first, second


def variant_of(spec: CheckSpec, name: str, folder: str) -> Variant:
    """A variant from its id."""
    chosen = chosen_of(name)
    changed = reduce(lambda changed, item: item.apply(changed), chosen, bare(spec))
    return Variant(chosen, changed, folder)


def _compared(
    variant: Variant,
    pair: tuple[TokenDeltas, TokenDeltas],
    sides: ScoredRollout,
    before: Comparison,
    corners: Corners,
    thresholds: Thresholds | None,
) -> tuple[FixOutcome, dict[str, float]]:
    unfixed, fixed = pair
    same, seed = not variant.folder, corners.spec.seed
    changes = {m: change_of(m, unfixed, fixed, same_tokens=same, seed=seed) for m in RANKED_BY}
    shares = {
        m: removed_share(m, unfixed, fixed, change, same_tokens=same, seed=seed)
        for m, change in changes.items()
    }
    after = sides.comparison(_wanted(thresholds), seed)
    correct = corners.correctness(sides, after, same_tokens=same)
    row = replace(
        variant.outcome(),
        before=_shown(before),
        after=_shown(after),
        paired=changes["k3_kl"] if same else None,
        difference=None if same else changes["k3_kl"],
        changes=changes,
        removed={metric: share for metric, share in shares.items() if share is not None},
        verdict_after=sides.verdict(after, thresholds, *correct),
    )
    return row, {metric: p_value(metric, unfixed, fixed, seed) for metric in RANKED_BY}


def _wanted(thresholds: Thresholds | None) -> list[str]:
    judged_by = default_thresholds() if thresholds is None else thresholds
    return list(dict.fromkeys([*SHOWN, *judged_by, "ratio_mean"]))


def _shown(comparison: Comparison) -> dict[str, Estimate]:
    estimates = comparison.metrics | comparison.routing
    return {name: estimates[name] for name in SHOWN if name in estimates}


def cost_of(sides: ScoredRollout, run_dir: Path, variant: Variant) -> FixCost:
    """Seconds of its forward passes and, where the engine ran for it, of the engine."""
    facts = sides.train.fingerprint
    seconds = facts.get("seconds")
    if variant.folder and seconds is not None:
        past = invocations(run_dir / variant.folder)
        engine = [entry["seconds"].get("rollout", 0.0) for entry in past if "seconds" in entry]
        seconds = round(seconds + max(engine, default=0.0), 3)
    peaks = facts.get("peak_bytes") or 0  # one number, or one of every rank
    highest = max(peaks, default=0) if isinstance(peaks, list) else peaks
    return FixCost(seconds, highest or None)


def _refused(state: dict[str, Any]) -> list[FixOutcome]:
    return [
        FixOutcome(
            entry["id"], entry["side"], entry["summary"], entry["flags"], entry["applies"],
            entry["reason"],
        )
        for entry in state["refused"]
    ]  # fmt: skip


def _estimators(state: dict[str, Any], report: Report | None) -> tuple[EstimatorFix, ...]:
    corrections = None if report is None else report.result("corrections")
    rows = []
    for name in state["estimators"]:
        fix = chosen_of(name)[0].fix
        there = corrections is not None
        reason = "" if there else "nothing was compared, so no correction was computed"
        named = fix.corrects if there else None
        rows.append(EstimatorFix(fix.id, fix.summary, named, fix.hides, reason))
    return tuple(rows)


class Corners:
    """What a run holds of the square, beside the two sides that a fix changes.

    A fix of the trainer scores the run's own tokens, so the engine's corners and the float32
    reference are those of the run; the trainer's side is measured from its new scoring.
    """

    def __init__(self, run_dir: Path, spec: CheckSpec) -> None:
        self.run_dir, self.spec = run_dir, spec
        self._beside: dict[str, Scoring] | None = None

    def correctness(
        self, sides: ScoredRollout, comparison: Comparison, *, same_tokens: bool
    ) -> tuple[list[Check], str]:
        """Its checks and those of the amount of data; why correctness stays open, "" where not."""
        enough = enough_data(sides.rollout)
        if not same_tokens:
            return [enough], ANEW
        train = replace(sides.train, name=TRAIN)
        usable = {**self.beside, sides.decode.name: sides.decode, TRAIN: train}
        run = RunArtefacts(sides.rollout, sides.decode, train, comparison, usable, {})
        square = measure(run, self.spec)
        if not isinstance(square, Square):
            return [enough], square.reason
        return [enough, *square_checks(square)], ""

    @property
    def beside(self) -> dict[str, Scoring]:
        """The run's scorings that no fix of the trainer changes."""
        if self._beside is None:
            names = store.scoring_names(self.run_dir)
            scorings = {}
            for name in names:
                if name == TRAIN or name.startswith((f"{TRAIN}:", store.FIX_PREFIX)):
                    continue
                try:
                    scorings[name] = store.load_scoring(self.run_dir, name)
                except MismatchError:  # damaged: its corner is not measured
                    continue
            self._beside, _ = by_finiteness(scorings)
        return self._beside
