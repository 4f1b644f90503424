"""What a run with fixes left in its directory, compared and ranked."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mismatch.analysis.diagnosis.pass_checks import by_finiteness, enough_data
from mismatch.analysis.levels import AS_LOADED as WEIGHTS
from mismatch.analysis.long_sequence import ROUNDING, of_run
from mismatch.analysis.long_sequence import checks as long_checks
from mismatch.analysis.plugins import RunArtefacts
from mismatch.analysis.results import Square
from mismatch.analysis.scored_rollout import ScoredRollout
from mismatch.analysis.square import measure, precision_of
from mismatch.analysis.square_checks import square_checks
from mismatch.analysis.thresholds import Thresholds, default_thresholds
from mismatch.errors import MismatchError
from mismatch.experiments.fixes.catalogue import chosen_of, fix_named
from mismatch.experiments.fixes.planning import DIRECTORY, Variant, bare, with_all
from mismatch.experiments.fixes.significance import METHOD, Tried, best_of, held_out, judged, ranked
from mismatch.experiments.results import RANKED_BY, EstimatorFix, FixCost, FixOutcome, FixTable
from mismatch.experiments.scoring_passes import training_passes
from mismatch.keys import FIX, FLOAT32, TRAIN, TRAINER_FLOAT32, Key
from mismatch.metrics import METRICS
from mismatch.metrics.difference import Sample, common_prompts
from mismatch.metrics.permutation import LEVEL, holm
from mismatch.run import store
from mismatch.run.directory import invocations
from mismatch.specs import CheckSpec
from mismatch.types import Check, Comparison, Estimate, Report, Scoring

SHOWN = (*RANKED_BY, "logprob_abs_diff_p999", "routing_disagree_layer")
WORTH = 0.1  # less than that is no reason to change a second setting
ANEW = "with this fix the engine sampled again, and no float32 pass was made of its tokens"
NOT_LONG = "the long sequence was not scored with this fix"
AGAIN = "check again with this fix"
NO_CORRECTIONS = "nothing was compared, so no correction was computed"
STATE, STATE_SCHEMA = f"{DIRECTORY}/state.json", "mismatch.fixes/1"


def with_fixes(
    report: Report, run_dir: Path, spec: CheckSpec, thresholds: Thresholds | None
) -> Report:
    """Return the report with its table of fixes, and the verdict after them if asked for."""
    if not spec.fixes or not (run_dir / STATE).exists():
        return report
    table = table_of(run_dir, spec, thresholds, report)
    after = None
    if spec.verdict == "after-fixes" and table.best_together is not None:
        after = table.outcome(table.best_together).verdict_after
    if after is None:
        return report.with_analyses(fixes=replace(table, verdict=spec.verdict))
    table = replace(table, verdict=spec.verdict, verdict_as_is=report.verdict)
    verdict = replace(after, reason=f"after {table.best_together}: {after.reason}")
    return replace(report.with_analyses(fixes=table), verdict=verdict)


def state_of(run_dir: Path, file: str = STATE, schema: str = STATE_SCHEMA) -> dict[str, Any]:
    """Return what was tried in a run, as it was saved.

    Raises:
        MismatchError: nothing was tried here, or by another version.
    """
    state: dict[str, Any] = store.load_document(run_dir, file)
    if state.get("schema") != schema:
        raise MismatchError(f"{run_dir / file} is of another version", "make the run again")
    return state


def variant_of(spec: CheckSpec, name: str, folder: str) -> Variant:
    """Return a variant from its id."""
    chosen = chosen_of(name)
    return Variant(chosen, with_all(chosen, bare(spec)), folder)


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
    state, engine = state_of(run_dir), spec.rollout.engine.engine
    levels = default_thresholds() if thresholds is None else thresholds
    wanted = list(dict.fromkeys([*SHOWN, *levels, "ratio_mean"]))
    corners = Corners(run_dir, spec)
    unsound, before, base = "", None, None
    try:
        base = ScoredRollout.load(run_dir, engine, TRAIN)
        before = base.comparison(wanted, spec.seed)
    except MismatchError as error:  # its log-probabilities are not finite, for one
        unsound = f"the run without it cannot be compared: {error.message}"
    rows: list[FixOutcome] = []
    raw: dict[str, dict[str, float]] = {}
    tried: list[Tried] = []
    for entry in state["variants"]:
        variant = variant_of(spec, entry["id"], entry["place"])
        same_tokens = not variant.folder
        row = variant.outcome(entry["failed"])
        try:
            if entry["failed"]:
                raise MismatchError(entry["failed"])
            sides = ScoredRollout.load(run_dir / variant.folder, engine, variant.key)
            after = sides.comparison(wanted, spec.seed)
            found, unmeasured = corners.correctness(sides, after, variant)
            # Fixes leave weights as they are, and the run has more passes that tell of digests. A
            # fault of loading may be gone from an engine that was started again.
            found += [
                check
                for check in (report.checks if report else ())
                if check.id == WEIGHTS
                and (check.status == "warning" or (check.status == "failed" and same_tokens))
            ]
            kernel = str(sides.train.fingerprint.get("attention", ""))
            verdict = sides.verdict(after, thresholds, found, unmeasured)
            row = replace(row, kernel=kernel, verdict_after=verdict)
            if base is None or before is None:  # no change, only where a run with it ends
                rows.append(replace(row, reason=unsound))
                continue
            row = replace(row, before=_shown(before), after=_shown(after))
            trial = Tried(row, *samples(base, sides), same_tokens)
            row = replace(trial.measured(spec.seed), cost=cost_of(sides, run_dir, variant))
            raw[row.id] = trial.p_values(spec.seed)
        except MismatchError as error:
            rows.append(variant.outcome(error.message))
            continue
        tried.append(replace(trial, row=row))
        rows.append(row)
    rows += [FixOutcome(**entry) for entry in state["refused"]]
    order = ranked(judged(rows, raw))
    single, together = best_of(order)
    if any(row.id == single and row.heals for row in order):
        together = single  # two changes where one is enough would not be good advice
    elif single and together and single != together:
        places = {entry["id"]: entry["place"] for entry in state["variants"]}
        sides_of = [
            ScoredRollout.load(run_dir / places[name], engine, Key.of(FIX, name))
            for name in (single, together)
        ]
        together = together if adds(sides_of[0], sides_of[1], spec.seed) else single
    corrected = report is not None and report.result("corrections") is not None
    return FixTable(
        outcomes=order,
        estimators=tuple(
            EstimatorFix(
                fix.id,
                fix.summary,
                fix.corrects if corrected else None,
                fix.hides,
                "" if corrected else NO_CORRECTIONS,
            )
            for fix in map(fix_named, state["estimators"])
        ),
        best=single,
        best_together=together,
        left_out=tuple(state["left_out"]),
        method=METHOD,
        seconds=state["seconds"],
        held_out=held_out(together, tried, spec.seed) if together else None,
    )


def samples(before: ScoredRollout, after: ScoredRollout) -> tuple[Sample, Sample]:
    """Return the log-ratios of two runs, their prompts numbered alike."""
    numbers = common_prompts(before.rollout, after.rollout)
    first, second = (
        Sample({"delta": side.pair.delta}, side.pair.sequence, prompt)
        for side, prompt in zip((before, after), numbers, strict=True)
    )
    return first, second


def adds(single: ScoredRollout, together: ScoredRollout, seed: int) -> bool:
    """Return whether a combination leaves a tenth less than the best single fix, not by chance."""
    sides = samples(single, together)
    p_values = Tried(FixOutcome("", "both", ""), *sides, same_tokens=False).p_values(seed)
    for metric, p in zip(p_values, holm(list(p_values.values())), strict=True):
        alone, both = (METRICS[metric](**side.arrays) for side in sides)
        if p <= LEVEL and both <= (1.0 - WORTH) * alone:
            return True
    return False


def _shown(comparison: Comparison) -> dict[str, Estimate]:
    estimates = comparison.metrics | comparison.routing
    return {name: estimates[name] for name in SHOWN if name in estimates}


def cost_of(sides: ScoredRollout, run_dir: Path, variant: Variant) -> FixCost:
    """Return the seconds of its forward passes and, where the engine ran for it, of the engine."""
    facts = sides.train.fingerprint
    seconds = facts.get("seconds")
    if variant.folder and seconds is not None:
        seconds = round(seconds + engine_seconds(run_dir / variant.folder), 3)
    peaks = facts.get("peak_bytes") or 0  # one number, or one of every rank
    highest = max(peaks, default=0) if isinstance(peaks, list) else peaks
    return FixCost(seconds, highest or None)


def engine_seconds(directory: Path) -> float:
    """Return the longest time that an engine took to sample in a directory."""
    past = invocations(directory)
    return max((entry.get("seconds", {}).get("rollout", 0.0) for entry in past), default=0.0)


@dataclass
class Corners:
    """What a run holds of the square, apart from the two sides that a fix changes.

    A fix of the trainer scores the run's own tokens, so the engine's corners and the float32
    reference are those of the run; the trainer's side is measured from its new scoring, and its
    float32 pass is new where the fix changes more than precision.
    """

    run_dir: Path
    spec: CheckSpec

    def correctness(
        self, sides: ScoredRollout, comparison: Comparison, variant: Variant
    ) -> tuple[list[Check], str]:
        """Return its checks and that of the amount of data, and why correctness stays open."""
        enough = enough_data(sides.rollout)
        if variant.folder:
            return [enough], ANEW
        train = replace(sides.train, name=TRAIN)
        usable = {**self.usable, sides.decode.name: sides.decode, TRAIN: train}
        if precision_of(train.fingerprint) != "fp32":  # else this scoring is in float32
            exact = Key.of(FIX, variant.id, FLOAT32)
            made = exact in [pass_.name for pass_ in variant.passes(self.spec)]
            for scoring in self.scorings(exact if made else TRAINER_FLOAT32).values():
                usable[TRAINER_FLOAT32] = replace(scoring, name=TRAINER_FLOAT32)
        first = self.scorings(*store.scoring_names(self.run_dir, first=True))
        run = RunArtefacts(sides.rollout, sides.decode, train, comparison, usable, {}, first)
        square = measure(run, self.spec)
        if not isinstance(square, Square):
            return [enough], square.reason
        return [enough, *square_checks(square), *self.long_checks(variant)], ""

    def long_checks(self, variant: Variant) -> list[Check]:
        """Return those of the long sequence, which a fix of the function changes too."""
        run = of_run(self.run_dir, self.spec)
        if run is None:
            return []
        long = any(Key(pass_.name).tokens for pass_ in variant.passes(self.spec))
        fix = variant.key if long else ""
        found = of_run(self.run_dir, self.spec, fix)
        checks = {check.id: check for check in (long_checks(found) if found else ())}
        rows = [pass_.name for pass_ in training_passes(variant.spec)]
        needless = {ROUNDING} if TRAINER_FLOAT32 not in rows else set()
        return [
            checks.get(check.id, replace(check, status="inconclusive", detail=NOT_LONG, fix=AGAIN))
            for check in long_checks(run)
            if check.id not in needless
        ]

    @cached_property
    def usable(self) -> dict[str, Scoring]:
        """The run's scorings that a fix of the trainer leaves as they are."""
        names = store.scoring_names(self.run_dir)
        return self.scorings(*(name for name in names if Key(name).side not in (TRAIN, FIX)))

    def scorings(self, *names: str) -> dict[str, Scoring]:
        """Return what can be used of these scorings of the run."""
        scorings = {}
        for name in names:
            with suppress(MismatchError):  # missing or damaged: its corner is not measured
                scorings[name] = store.load_scoring(self.run_dir, name)
        return by_finiteness(scorings)[0]
