"""Make the experiments of the leading cause and report what they say.

``--explain`` asks for them; they also follow where a run is broken and no cause is confirmed.

They are variants of ``--fix`` and run as those do: passes of the trainer in one world first, then,
while the cause is open, one engine that samples again after another. What they leave is shared with
``--fix``: neither makes it twice, and fixes that were measured count as experiments.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import replace
from pathlib import Path

from mismatch.analysis.cause_results import Causes
from mismatch.analysis.causes import of_this_machine, others_of, with_causes
from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.detector import detectors
from mismatch.analysis.diagnosis.pass_checks import by_finiteness
from mismatch.analysis.diagnosis.ranking import diagnose
from mismatch.analysis.scored_rollout import ScoredRollout
from mismatch.captures import CachePair
from mismatch.codec import from_json, to_json
from mismatch.errors import MismatchError, named_line
from mismatch.experiments.confirmation import applied, judged, settled, weighed
from mismatch.experiments.explanation import asked, names_of, plan
from mismatch.experiments.fixes.context import context_of
from mismatch.experiments.fixes.planning import DIRECTORY, FixPlan, Variant
from mismatch.experiments.fixes.results import STATE as FIXES
from mismatch.experiments.fixes.results import cost_of, state_of, variant_of
from mismatch.experiments.probes import CACHE, CACHE_FILE, FRESH, RESCORING, fresh, judged_cache
from mismatch.experiments.results import Experiment, Explanation
from mismatch.experiments.scoring_passes import (
    first_passes,
    training_passes,
    wants_square,
    with_few,
)
from mismatch.pipeline.build import Artefacts
from mismatch.pipeline.fix_trials import FixRun
from mismatch.processes.stages import Stages, lacking, score_in_float32
from mismatch.processes.tasks import ReadCache, Score
from mismatch.run import store
from mismatch.run.messages import error_path
from mismatch.specs import CheckSpec
from mismatch.types import Pair, Report

STATE, STATE_SCHEMA = f"{DIRECTORY}/explain.json", "mismatch.explain/1"
OVER_BUDGET = "the budget is used up"
LOG = "logs/explain.log"  # of errors that are no MismatchError
FRESH_ENGINE = "fresh-engine"  # label of its session
ENGINES = 4  # engines that are started for it, at most
ENGINE_S = 60.0  # of an engine's start, where the run does not say what the run's engine took
UNASKED_S = 600.0  # that experiments may take which nobody asked for


def explain(stages: Stages, broken: bool) -> None:
    """Make the experiments for what the run's own passes suspect; leave ``fixes/explain.json``.

    Args:
        broken: the verdict so far.

    Raises:
        MismatchError: the run's own artefacts cannot be read.
    """
    start, run_dir, spec = time.monotonic(), stages.run_dir, stages.spec
    context, run = context_of(spec), FixRun(stages, FixPlan())
    if not spec.explain:
        run.allowed_s = min(run.allowed_s, UNASKED_S)
    if not wants_square(spec):
        stages.narrator.note("explain: the passes that tell a fault from rounding, left out so far")
        whole = replace(spec, noise_floor=True, quick=False, context_length=0)
        passes = with_few(training_passes(whole), stages.room.float32_few)
        passes += first_passes(whole, stages.room.float32_layers)
        left_out = stages.room.left_out
        run.measure([each for each in passes if each.name not in left_out], sample=False)
        score_in_float32(stages)
    case = case_of(run_dir, spec)
    fixed = _of_fixes(run_dir, spec, diagnose(case, detectors()))
    experiments = list(fixed)
    for engines in range(1 + ENGINES):
        causes = diagnose(case, detectors())
        causes = applied(causes, settled(causes, experiments))[0]
        done = [experiment.id for experiment in experiments]
        planned = plan(spec, context, case, causes, done, broken)
        probes = [experiment for experiment, variant in planned if variant is None]
        chosen = [(experiment, variant) for experiment, variant in planned if variant is not None]
        if not engines:
            chosen = [pair for pair in chosen if pair[0].same_tokens]
        elif probes:  # one start of the engine for all of them
            experiments += _probed(stages, run, probes, start)
            continue
        elif not (chosen := chosen[:1]):
            break
        if chosen:
            stages.narrator.note(f"explain: {', '.join(each.id for each, _ in chosen)}")
            experiments += _measured(stages, run, case, chosen)
    (run_dir / DIRECTORY).mkdir(exist_ok=True)
    spent = time.monotonic() - start
    if (run_dir / STATE).exists():  # made before: nothing runs again
        spent = max(spent, state_of(run_dir, STATE, STATE_SCHEMA)["seconds"])
    own = to_json(experiments[len(fixed) :])
    document = {"schema": STATE_SCHEMA, "experiments": own, "seconds": round(spent, 2)}
    store.save_document(run_dir, STATE, document, schema=STATE_SCHEMA)


def _measured(
    stages: Stages, run: FixRun, before: Case, chosen: list[tuple[Experiment, Variant]]
) -> list[Experiment]:
    """Measure variants in one world; what fails is their failure and not the check's."""
    run.variants += [variant for _, variant in chosen]
    try:
        run.measure([], sample=False)
    except Exception as error:
        reason = _reason(stages, error)
        run.failed |= {v.id: reason for v in run.variants if not run.scored(v)}
    made = []
    for experiment, variant in chosen:
        reason = run.failed.get(variant.id, "" if run.scored(variant) else OVER_BUDGET)
        made.append(_judged(run.run_dir, stages.spec, before, experiment, variant, reason))
    return made


def _judged(
    run_dir: Path,
    spec: CheckSpec,
    before: Case,
    experiment: Experiment,
    variant: Variant,
    failed: str,
) -> Experiment:
    """Return what a variant says, read from its scoring, or why it says nothing."""
    try:
        if failed:
            raise MismatchError(failed)
        engine = spec.rollout.engine.engine
        sides = ScoredRollout.load(run_dir / variant.folder, engine, variant.key)
    except MismatchError as error:
        return replace(experiment, reason=error.headline.splitlines()[0])
    after = Case.of(sides.rollout, sides.decode, sides.train, {})
    seconds = cost_of(sides, run_dir, variant).seconds or 0.0
    return judged(experiment, before, after, round(seconds, 2))


def _probed(
    stages: Stages, run: FixRun, planned: list[Experiment], start: float
) -> list[Experiment]:
    """Start the engine once for all of them; what fails is their failure and not the check's."""
    expected_s = stages.journal.seconds.get("rollout", ENGINE_S)
    if time.monotonic() - start + expected_s > run.allowed_s:
        return [replace(experiment, reason=OVER_BUDGET) for experiment in planned]
    stages.narrator.note(f"explain: {', '.join(each.id for each in planned)}")
    try:
        _ask_fresh_engine(stages, [experiment.id for experiment in planned])
    except Exception as error:
        reason = _reason(stages, error)
        return [replace(experiment, reason=reason) for experiment in planned]
    made = []
    for experiment in planned:
        try:
            case = case_of(stages.run_dir, stages.spec)
            if experiment.id != CACHE:
                scoring = store.load_scoring(stages.run_dir, FRESH)
                after = Case.of(case.rollout, scoring, case.trainer, {})
                seconds = float(scoring.fingerprint["seconds"])
                made.append(judged(experiment, case, after, seconds))
            elif (cache := store.load_document(stages.run_dir, CACHE_FILE))["reason"]:
                made.append(replace(experiment, reason=cache["reason"]))
            else:
                pairs = from_json(list[CachePair], cache["pairs"])
                made.append(judged_cache(experiment, case, pairs, float(cache["seconds"])))
        except Exception as error:
            made.append(replace(experiment, reason=_reason(stages, error)))
    return made


def _ask_fresh_engine(stages: Stages, ids: list[str]) -> None:
    """Rescore the run's tokens, read the prefix cache, or both; what is there is not made again."""
    run_dir, spec = stages.run_dir, fresh(stages.spec.rollout)
    tasks: list[Score | ReadCache] = []
    if RESCORING in ids:
        tasks += lacking(run_dir, spec, [Score(FRESH)])
    if CACHE in ids and not (run_dir / CACHE_FILE).exists():
        tasks.append(ReadCache(CACHE_FILE))
    if tasks:
        error_path(run_dir, FRESH_ENGINE).unlink(missing_ok=True)
        title = f"rollout: a fresh {spec.engine.engine}: {', '.join(ids)}"
        with stages.engine(spec, FRESH_ENGINE, *tasks) as worker:
            stages.wait(worker, FRESH_ENGINE, title)


def _reason(stages: Stages, error: Exception) -> str:
    """Say why experiments were not made; what nobody foresaw is kept with its traceback."""
    if isinstance(error, MismatchError):
        reason = error.headline.splitlines()[0]
    else:
        log = stages.run_dir / LOG
        log.parent.mkdir(exist_ok=True)
        with log.open("a") as file:
            file.write("".join(traceback.format_exception(error)))
        reason = f"{named_line(error)}; see {LOG}"
    stages.narrator.note(f"explain: {reason}")
    return reason


def _of_fixes(run_dir: Path, spec: CheckSpec, causes: Causes) -> list[Experiment]:
    """Return the fixes of a run that say something of its causes, as experiments."""
    if not spec.fixes or not (run_dir / FIXES).exists():
        return []
    names, before, experiments = names_of(causes), None, []
    for entry in state_of(run_dir)["variants"]:
        probe = asked(entry["id"], spec, names)
        if probe is not None:
            before = before or case_of(run_dir, spec)
            variant = variant_of(spec, entry["id"], entry["place"])
            probe = replace(probe, same_tokens=not variant.folder)
            experiments.append(_judged(run_dir, spec, before, probe, variant, entry["failed"]))
    return experiments


def case_of(run_dir: Path, spec: CheckSpec) -> Case:
    """Return the headline's two sides, as detectors read them.

    Raises:
        MismatchError: an artefact is missing or damaged.
    """
    artefacts = Artefacts.load(run_dir, spec)
    Pair.of(artefacts.rollout, artefacts.decode, artefacts.train)  # refuses sides of other tokens
    usable, _ = by_finiteness(artefacts.scorings)
    others = others_of(usable, artefacts.decode, artefacts.train)
    return Case.of(artefacts.rollout, artefacts.decode, artefacts.train, others)


def with_explanation(report: Report, run_dir: Path, spec: CheckSpec) -> Report:
    """Return the report with what experiments and fixes said, its causes confirmed or ruled out."""
    causes = report.result("causes")
    if causes is None:
        return report
    fixed, own, spent = _of_fixes(run_dir, spec, causes), [], 0.0
    if made := spec.explain is not False and (run_dir / STATE).exists():
        state = state_of(run_dir, STATE, STATE_SCHEMA)
        own, spent = from_json(list[Experiment], state["experiments"]), state["seconds"]
    elif not fixed:
        return report
    ids = [experiment.id for experiment in fixed]
    experiments = settled(causes, [*fixed, *(each for each in own if each.id not in ids)])
    after, confirmed, ruled_out = applied(causes, experiments)
    after = of_this_machine(after, case_of(run_dir, spec).trainer.fingerprint)
    suspected = {cause.id for cause in after.ranked if cause.status != "confirmed"}
    confirmed = tuple(id for id in confirmed if id not in suspected)
    spent += sum(experiment.seconds or 0.0 for experiment in fixed)
    shown = tuple(weighed(after, experiments))
    explanation = Explanation(shown, confirmed, ruled_out, round(spent, 2))
    report = with_causes(report, after, made)
    return report.with_analyses(explain=explanation)
