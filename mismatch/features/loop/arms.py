"""All arms and seeds of a loop, one after the other, in one run directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mismatch.codec import from_json, refused, to_json
from mismatch.doctor.fit import Fit, engine_fit, trainer_fits
from mismatch.doctor.machine import inspect_machine
from mismatch.doctor.plan import work_of
from mismatch.errors import MismatchError
from mismatch.features.loop.history import CHECKPOINTS, Row, forget_from, rows_of
from mismatch.features.loop.judge import SCHEMA, Arm, LoopReport, SeedRun, loop_to_json
from mismatch.features.loop.section import page
from mismatch.features.loop.spec import Asked, LoopSpec, arm_of, place_of, settings
from mismatch.keys import TRAIN
from mismatch.models.config import find_config
from mismatch.models.sizes import sized
from mismatch.processes.launch import Progress, finish, started
from mismatch.processes.stages import Narrator, engine_command, world_command
from mismatch.reports.files import write_page
from mismatch.run.directory import at_work
from mismatch.run.machine import local_gpus, placement
from mismatch.run.manifest import require_no_links
from mismatch.run.resume import differences
from mismatch.run.store import read_json, write_json
from mismatch.specs import CheckSpec, Pass, portable

SETTINGS, POOL, STOPPED = "settings.json", "pool.json", "stopped.json"
ENGINE_MODULE = "mismatch.features.loop.engine_side"
TRAINER_MODULE = "mismatch.features.loop.trainer_side"
TURN_S = 3600.0  # that the trainer may wait while the engine samples


def run_arm(directory: Path, loop: LoopSpec, pool: Path, progress: Progress) -> list[Row]:
    """Run every step that is not there yet; what was measured stays however it ends.

    Args:
        directory: the folder of this arm and seed.
        pool: file of the prompts, which the first arm writes and all others read.

    Raises:
        MismatchError: engine or trainer failed, with the reason it gave; the last checkpoint stays.
    """
    start = resume_from(directory)
    if start < loop.steps:
        forget_from(directory, start)  # before the engine, which would follow an order of before
        where = placement(loop.check, local_gpus())
        job = {"run_dir": str(directory), "loop": to_json(loop), "start": start, "pool": str(pool)}
        path = write_json(directory / "jobs" / "loop.json", job)
        engine, engine_env = engine_command(loop.check.rollout.engine, where, ENGINE_MODULE, path)
        world, world_env = world_command(loop.check, where, TRAINER_MODULE, path)
        with (
            started("loop-engine", engine, directory, progress, engine_env) as sampling,
            started("loop-trainer", world, directory, progress, world_env) as training,
        ):
            finish(training, sampling, more_s=TURN_S)
    return rows_of(directory)


def resume_from(directory: Path) -> int:
    """Return the steps that the last whole checkpoint holds; 0 without a checkpoint."""
    whole = [path.name for path in (directory / CHECKPOINTS).glob("*") if path.name.isdecimal()]
    return max(map(int, whole), default=0)


def run_loop(asked: Asked, run_dir: Path, narrator: Narrator, command: str) -> LoopReport:
    """Run every step that is not there; seeds outermost, so that all arms have as many of them.

    loop.json, loop.html and loop.md say what the run directory holds, however the run ends.

    Raises:
        MismatchError: an arm that means nothing or changes nothing, settings other than those the
            run began with, or an engine or trainer that failed: what was measured is kept.
    """
    base = asked.loop
    planned = [arm_of(replace(base, seed=seed), arm) for seed in asked.seeds for arm in asked.arms]
    failed: MismatchError | None = None
    with at_work(run_dir, "loop", base.check, command):
        every = require_same_settings(asked, run_dir)
        try:
            for number, loop in enumerate(planned, 1):
                folder = run_dir / place_of(loop.arm, loop.seed)
                folder.mkdir(parents=True, exist_ok=True)
                (folder / STOPPED).unlink(missing_ok=True)
                title = f"{loop.arm}, seed {loop.seed} ({number} of {len(planned)})"
                try:
                    with narrator.stage(title) as progress:
                        run_arm(folder, loop, run_dir / POOL, progress)
                except MismatchError as error:
                    if not rows_of(folder):  # nothing was measured: the others would fail too
                        raise
                    write_json(folder / STOPPED, {"message": error.headline})
                    narrator.note(f"{loop.arm}, seed {loop.seed}, stopped: {error.headline}")
                    failed = error
        finally:
            report = gather(every, run_dir)
            if report.arms:
                write_page(run_dir, page(report), loop_to_json(report))
    if failed is not None:
        raise failed
    return report


def gather(asked: Asked, run_dir: Path) -> LoopReport:
    """Collect what lies in the run directory, of these arms and seeds."""
    arms = []
    for name in asked.arms:
        runs = []
        for seed in asked.seeds:
            folder = run_dir / place_of(name, seed)
            rows = rows_of(folder)
            columns = dict.fromkeys(column for row in rows for column in row)
            curves = {column: tuple(row.get(column) for row in rows) for column in columns}
            ended = folder / STOPPED
            stopped = read_json(ended)["message"] if ended.exists() else ""
            if rows:
                runs.append(SeedRun(seed, curves, stopped))
        if runs:
            arms.append(Arm(name, tuple(runs)))
    loop, engine = asked.loop, asked.loop.check.rollout.engine
    return LoopReport(engine.model, engine.engine, tuple(arms), settings(loop), loop.checked)


def require_same_settings(asked: Asked, run_dir: Path) -> Asked:
    """Return all arms and seeds that the run was ever asked; other settings are refused by name."""
    path, base = run_dir / SETTINGS, asked.loop
    if path.exists():
        before = read_settings(run_dir)
        free = replace(before.loop, steps=base.steps, checkpoint_every=base.checkpoint_every)
        if other := differences(settings(free), settings(base)):
            fault = f"{run_dir} was begun with other settings:\n    " + "\n    ".join(other)
            raise MismatchError(fault, "the same flags, or none but --resume RUN; or a new --out")
        arms = tuple(dict.fromkeys([*before.arms, *asked.arms]))
        asked = Asked(base, arms, tuple(dict.fromkeys([*before.seeds, *asked.seeds])))
    every = {"arms": list(asked.arms), "seeds": list(asked.seeds)}
    write_json(path, {"schema": SCHEMA, "loop": settings(base), **every})
    return asked


def read_settings(run_dir: Path) -> Asked:
    """Return what a run was asked: settings as of the last time, all arms and seeds."""
    path = run_dir / SETTINGS
    require_no_links(run_dir)
    if not path.exists():
        raise MismatchError(f"{run_dir} holds no loop", "a folder that `mismatch loop` made")
    stored = read_json(path)
    with refused(SCHEMA, command="mismatch loop", page="docs/how-to/loop.md"):
        loop = from_json(LoopSpec, portable(stored["loop"]))
    return Asked(loop, tuple(stored["arms"]), tuple(stored["seeds"]))


def memory_of_loop(spec: CheckSpec) -> tuple[Fit, ...]:
    """Predict engine and trainer with its optimiser, alive at once; empty where sizes are unknown.

    The trainer has what the engine leaves, unless each has separate GPUs.
    """
    machine = inspect_machine()
    try:
        shape = sized(find_config(spec.train.model, spec.train.revision))
        work = work_of(spec)[0]
        where = placement(spec, len(machine.gpus))
    except MismatchError:
        return ()
    steps = [Pass(TRAIN, replace(spec.train, grad=True))]
    engine = engine_fit(spec, shape, work, machine)
    beside = 0 if where.trainer else engine.needed
    return (engine, *trainer_fits(spec, shape, work, machine, steps, beside))
