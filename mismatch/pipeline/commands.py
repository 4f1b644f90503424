"""What each verb runs, in its order: rollout, scores, comparison, report."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mismatch.analysis.explained import lead_of
from mismatch.analysis.levels import incomplete
from mismatch.analysis.thresholds import Thresholds
from mismatch.attempts import Attempts
from mismatch.codec import from_json
from mismatch.engines.registry import weight_givers
from mismatch.errors import MismatchError
from mismatch.experiments.fixes.results import with_fixes
from mismatch.experiments.scoring_passes import (
    first_passes,
    training_passes,
    wants_square,
    with_few,
)
from mismatch.keys import TRAIN
from mismatch.models.moe import require_forms, require_routes
from mismatch.pipeline.build import build_report
from mismatch.pipeline.explain import with_explanation
from mismatch.pipeline.on_disk import compare_with_disk
from mismatch.pipeline.tokens import record_best_fix
from mismatch.plugins import features, load, step_label
from mismatch.processes.launched import Launched
from mismatch.processes.launched import score as score_launched
from mismatch.processes.stages import ALL, Narrator, Room, Stages, scored
from mismatch.processes.tasks import Score
from mismatch.run import store
from mismatch.run.directory import at_work, load_spec
from mismatch.run.manifest import damage_named
from mismatch.run.messages import error_path, pass_label, write_error
from mismatch.run.resume import differences
from mismatch.specs import CheckSpec, EngineSpec, Pass, TrainSpec, to_dict
from mismatch.types import Report

if TYPE_CHECKING:
    import pandas as pd


Writer = Callable[[Path, Report, "pd.DataFrame"], Report]


def run_check(
    spec: CheckSpec,
    run_dir: Path,
    narrator: Narrator,
    thresholds: Thresholds | None = None,
    command: str = "",
    write: Writer | None = None,
    room: Room = ALL,
) -> Report:
    """After :func:`preflight`: run every stage that is not done, write every artefact.

    Args:
        write: called with the run directory, the report and the token table while the directory
            is still held, gives the report as it was written; None: the report is only returned.

    Raises:
        MismatchError: a stage failed before the trainer had scored; what was written before stays,
            to be resumed. What fails later is named in the report.
    """
    attempts = Attempts()
    with at_work(run_dir, "check", spec, command) as journal:
        stages = Stages(spec, run_dir, narrator, journal, wants_square(spec), room)
        stages.count.total = 1 + bool(spec.explain)  # comparisons
        passes = [pass_ for pass_ in training_passes(spec) if pass_.name not in room.left_out]
        passes = with_few(passes, room.float32_few) + first_passes(spec, room.float32_layers)
        if spec.fixes:
            from mismatch.pipeline.fix_trials import measure_with_fixes

            try:
                measure_with_fixes(stages, passes)
            except Exception as error:
                if not scored(spec, run_dir, passes[0]):
                    raise
                attempts.note("fixes", error)
        else:
            stages.measure(passes)
        for name, reason in room.left_out.items():
            write_error(run_dir, pass_label(name), MismatchError(reason))
        attempts.make("weights on disk", compare_with_disk, stages, otherwise=None)
        run_steps(stages, attempts)
        report = conclude(stages, thresholds, write, attempts)
        if not wants_experiments(spec, report):
            return report
        from mismatch.pipeline.explain import explain

        stages.count.total += not spec.explain
        broken = report.verdict.status == "broken"
        attempts.make("explain", explain, stages, broken, otherwise=None)
        return conclude(stages, thresholds, write, attempts)


def wants_experiments(spec: CheckSpec, report: Report) -> bool:
    """Return whether experiments follow: asked for, or a broken run has no confirmed cause."""
    if spec.explain is not None or spec.quick or report.verdict.status != "broken":
        return bool(spec.explain)
    return lead_of(report.result("causes"), report.checks) is None


def run_steps(stages: Stages, attempts: Attempts) -> None:
    """Run what features add to a check; a step that fails leaves its reason and ends nothing."""
    for feature in features():
        if not feature.check_step:
            continue
        label = step_label(feature)
        error_path(stages.run_dir, label).unlink(missing_ok=True)
        try:
            load(feature.check_step)(stages)
        except MismatchError as error:
            write_error(stages.run_dir, label, error)
            stages.narrator.note(f"{feature.name}: {error.headline}")
        except Exception as error:
            attempts.note(feature.name, error)


def run_rollout(spec: CheckSpec, run_dir: Path, narrator: Narrator, command: str = "") -> None:
    """Run the engine alone: tokens, decode and prefill scorings.

    Raises:
        MismatchError: the engine failed.
    """
    with at_work(run_dir, "rollout", spec, command) as journal:
        Stages(spec, run_dir, narrator, journal).measure([])


def run_score(
    spec: CheckSpec,
    run_dir: Path,
    narrator: Narrator,
    name: str = TRAIN,
    command: str = "",
    world: Launched | None = None,
) -> None:
    """Add the trainer's scorings to a run that holds a rollout.

    Args:
        name: of the scoring; one that is not ``TRAIN`` is made without a noise floor.
        world: in a world that was launched for this process; None: a world is started.

    Raises:
        MismatchError: no rollout, another scoring of that name, or the training world failed.
    """
    store.load_rollout(run_dir)
    require_routes(spec, weight_givers())
    require_forms(spec)
    if spec.weights_effect is not None and name != TRAIN:
        fault = f"--weights effect= is for the scoring {TRAIN!r}, not for {name!r}"
        fix = f"drop --name, or give this scoring the form: --weights train={spec.weights_effect}"
        raise MismatchError(fault, fix)
    if spec.inject and name != TRAIN:
        fault = f"--inject is for the second pass of the scoring {TRAIN!r}, not for {name!r}"
        raise MismatchError(fault, "drop --name, or drop --inject")
    recorded = load_spec(run_dir)
    passes = [Pass(name, spec.train)]
    if name == TRAIN:
        passes = training_passes(replace(spec, context_length=0))  # the engine scores it as well
    _require_free_name(run_dir, passes[0])
    kept = replace(  # its fixes stay: a later compare shows their table
        spec, fixes=recorded.fixes, budget_minutes=recorded.budget_minutes,
        verdict=recorded.verdict, explain=recorded.explain,
    )  # fmt: skip
    if name != TRAIN:
        kept = replace(kept, train=recorded.train)
    if world is not None:
        held = nullcontext() if world.rank else at_work(run_dir, "score", kept, command)
        with held:
            score_launched(run_dir.resolve(), passes, spec.seed, world, narrator.note)
        return
    with at_work(run_dir, "score", kept, command) as journal:
        Stages(spec, run_dir, narrator, journal).measure(passes, sample=False)


def run_engine_score(
    engine: EngineSpec, run_dir: Path, narrator: Narrator, name: str, command: str = ""
) -> None:
    """Add the scoring of an engine that need not have sampled the tokens of a run.

    Args:
        name: of the scoring, e.g. ``sglang:prefill``.

    Raises:
        MismatchError: no rollout, the run holds a scoring of that name, or the engine failed.
    """
    store.load_rollout(run_dir)
    if name in store.scoring_names(run_dir):
        fault = f"{run_dir} holds a scoring {name!r}"
        raise MismatchError(fault, "keep both: --name NAME for the new scoring")
    recorded = load_spec(run_dir)
    spec = replace(recorded.rollout, engine=engine, exact_kl=0)
    with at_work(run_dir, "score", recorded, command) as journal:
        stages = Stages(replace(recorded, rollout=spec), run_dir, narrator, journal)
        label = f"{engine.engine}-prefill"
        with stages.engine(spec, label, Score(name)) as worker:
            stages.wait(worker, label, f"score: {engine.engine} scores the same tokens")


def run_compare(
    run_dir: Path,
    narrator: Narrator,
    thresholds: Thresholds | None = None,
    command: str = "",
    write: Writer | None = None,
) -> Report:
    """Compare and judge what lies in a run directory, whoever made it.

    Args:
        write: as of :func:`run_check`.

    Raises:
        MismatchError: artefacts missing, damaged, or of different tokens.
    """
    spec = load_spec(run_dir)
    with at_work(run_dir, "compare", spec, command) as journal:
        stages = Stages(spec, run_dir, narrator, journal)
        return conclude(stages, thresholds, write, Attempts(), again=True)


def conclude(
    stages: Stages,
    thresholds: Thresholds | None,
    write: Writer | None,
    attempts: Attempts,
    again: bool = False,
) -> Report:
    """Compare and judge what the stages left; hand the report to ``write``.

    Args:
        attempts: what has failed since the trainer scored.
        again: compare again even if ``comparison.json`` exists.
    """
    with stages.timed("compare", "compare: metrics with intervals"):
        run_dir, spec = stages.run_dir, stages.spec
        parts = Attempts()
        parts.failed += attempts.failed
        report, tokens = build_report(run_dir, spec, thresholds, again, parts)
        known = len(parts.failed)
        fixed = report, run_dir, spec, thresholds
        stored = damage_named(f"a file of {run_dir}")
        report = parts.make("fixes", stored(with_fixes), *fixed, otherwise=report)
        shown = run_dir, report, tokens
        tokens = parts.make("tokens of the best fix", record_best_fix, *shown, otherwise=tokens)
        explained = report, run_dir, spec
        report = parts.make("explain", stored(with_explanation), *explained, otherwise=report)
        report = incomplete(report, parts.failed[known:])
    stages.journal.save()
    entry, earlier = stages.journal.entry, stages.journal.earlier
    report.run.update((key, entry[key]) for key in entry if key not in ("verb", "finished", "seal"))
    report.run.update(seconds=stages.journal.seconds, timings=stages.journal.timings)
    if earlier:
        report.run["earlier_commands"] = [command["command"] for command in earlier]
    return report if write is None else write(run_dir, report, tokens)


def _require_free_name(run_dir: Path, pass_: Pass) -> None:
    """Refuse to replace a scoring by one with other settings."""
    if pass_.name not in store.scoring_names(run_dir):
        taken = [
            n
            for n in store.scoring_names(run_dir)
            if store.scoring_file(n) == store.scoring_file(pass_.name)
        ]
        if not taken:
            return
        raise MismatchError(
            f"{run_dir} holds the scoring {taken[0]!r}, whose file would be that of {pass_.name!r}",
            "choose another --name",
        )
    saved = store.scoring_header(run_dir, pass_.name).get("spec")
    # Through a spec and back: what was saved holds lists for tuples, and no fields that are newer.
    if saved is None or from_json(TrainSpec, saved) == pass_.spec:
        return
    lines = differences(to_dict(from_json(TrainSpec, saved)), to_dict(pass_.spec))
    raise MismatchError(
        f"{run_dir} holds a scoring {pass_.name!r} with other settings:\n    "
        + "\n    ".join(lines),
        "keep both: --name NAME for the new scoring",
    )
