"""Engines started beside a check: a fresh one for --explain, and the probe of the weight sync."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.captures import CachePair
from mismatch.codec import from_json, to_json
from mismatch.errors import MismatchError
from mismatch.experiments.scoring_passes import CACHE, CACHE_FILE, FRESH, RESCORING
from mismatch.experiments.sync.judge import score_rows
from mismatch.experiments.sync.types import SyncReport, SyncSpec
from mismatch.processes.launch import (
    engine_python,
    finish,
    interpreter_environment,
    own_python,
    started,
)
from mismatch.processes.stages import Stages
from mismatch.run import manifest, store
from mismatch.run.messages import error_path
from mismatch.run.store import read_json, write_json
from mismatch.specs import RolloutSpec, spec_hash
from mismatch.types import Floats, NotTested

LABEL = "fresh-engine"


@dataclass(frozen=True)
class Cache:
    """What the engine gave with its prefix cache and without, or the reason why it gave nothing."""

    pairs: tuple[CachePair, ...]
    reason: str
    seconds: float


def fresh(spec: RolloutSpec) -> RolloutSpec:
    """The same engine, which captures nothing.

    Raises:
        MismatchError: servers, which run as they were started.
    """
    if spec.engine.servers:
        raise MismatchError(
            "servers run as they were started", "check a local engine of the same version"
        )
    engine = replace(spec.engine, routing=False, prefill=True)
    return replace(spec, engine=engine, exact_kl=0)


def ask_fresh_engine(stages: Stages, ids: Sequence[str]) -> None:
    """Rescore the run's tokens, read the prefix cache, or both; what is there is not made again.

    Raises:
        MismatchError: the engine cannot, or failed.
    """
    run_dir, spec = stages.run_dir, fresh(stages.spec.rollout)
    made_by, job = spec_hash(spec), {}
    if RESCORING in ids and not manifest.is_current(run_dir, store.scoring_file(FRESH), made_by):
        job["score"] = FRESH
    if CACHE in ids and not (run_dir / CACHE_FILE).exists():
        job["cache"] = CACHE_FILE
    if not job:
        return
    error_path(run_dir, LABEL).unlink(missing_ok=True)
    title = f"rollout: a fresh {spec.engine.engine}: {', '.join(ids)}"
    with stages.engine(spec, LABEL, {"label": LABEL, **job}) as worker:
        stages.wait(worker, LABEL, title)


def cache_of(stages: Stages) -> Cache:
    """What :func:`ask_fresh_engine` left of the prefix cache.

    Raises:
        MismatchError: nothing, or damaged.
    """
    document: dict[str, Any] = store.load_document(stages.run_dir, CACHE_FILE)
    pairs = from_json(list[CachePair], document["pairs"])
    return Cache(tuple(pairs), document["reason"], float(document["seconds"]))


FOLDER = "sync"
WORKER = "mismatch.processes.workers.probe_side"
Progress = Callable[[str], None]


def run_probe(run_dir: Path, spec: SyncSpec, progress: Progress) -> SyncReport:
    """Push known updates and say what became of each parameter.

    Raises:
        MismatchError: the engine does not start, or refuses the first push.
    """
    trainer: MismatchError | None = None
    with started(*_worker(run_dir, spec, "engine"), progress, _environment(spec)) as engine:
        if spec.trainer:
            try:
                with started(*_worker(run_dir, spec, "trainer")) as beside:
                    finish(beside, engine)
            except MismatchError as error:
                engine.ended()  # its own failure comes first
                trainer = error
        finish(engine)
    report = from_json(SyncReport, read_json(run_dir / FOLDER / "engine.json"))
    scores = _scores(run_dir, "engine")
    other = None if trainer or not spec.trainer else _scores(run_dir, "trainer")
    if other is None:
        reason = trainer.message if trainer else "--no-trainer"
        how = trainer.fix if trainer else "without it"
        missing = NotTested("the trainer's logprobs after a push", reason, how)
        report = replace(report, not_tested=(*report.not_tested, missing))
    return replace(report, scores=score_rows(scores, other))


def _worker(run_dir: Path, spec: SyncSpec, side: str) -> tuple[str, list[str], Path]:
    label = f"sync-{side}"
    job = {"run_dir": str(run_dir), "spec": to_json(spec), "side": side}
    path = write_json(run_dir / "jobs" / f"{label}.json", job)
    python = engine_python(spec.engine) if side == "engine" else sys.executable
    return label, [python, "-m", WORKER, str(path)], run_dir


def _environment(spec: SyncSpec) -> dict[str, str]:
    return interpreter_environment(own_python(spec.engine)) | dict(spec.engine.env)


def _scores(run_dir: Path, side: str) -> list[list[Floats]]:
    return [[state] for state in np.load(run_dir / FOLDER / f"{side}.npy")]
