"""One arm and one seed of the loop: an engine and a training world that live side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from mismatch.codec import to_json
from mismatch.features.loop.history import ASLEEP, CHECKPOINTS, Row, rows_of, save_history
from mismatch.features.loop.spec import SLEEPERS, LoopSpec
from mismatch.processes.launch import POLL_S, Worker, started
from mismatch.processes.stages import engine_command, world_command
from mismatch.run.machine import Placement, local_gpus, placement
from mismatch.run.store import write_json
from mismatch.specs import CheckSpec

ENGINE, TRAINER = "loop-engine", "loop-trainer"
ENGINE_MODULE = "mismatch.features.loop.engine_side"
TRAINER_MODULE = "mismatch.features.loop.trainer_side"
Progress = Callable[[str], None]


def run_arm(
    directory: Path, loop: LoopSpec, pool: Path, progress: Progress, most_s: float = math.inf
) -> list[Row]:
    """Every step that is not there yet; what was measured is saved however it ends.

    Args:
        most_s: seconds after which no further step is waited for; a later run goes on.
        directory: the folder of this arm and seed.
        pool: file of the prompts, which the first arm writes and all others read.

    Raises:
        MismatchError: engine or trainer failed, with its own reason; the last checkpoint stays.
    """
    start = resume_from(directory)
    if start >= loop.steps:
        return rows_of(directory)
    where = placement(loop.check, local_gpus())
    job = {"run_dir": str(directory), "loop": to_json(loop), "start": start, "pool": str(pool)}
    job["shares"] = shares(loop.check, where)
    (directory / ASLEEP).unlink(missing_ok=True)
    path = write_json(directory / "jobs" / "loop.json", job)
    engine_start, engine_env = engine_command(loop.check.rollout.engine, where, ENGINE_MODULE, path)
    world_start, world_env = world_command(loop.check, where, TRAINER_MODULE, path)
    try:
        with (
            started(ENGINE, engine_start, directory, progress, engine_env) as engine,
            started(TRAINER, world_start, directory, progress, world_env) as trainer,
        ):
            finish_both(engine, trainer, most_s=most_s)
    finally:
        rows = rows_of(directory)
        if rows:
            save_history(directory, rows, header_of(loop))
    return rows


def shares(check: CheckSpec, where: Placement) -> bool:
    """Whether both sides take the same GPUs in turns: the engine sleeps while the trainer works."""
    able = check.rollout.engine.engine in SLEEPERS
    return able and bool(local_gpus()) and not where.trainer


def finish_both(*workers: Worker, most_s: float = math.inf) -> None:
    """Until all are done, or the time is over; they wait in turns, so that one is at work.

    Raises:
        MismatchError: the first that failed, or all stalled.
    """
    at_work = {worker: worker.watch() for worker in workers}
    until = time.monotonic() + most_s
    while at_work and time.monotonic() < until:
        for worker in [*at_work]:
            if worker.ended():
                del at_work[worker]
        if at_work and all(watch.idle_s() > watch.limit_s for watch in at_work.values()):
            worker, watch = next(iter(at_work.items()))
            worker.require_activity(watch)
        time.sleep(POLL_S)


def resume_from(directory: Path) -> int:
    """Steps that the last whole checkpoint holds; 0 without one."""
    whole = [path.name for path in (directory / CHECKPOINTS).glob("*") if path.name.isdecimal()]
    return max(map(int, whole), default=0)


def header_of(loop: LoopSpec) -> dict[str, object]:
    """What a history says of itself."""
    return {"arm": loop.arm, "seed": loop.seed, "loop": to_json(loop)}
