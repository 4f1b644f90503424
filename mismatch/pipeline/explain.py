"""``--explain``: the experiments that tell the leading causes apart, made and told.

They are variants of ``--fix`` and run as those do: passes of the trainer in one world, an engine
that has to sample anew one at a time, and none once nothing is left to be told apart. What they
leave is shared with ``--fix``: neither makes it twice.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from mismatch.analysis.causes import others_of
from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.detector import detectors
from mismatch.analysis.diagnosis.passes import by_finiteness
from mismatch.analysis.diagnosis.ranking import diagnose
from mismatch.analysis.sides import Sides
from mismatch.codec import from_json, to_json
from mismatch.errors import MismatchError
from mismatch.experiments.explanation import (
    Costs,
    Experiment,
    Explanation,
    applied,
    costs_of,
    judged,
    plan,
)
from mismatch.experiments.fixes.base import Context
from mismatch.experiments.fixes.environment import context_of
from mismatch.experiments.fixes.planning import DIRECTORY, FixPlan, Variant
from mismatch.experiments.passes import training_passes, wants_square
from mismatch.pipeline.build import Artefacts
from mismatch.pipeline.fixes import FixRun
from mismatch.processes.stages import Stages, score_in_float32
from mismatch.run import store
from mismatch.specs import CheckSpec
from mismatch.types import Report

STATE, STATE_SCHEMA = f"{DIRECTORY}/explain.json", "mismatch.explain/1"
ENGINES = 4  # engines that are started for it, at most


def explain(stages: Stages) -> None:
    """Make the experiments for what the run's own passes suspect; leave ``fixes/explain.json``.

    Raises:
        MismatchError: the run's own artefacts cannot be read.
    """
    start, run_dir = time.monotonic(), stages.run_dir
    context = context_of(stages.spec)
    run = FixRun(stages, FixPlan((), (), (), pairs=False))
    _passes_left_out(stages, run)
    made: list[Experiment] = []
    for engines in range(1 + ENGINES):
        planned = _planned(stages, context, made)
        on_tokens = [pair for pair in planned if pair[0].same_tokens]
        chosen = on_tokens if engines == 0 else planned[:1]
        if not chosen and engines:
            break
        if chosen:
            _say(stages, chosen)
            run.variants += [variant for _, variant in chosen]
            _measure(run, chosen)
            made += [_result(run, *pair) for pair in chosen]
    (run_dir / DIRECTORY).mkdir(exist_ok=True)
    before = _state(run_dir)["seconds"] if (run_dir / STATE).exists() else 0.0
    spent = round(max(before, time.monotonic() - start), 2)  # made before: nothing runs again
    document = {"schema": STATE_SCHEMA, "experiments": to_json(made), "seconds": spent}
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
    stages: Stages, context: Context, made: list[Experiment]
) -> list[tuple[Experiment, Variant]]:
    case = case_of(stages.run_dir, stages.spec)
    causes = applied(diagnose(case, detectors()), made)[0]
    header = case.trainer.fingerprint
    costs: Costs = costs_of(stages.journal.seconds, header)
    return plan(stages.spec, context, causes, costs, [one.id for one in made])


def _measure(run: FixRun, chosen: list[tuple[Experiment, Variant]]) -> None:
    """Make them; a world that fails is their failure and not the check's."""
    try:
        run.measure([], sample=False)
    except MismatchError as error:
        run.stages.narrator.note(f"explain: {error.headline}")
        for _, variant in chosen:
            if not run.scored(variant):
                run.failed.setdefault(variant.id, error.headline.splitlines()[0])


def _say(stages: Stages, chosen: list[tuple[Experiment, Variant]]) -> None:
    words = ", ".join(f"{one.id} ({one.expected_s:.0f} s)" for one, _ in chosen)
    stages.narrator.note(f"explain: {words}")


def _result(run: FixRun, experiment: Experiment, variant: Variant) -> Experiment:
    """What was measured, or why not."""
    if variant.id in run.failed:
        return replace(experiment, reason=run.failed[variant.id])
    if not run.scored(variant):
        return replace(experiment, reason="the budget is used up")
    header = store.scoring_header(run.run_dir / variant.place, variant.scoring.name)
    seconds = float(header["fingerprint"].get("seconds", 0.0))
    seconds += run.engine_seconds(variant.place) if variant.place else 0.0
    try:
        before = case_of(run.run_dir, run.stages.spec)
        after = _variant_case(run.run_dir, run.stages.spec, variant)
    except MismatchError as error:
        return replace(experiment, reason=error.message)
    return judged(experiment, before, after, round(seconds, 2))


def case_of(run_dir: Path, spec: CheckSpec) -> Case:
    """The headline's two sides, as detectors read them.

    Raises:
        MismatchError: an artefact is missing or damaged.
    """
    artefacts = Artefacts.load(run_dir, spec)
    Sides(artefacts.rollout, artefacts.decode, artefacts.train).pair  # noqa: B018  of the same tokens
    usable, _ = by_finiteness(artefacts.scorings)
    others = others_of(usable, artefacts.decode, artefacts.train)
    return Case.of(artefacts.rollout, artefacts.decode, artefacts.train, others)


def _variant_case(run_dir: Path, spec: CheckSpec, variant: Variant) -> Case:
    engine = spec.rollout.engine.engine
    sides = Sides.load(run_dir / variant.place, engine, variant.scoring.name)
    return Case.of(sides.rollout, sides.decode, sides.train, {})


def with_explanation(report: Report, run_dir: Path, spec: CheckSpec) -> Report:
    """The report with what the experiments said, its causes confirmed or ruled out by it."""
    causes = report.result("causes")
    if not spec.explain or causes is None or not (run_dir / STATE).exists():
        return report
    state = _state(run_dir)
    experiments = from_json(list[Experiment], state["experiments"])
    causes, confirmed, ruled_out = applied(causes, experiments)
    told = Explanation(tuple(experiments), confirmed, ruled_out, state["seconds"])
    return report.with_analyses(causes=causes, explain=told)


def _state(run_dir: Path) -> dict[str, Any]:
    state: dict[str, Any] = store.load_document(run_dir, STATE)
    if state.get("schema") != STATE_SCHEMA:
        raise MismatchError(f"{run_dir / STATE} is of another version", "make the run again")
    return state
