"""All arms and seeds of a loop, one after the other, in one run directory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mismatch.codec import from_json, refused
from mismatch.errors import MismatchError
from mismatch.experiments.scoring_passes import training_passes, wants_square
from mismatch.features.loop.arm import resume_from, run_arm
from mismatch.features.loop.history import COLUMNS, WEIGHTS, rows_of
from mismatch.features.loop.judge import (
    FILE,
    SCHEMA,
    Arm,
    LoopReport,
    SeedRun,
    StepVerdict,
    loop_to_json,
)
from mismatch.features.loop.spec import LoopSpec, arm_of, place_of, settings
from mismatch.pipeline.build import build_report
from mismatch.processes.stages import Narrator, Stages, score_in_float32
from mismatch.run import store
from mismatch.run.directory import at_work
from mismatch.run.resume import differences
from mismatch.run.store import TRAIN
from mismatch.specs import CheckSpec, portable

SETTINGS, POOL, STOPPED, VERDICT = "settings.json", "pool.json", "stopped.json", "verdict.json"


def run_loop(
    base: LoopSpec,
    arms: Sequence[str],
    seeds: Sequence[int],
    run_dir: Path,
    narrator: Narrator,
    command: str,
    write: Callable[[Path, LoopReport], None],
    budget_minutes: float | None = None,
) -> LoopReport:
    """Every step that is not there; seeds outermost, so that all arms have as many of them.

    Args:
        write: called with the run directory and what it holds, however the run ends.
        budget_minutes: each of the runs that are left gets an equal part of what is left of it.

    Raises:
        MismatchError: an arm that means nothing or changes nothing, settings other than those the
            run began with, or an engine or trainer that failed: what was measured is kept.
    """
    planned = [arm_of(replace(base, seed=seed), arm) for seed in seeds for arm in arms]
    failed: MismatchError | None = None
    until = time.monotonic() + 60.0 * (math.inf if budget_minutes is None else budget_minutes)
    with at_work(run_dir, "loop", base.check, command):
        every = require_same_settings(base, arms, seeds, run_dir)
        try:
            for number, loop in enumerate(planned, 1):
                folder = run_dir / place_of(loop.arm, loop.seed)
                title = f"{loop.arm}, seed {loop.seed} ({number} of {len(planned)})"
                share = (until - time.monotonic()) / (len(planned) - number + 1)
                failed = (
                    _one(loop, folder, run_dir / POOL, narrator, title, command, share) or failed
                )
        finally:
            report = gather(base, run_dir, *every)
            if report.arms:
                store.write_json(run_dir / FILE, loop_to_json(report))
                write(run_dir, report)
    if failed is not None:
        raise failed
    return report


def _one(
    loop: LoopSpec,
    directory: Path,
    pool: Path,
    narrator: Narrator,
    title: str,
    command: str,
    most_s: float,
) -> MismatchError | None:
    """One arm and seed; its failure, where it had measured something: others may go on.

    Raises:
        MismatchError: it failed before its first step.
    """
    directory.mkdir(parents=True, exist_ok=True)
    done = resume_from(directory)
    (directory / STOPPED).unlink(missing_ok=True)
    failed: MismatchError | None = None
    try:
        with narrator.stage(title + (f", from step {done}" if done else "")) as progress:
            run_arm(directory, loop, pool, progress, most_s)
    except MismatchError as error:
        if not rows_of(directory):
            raise
        store.write_json(directory / STOPPED, {"message": error.headline})
        narrator.note(f"{loop.arm}, seed {loop.seed}, stopped: {error.headline}")
        failed = error
    if rows_of(directory):
        check_ends(directory, loop, narrator, command)
    return failed


def check_ends(directory: Path, loop: LoopSpec, narrator: Narrator, command: str) -> None:
    """The check of the first and the last step's tokens, each a run directory of its own."""
    for folder in ends(directory):
        if (folder / VERDICT).exists():
            continue
        check = check_of(loop, directory, int(folder.name))
        with at_work(folder, "loop", check, command) as journal:
            if check.noise_floor:
                narrator.note(f"{loop.arm}, seed {loop.seed}, the check of step {int(folder.name)}")
                stages = Stages(check, folder, narrator, journal)
                if wants_square(check):
                    score_in_float32(stages)
                passes = [each for each in training_passes(check) if each.name != TRAIN]
                stages.measure(passes, sample=False)
            report, _ = build_report(folder, check)
        verdict = {"status": report.verdict.status, "reason": report.verdict.reason}
        store.write_json(folder / VERDICT, verdict)


def check_of(loop: LoopSpec, directory: Path, step: int) -> CheckSpec:
    """A check of the weights of this step; without other passes where they are gone."""
    check = loop.check
    if step == 0:
        return check
    if step != loop.steps - 1:
        return replace(check, noise_floor=False)
    model = str(directory / WEIGHTS)
    engine = replace(check.rollout.engine, model=model, revision=None)
    train = replace(check.train, model=model, revision=None)
    return replace(check, rollout=replace(check.rollout, engine=engine), train=train)


def ends(directory: Path) -> list[Path]:
    """Steps that were kept whole."""
    steps = sorted((directory / "steps").glob("*"))
    return [path for path in steps if (path / "scores" / "fsdp.parquet").exists()]


def gather(base: LoopSpec, run_dir: Path, arms: Sequence[str], seeds: Sequence[int]) -> LoopReport:
    """What lies in the run directory, of these arms and seeds."""
    gathered = []
    for arm in arms:
        runs = [_run(run_dir / place_of(arm, seed), seed) for seed in seeds]
        gathered.append(Arm(arm, tuple(run for run in runs if run.steps)))
    return LoopReport(
        model=base.check.rollout.engine.model,
        engine=base.check.rollout.engine.engine,
        arms=tuple(arm for arm in gathered if arm.runs),
        settings=settings(base),
    )


def _run(directory: Path, seed: int) -> SeedRun:
    rows = rows_of(directory)
    verdicts = [_verdict(folder) for folder in ends(directory) if (folder / VERDICT).exists()]
    stopped = directory / STOPPED
    paths = [path for path in ends(directory)[:1] if (path / "engine.json").exists()]
    return SeedRun(
        seed=seed,
        curves={name: tuple(row.get(name) for row in rows) for name in COLUMNS},
        path=store.read_json(paths[0] / "engine.json")["path"] if paths else "",
        first=next((v for v in verdicts if v.step == 0), None),
        last=next((v for v in verdicts if v.step == len(rows) - 1 > 0), None),
        stopped=store.read_json(stopped)["message"] if stopped.exists() else "",
    )


def _verdict(folder: Path) -> StepVerdict:
    verdict = store.read_json(folder / VERDICT)
    shown = Path(*folder.parts[-4:])  # in the run directory
    return StepVerdict(int(folder.name), verdict["status"], verdict["reason"], str(shown))


def require_same_settings(
    base: LoopSpec, arms: Sequence[str], seeds: Sequence[int], run_dir: Path
) -> tuple[list[str], list[int]]:
    """A run goes on as it began; more steps, arms and seeds may be asked of it.

    Returns:
        All arms and seeds that it was ever asked.

    Raises:
        MismatchError: other settings, by name.
    """
    path, every = run_dir / SETTINGS, (list(arms), list(seeds))
    if path.exists():
        earlier, before, used = read_settings(run_dir)
        every = list(dict.fromkeys([*before, *arms])), list(dict.fromkeys([*used, *seeds]))
        free = {"steps": base.steps, "checkpoint_every": base.checkpoint_every}
        other = differences(settings(replace(earlier, **free)), settings(base))  # type: ignore[arg-type]
        if other:
            raise MismatchError(
                f"{run_dir} was begun with other settings:\n    " + "\n    ".join(other),
                "the same flags, or none but --resume RUN; or a new --out",
            )
    asked = {"arms": every[0], "seeds": every[1]}
    store.write_json(path, {"schema": SCHEMA, "loop": settings(base), **asked})
    return every


def read_settings(run_dir: Path) -> tuple[LoopSpec, list[str], list[int]]:
    """What a run was asked: settings as of the last time, all arms and seeds.

    Raises:
        MismatchError: no run of a loop, or of another version.
    """
    path = run_dir / SETTINGS
    if not path.exists():
        raise MismatchError(f"{run_dir} holds no loop", "a folder that `mismatch loop` made")
    settings = store.read_json(path)
    with refused(SCHEMA, command="mismatch loop", page="docs/loop.md"):
        loop = from_json(LoopSpec, portable(settings["loop"]))
    return loop, settings.get("arms", []), settings.get("seeds", [])
