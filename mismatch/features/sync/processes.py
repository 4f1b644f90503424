"""The probe of the weight sync: an engine next to the trainer, in separate processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from mismatch.codec import from_json, to_json
from mismatch.errors import MismatchError
from mismatch.features.sync.judge import score_rows
from mismatch.features.sync.report import SyncReport, SyncSpec
from mismatch.processes.launch import EXACT, finish, started
from mismatch.processes.stages import engine_command
from mismatch.run.machine import Placement, engine_gpus, local_gpus, visible_as
from mismatch.run.store import read_json, write_json
from mismatch.types import NotTested

FOLDER = "sync"
WORKER = "mismatch.features.sync.worker"
Progress = Callable[[str], None]


def run_probe(run_dir: Path, spec: SyncSpec, progress: Progress) -> SyncReport:
    """Push known updates and say what became of each parameter.

    Raises:
        MismatchError: the engine does not start, or refuses the first push.
    """
    trainer: MismatchError | None = None
    gpus, own = local_gpus(), engine_gpus(spec.engine)
    apart = gpus > own  # the engine takes the last, the trainer the first; else both in turn
    places, first = (tuple(range(gpus - own, gpus)), (0,)) if apart else ((), ())
    job = _job(run_dir, spec, "engine")
    command, env = engine_command(spec.engine, Placement(places), WORKER, job)
    with started("sync-engine", command, run_dir, progress, env) as engine:
        if gpus and not apart:
            finish(engine)
        if spec.trainer:
            try:
                job = _job(run_dir, spec, "trainer")
                command = [sys.executable, "-m", WORKER, str(job)]
                env = {**EXACT, **visible_as(first)}
                with started("sync-trainer", command, run_dir, env=env) as beside:
                    finish(beside, engine)
            except MismatchError as error:
                engine.ended()  # the engine's failure comes first
                trainer = error
        finish(engine)
    report = from_json(SyncReport, read_json(run_dir / FOLDER / "engine.json"))
    scores, other = np.load(run_dir / FOLDER / "engine.npy"), None
    if spec.trainer and trainer is None:
        other = np.load(run_dir / FOLDER / "trainer.npy")
    else:
        reason = trainer.message if trainer else "--no-trainer"
        how = trainer.fix if trainer else "without it"
        missing = NotTested("the trainer's logprobs after a push", reason, how)
        report = replace(report, not_tested=(*report.not_tested, missing))
    return replace(report, scores=score_rows(scores, other))


def _job(run_dir: Path, spec: SyncSpec, side: str) -> Path:
    job = {"run_dir": str(run_dir), "spec": to_json(spec), "side": side}
    return write_json(run_dir / "jobs" / f"sync-{side}.json", job)
