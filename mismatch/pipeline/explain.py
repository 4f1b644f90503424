"""``--explain``: make the experiments of the leading causes and report what they say.

They are variants of ``--fix`` and run as those do: passes of the trainer in one world first, then,
while a cause is left to ask about, one engine that samples again after another. What they leave is
shared with ``--fix``: neither makes it twice, and fixes that were measured count as experiments.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from mismatch.analysis.causes import others_of
from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.detector import detectors
from mismatch.analysis.diagnosis.pass_checks import by_finiteness
from mismatch.analysis.diagnosis.ranking import Causes, diagnose
from mismatch.analysis.scored_rollout import ScoredRollout
from mismatch.codec import from_json, to_json
from mismatch.errors import MismatchError, named_line
from mismatch.experiments.confirmation import applied, judged, settled, weighed
from mismatch.experiments.explanation import Experiment, Explanation, asked, names_of, plan
from mismatch.experiments.fixes.base import Context
from mismatch.experiments.fixes.planning import DIRECTORY, FixPlan, Variant
from mismatch.experiments.fixes.results import STATE as FIXES
from mismatch.experiments.fixes.results import cost_of, state_of, variant_of
from mismatch.experiments.fixes.spec_edits import context_of
from mismatch.experiments.locate.judge import FILE as LOCATED
from mismatch.experiments.locate.judge import SCHEMA as LOCATE_SCHEMA
from mismatch.experiments.locate.judge import of_run, to_document
from mismatch.experiments.scoring_passes import (
    CACHE,
    FRESH,
    judged_cache,
    judged_location,
    plan_probes,
    to_locate,
    training_passes,
    wants_square,
)
from mismatch.pipeline.build import Artefacts
from mismatch.pipeline.fix_trials import FixRun
from mismatch.pipeline.locate_run import Asked, locate_in
from mismatch.processes.fresh_engine import ask_fresh_engine, cache_of
from mismatch.processes.stages import Stages, score_in_float32
from mismatch.run import store
from mismatch.specs import CheckSpec
from mismatch.types import Pair, Report

STATE, STATE_SCHEMA = f"{DIRECTORY}/explain.json", "mismatch.explain/1"
LOCATE_MOST_S, FEW_SEQUENCES = 300.0, 4
OVER_BUDGET = "the budget is used up"
LOG = "logs/explain.log"  # of errors that are no MismatchError
ENGINES = 4  # engines that are started for it, at most
ENGINE_S = 60.0  # of an engine's start, where the run does not say what its own took


def explain(stages: Stages) -> None:
    """Make the experiments for what the run's own passes suspect; leave ``fixes/explain.json``.

    Raises:
        MismatchError: the run's own artefacts cannot be read.
    """
    start, run_dir = time.monotonic(), stages.run_dir
    context = context_of(stages.spec)
    run = FixRun(stages, FixPlan((), (), (), pairs=False))
    _passes_left_out(stages, run)
    causes = _causes(case_of(run_dir, stages.spec), [])
    fixed = _of_fixes(run_dir, stages.spec, causes)
    experiments = list(fixed)
    for engines in range(1 + ENGINES):
        variants, probes = _planned(stages, context, experiments)
        chosen = [pair for pair in variants if pair[0].same_tokens]
        if engines and probes:  # one start of the engine for all of them
            experiments += _probed(stages, run, probes, start)
        elif engines:
            chosen = variants[:1]
            if not chosen:
                break
        if chosen:
            stages.narrator.note(f"explain: {', '.join(e.id for e, _ in chosen)}")
            _measure(run, [variant for _, variant in chosen])
            experiments += [_single(stages, e, partial(_result, run, e, v)) for e, v in chosen]
    experiments += _located(stages, run, experiments, start)
    (run_dir / DIRECTORY).mkdir(exist_ok=True)
    before = (
        state_of(run_dir, STATE, STATE_SCHEMA)["seconds"] if (run_dir / STATE).exists() else 0.0
    )
    spent = round(max(before, time.monotonic() - start), 2)  # made before: nothing runs again
    own = to_json(experiments[len(fixed) :])
    document = {"schema": STATE_SCHEMA, "experiments": own, "seconds": spent}
    store.save_document(run_dir, STATE, document, schema=STATE_SCHEMA)


def _passes_left_out(stages: Stages, run: FixRun) -> None:
    """What --quick or --no-noise-floor left out, and detectors read: float32 first of all."""
    if wants_square(stages.spec):
        return
    full = replace(stages.spec, noise_floor=True, quick=False)
    stages.narrator.note("explain: the passes that tell a fault from rounding, left out so far")
    run.measure(training_passes(full), sample=False)
    score_in_float32(stages)


def _planned(
    stages: Stages, context: Context, experiments: list[Experiment]
) -> tuple[list[tuple[Experiment, Variant]], list[Experiment]]:
    """Return fixes, and experiments of a fresh engine, of the causes that are left."""
    case = case_of(stages.run_dir, stages.spec)
    causes = _causes(case, experiments)
    ids = [experiment.id for experiment in experiments]
    return plan(stages.spec, context, causes, ids), plan_probes(case, causes, ids)


def _causes(case: Case, experiments: list[Experiment]) -> Causes:
    """As far as the experiments that are made tell them apart."""
    causes = diagnose(case, detectors())
    return applied(causes, settled(causes, experiments))[0]


def _located(stages: Stages, run: FixRun, done: list[Experiment], start: float) -> list[Experiment]:
    """The module, where a function is at fault and nothing else gave it a name."""
    causes = _causes(case_of(stages.run_dir, stages.spec), done)
    planned = to_locate(causes)
    if planned is None:
        return []
    spent = time.monotonic() - start
    if run.over(spent + stages.journal.seconds.get("rollout", ENGINE_S)):
        return [replace(planned, reason=f"{OVER_BUDGET}: mismatch locate {stages.run_dir}")]
    allowed = run.allowed_s()
    seconds = LOCATE_MOST_S if allowed is None else min(LOCATE_MOST_S, allowed - spent)
    stages.narrator.note(f"explain: {planned.id}")

    def locate() -> list[Experiment]:
        location = of_run(stages.run_dir)
        if location is None:
            asked = Asked(sequences=FEW_SEQUENCES, seconds=seconds, seed=stages.spec.seed)
            location = locate_in(stages.run_dir, stages.spec, stages.narrator, asked)
            document = to_document(location)
            store.save_document(stages.run_dir, LOCATED, document, schema=LOCATE_SCHEMA)
        return [judged_location(planned, location)]

    return _attempt(stages, [planned], locate)


def _probed(
    stages: Stages, run: FixRun, planned: list[Experiment], start: float
) -> list[Experiment]:
    """One start of the engine for all of them; what fails is their failure and not the check's."""
    spent = time.monotonic() - start
    if run.over(spent + stages.journal.seconds.get("rollout", ENGINE_S)):
        return [replace(experiment, reason=OVER_BUDGET) for experiment in planned]
    stages.narrator.note(f"explain: {', '.join(each.id for each in planned)}")

    def ask() -> list[Experiment]:
        ask_fresh_engine(stages, [e.id for e in planned])
        return [_single(stages, e, partial(_probe_result, stages, e)) for e in planned]

    return _attempt(stages, planned, ask)


def _probe_result(stages: Stages, experiment: Experiment) -> Experiment:
    case = case_of(stages.run_dir, stages.spec)
    if experiment.id == CACHE:
        cache = cache_of(stages)
        if cache.reason:
            return replace(experiment, reason=cache.reason)
        return judged_cache(experiment, case, cache.pairs, cache.seconds)
    scoring = store.load_scoring(stages.run_dir, FRESH)
    after = Case.of(case.rollout, scoring, case.trainer, {})
    return judged(experiment, case, after, float(scoring.fingerprint["seconds"]))


def _attempt(
    stages: Stages, planned: list[Experiment], make: Callable[[], list[Experiment]]
) -> list[Experiment]:
    """What became of these experiments, or why nothing did: no failure ends the others."""
    try:
        return make()
    except Exception as error:
        reason = _reason(stages, error)
        return [replace(experiment, reason=reason) for experiment in planned]


def _single(stages: Stages, planned: Experiment, make: Callable[[], Experiment]) -> Experiment:
    """:func:`_attempt` of one experiment."""
    return _attempt(stages, [planned], lambda: [make()])[0]


def _reason(stages: Stages, error: Exception) -> str:
    """Why an experiment was not made; what nobody foresaw is kept with its traceback."""
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


def _measure(run: FixRun, chosen: list[Variant]) -> None:
    """Measure variants together; where that raises, each that is left alone."""
    run.variants += chosen
    try:
        run.measure([], sample=False)
    except Exception as error:
        reason = _reason(run.stages, error)
        left = [v for v in chosen if v.id not in run.failed and not run.scored(v)]
        if isinstance(error, MismatchError) or len(left) == 1:
            run.failed |= {v.id: reason for v in left}
            return
        run.variants = [v for v in run.variants if v not in left]
        for v in left:
            _measure(run, [v])


def _result(run: FixRun, experiment: Experiment, variant: Variant) -> Experiment:
    """What was measured, or why not."""
    if variant.id in run.failed:
        return replace(experiment, reason=run.failed[variant.id])
    if not run.scored(variant):
        return replace(experiment, reason=OVER_BUDGET)
    before = case_of(run.run_dir, run.stages.spec)
    return _measured(run.run_dir, run.stages.spec, before, experiment, variant)


def _measured(
    run_dir: Path, spec: CheckSpec, before: Case, experiment: Experiment, variant: Variant
) -> Experiment:
    """What a variant says, read from its scoring.

    Raises:
        MismatchError: it is missing, damaged, of other tokens, or not finite.
    """
    engine = spec.rollout.engine.engine
    sides = ScoredRollout.load(run_dir / variant.folder, engine, variant.scoring.name)
    after = Case.of(sides.rollout, sides.decode, sides.train, {})
    seconds = cost_of(sides, run_dir, variant).seconds or 0.0
    return judged(experiment, before, after, round(seconds, 2))


def _of_fixes(run_dir: Path, spec: CheckSpec, causes: Causes) -> list[Experiment]:
    """The fixes of a run that say something of its causes, as experiments."""
    if not spec.fixes or not (run_dir / FIXES).exists():
        return []
    names = names_of(causes)
    entries = state_of(run_dir)["variants"]
    asking = [(e, probe) for e in entries if (probe := asked(e["id"], spec, names)) is not None]
    if not asking:
        return []
    before = case_of(run_dir, spec)
    experiments = []
    for entry, probe in asking:
        variant = variant_of(spec, entry["id"], entry["place"])
        probe = replace(probe, same_tokens=not variant.folder)
        try:
            if entry["failed"]:
                raise MismatchError(entry["failed"])
            experiments.append(_measured(run_dir, spec, before, probe, variant))
        except MismatchError as error:
            experiments.append(replace(probe, reason=error.headline.splitlines()[0]))
    return experiments


def case_of(run_dir: Path, spec: CheckSpec) -> Case:
    """The headline's two sides, as detectors read them.

    Raises:
        MismatchError: an artefact is missing or damaged.
    """
    artefacts = Artefacts.load(run_dir, spec)
    Pair.of(artefacts.rollout, artefacts.decode, artefacts.train)  # refuses sides of other tokens
    usable, _ = by_finiteness(artefacts.scorings)
    others = others_of(usable, artefacts.decode, artefacts.train)
    return Case.of(artefacts.rollout, artefacts.decode, artefacts.train, others)


def with_explanation(report: Report, run_dir: Path, spec: CheckSpec) -> Report:
    """The report with what experiments and fixes said, its causes confirmed or ruled out by it."""
    causes = report.result("causes")
    if causes is None:
        return report
    own: list[Experiment] = []
    explained, spent = spec.explain and (run_dir / STATE).exists(), 0.0
    if explained:
        state = state_of(run_dir, STATE, STATE_SCHEMA)
        own, spent = from_json(list[Experiment], state["experiments"]), state["seconds"]
    fixed = _of_fixes(run_dir, spec, causes)
    if not explained and not fixed:
        return report
    ids = [e.id for e in fixed]
    experiments = settled(causes, [*fixed, *(e for e in own if e.id not in ids)])
    causes, confirmed, ruled_out = applied(causes, experiments)
    spent += sum(e.seconds or 0.0 for e in fixed)
    shown = tuple(weighed(causes, experiments))
    explanation = Explanation(shown, confirmed, ruled_out, round(spent, 2))
    return report.with_analyses(causes=causes, explain=explanation)
