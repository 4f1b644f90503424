"""The training world: load the model under FSDP2, score a rollout in one or more passes.

Started by the tool, or by your own torchrun::

    torchrun --nproc-per-node 2 -m mismatch.workers.train JOB.json

JOB.json::

    {"run_dir": "runs/x", "rollout": "rollout.parquet", "resident_report": false,
     "passes": [{"name": "fsdp", "spec": {…TrainSpec…}}, {"name": "reference:fp32", "spec": {…}}],
     "wait_for": "runs/x/jobs/train.go", "load_first": true}

Each pass becomes ``scores/<name>.parquet`` (and ``routing/<name>.safetensors``). Passes that need
the same weights in the same form share one load. With "wait_for", what cannot run is refused at
once, and scoring begins when that file appears (the engine is done); "load_first" loads the first
pass's weights before that, without it no GPU is touched until then. A rank that fails leaves its
reason in ``errors/<label>-rank<N>.json``, label being the job's "label" or "train".
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch.errors import MismatchError
from mismatch.specs import Pass, TrainSpec, from_dict
from mismatch.store import load_rollout, read_json, save_scoring
from mismatch.workers.launch import leave, report_ready, report_timing, say, write_error

if TYPE_CHECKING:
    from mismatch.training.load import Loaded
    from mismatch.training.world import World
    from mismatch.types import Rollout

EXIT_FAILED = 2
POLL_S = 0.05


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m mismatch.workers.train JOB.json", file=sys.stderr)
        return EXIT_FAILED
    job = read_json(Path(arguments[0]))
    rank = os.environ.get("RANK", "0")
    try:
        run(job)
    except MismatchError as error:
        say(f"rank {rank}: {error}")
        write_error(job["run_dir"], f"{job.get('label', 'train')}-rank{rank}", error)
        return EXIT_FAILED
    return 0


def run(job: dict[str, Any]) -> None:
    """Score all passes of a job; every rank calls it.

    Raises:
        MismatchError: see :func:`mismatch.training.load.load` and
            :func:`mismatch.training.score.score_pass`; also out of memory.
    """
    passes = [Pass(entry["name"], from_dict(TrainSpec, entry["spec"])) for entry in job["passes"]]

    import pyarrow.parquet  # noqa: F401 (start-up, not part of the first pass)
    import torch
    import transformers

    from mismatch.training.world import World

    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if "wait_for" in job:
        validate(passes)
        if not job.get("load_first"):
            wait_for(Path(job["wait_for"]))
    world = World.start()
    try:
        _score_all(world, passes, job)
    except torch.OutOfMemoryError as error:
        raise MismatchError(
            f"rank {world.rank} is out of GPU memory: {str(error).splitlines()[0]}",
            "lower --micro-batch-tokens, or use more GPUs: --nproc-per-node",
        ) from error
    world.close()


def _score_all(world: World, passes: list[Pass], job: dict[str, Any]) -> None:
    from mismatch.training.score import score_pass

    loaded = _load(world, passes[0], job)
    if world.rank == 0:
        report_ready()
    if "wait_for" in job:
        wait_for(Path(job["wait_for"]))
    rollout = _rollout(job)
    for one in passes:
        if load_key(loaded.spec) != load_key(one.spec):
            del loaded  # the old weights must be gone before the new ones come
            _free()
            loaded = _load(world, one, job)
        start = time.monotonic()
        scoring = score_pass(world, loaded, rollout, one)
        if scoring is not None:
            report_timing(one.name, time.monotonic() - start)
            save_scoring(job["run_dir"], scoring, rollout, made_by=one.spec)


def _load(world: World, one: Pass, job: dict[str, Any]) -> Loaded:
    from mismatch.training.load import load

    start = time.monotonic()
    loaded = load(one.spec, world.mesh, world.device, bool(job.get("resident_report")))
    if world.rank == 0:
        report_timing(f"load:{one.name}", time.monotonic() - start)
    return loaded


def validate(passes: list[Pass]) -> None:
    """Refuse before any weight is loaded what could not run.

    Raises:
        MismatchError: model or tokenizer missing, an architecture, attention or experts
            implementation that cannot run it.
    """
    from mismatch.training.load import require_runnable

    seen = set()
    for one in passes:
        if load_key(one.spec) not in seen:
            seen.add(load_key(one.spec))
            require_runnable(one.spec)


def wait_for(path: Path) -> None:
    """Sleep until a file appears, or until whoever started this process is gone."""
    parent = os.getppid()
    while not path.exists():
        if os.getppid() != parent:
            raise MismatchError(f"nobody is left to make {path}", "start the run again: --resume")
        time.sleep(POLL_S)


def load_key(spec: TrainSpec) -> tuple[Any, ...]:
    """What has to be equal for two passes to share one loaded model."""
    return (
        spec.model,
        spec.revision,
        spec.dtype,
        spec.master_dtype,
        spec.attention,
        spec.experts,
        spec.trust_remote_code,
    )


def _rollout(job: dict[str, Any]) -> Rollout:
    path = Path(job["run_dir"]) / job.get("rollout", "rollout.parquet")
    return load_rollout(path.parent)


def _free() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
