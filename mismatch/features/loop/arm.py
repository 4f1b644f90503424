"""One arm and one seed of the loop: an engine and a training world that live side by side."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from mismatch.codec import to_json
from mismatch.features.loop.history import CHECKPOINTS, Row, forget_from, rows_of
from mismatch.features.loop.spec import LoopSpec
from mismatch.processes.launch import POLL_S, Worker, started
from mismatch.processes.stages import engine_command, world_command
from mismatch.run.machine import local_gpus, placement
from mismatch.run.store import write_json

ENGINE, TRAINER = "loop-engine", "loop-trainer"
ENGINE_MODULE = "mismatch.features.loop.engine_side"
TRAINER_MODULE = "mismatch.features.loop.trainer_side"
Progress = Callable[[str], None]


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
            started(ENGINE, engine, directory, progress, engine_env) as sampling,
            started(TRAINER, world, directory, progress, world_env) as training,
        ):
            finish_both(sampling, training)
    return rows_of(directory)


def finish_both(*workers: Worker) -> None:
    """Wait until all are done; they wait in turns, so that one is at work.

    Raises:
        MismatchError: the first that failed, or all stalled.
    """
    at_work = {worker: worker.watch() for worker in workers}
    while at_work:
        for worker in [*at_work]:
            if worker.ended():
                del at_work[worker]
        if at_work and all(watch.idle_s() > watch.limit_s for watch in at_work.values()):
            worker, watch = next(iter(at_work.items()))
            worker.require_activity(watch)
        time.sleep(POLL_S)


def resume_from(directory: Path) -> int:
    """Return the steps that the last whole checkpoint holds; 0 without a checkpoint."""
    whole = [path.name for path in (directory / CHECKPOINTS).glob("*") if path.name.isdecimal()]
    return max(map(int, whole), default=0)
