"""The training world: load the model under FSDP2, score a rollout in one or more passes.

Started by the tool, or by your own torchrun::

    torchrun --nproc-per-node 2 -m mismatch.workers.train JOB.json

JOB.json::

    {"run_dir": "runs/x", "rollout": "rollout.parquet", "resident_report": false,
     "passes": [{"name": "fsdp", "spec": {…TrainSpec…}}, {"name": "reference:fp32", "spec": {…}}]}

Each pass becomes ``scores/<name>.parquet`` (and ``routing/<name>.safetensors``). Passes that need
the same weights in the same form share one load. A rank that fails leaves its reason in
``errors/<label>-rank<N>.json``, label being the job's "label" or "train".
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch.errors import MismatchError
from mismatch.specs import Pass, TrainSpec, from_dict
from mismatch.store import load_rollout, read_json, save_scoring
from mismatch.workers.launch import write_error

if TYPE_CHECKING:
    from mismatch.training.load import Loaded
    from mismatch.training.world import World
    from mismatch.types import Rollout

EXIT_FAILED = 2


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m mismatch.workers.train JOB.json", file=sys.stderr)
        return EXIT_FAILED
    job = read_json(Path(arguments[0]))
    rank = os.environ.get("RANK", "0")
    try:
        run(job)
    except MismatchError as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        write_error(job["run_dir"], f"{job.get('label', 'train')}-rank{rank}", error)
        return EXIT_FAILED
    return 0


def run(job: dict[str, Any]) -> None:
    """Score all passes of a job; every rank calls it.

    Raises:
        MismatchError: see :func:`mismatch.training.load.load` and
            :func:`mismatch.training.score.score_pass`; also out of memory.
    """
    rollout = _rollout(job)
    passes = [Pass(entry["name"], from_dict(TrainSpec, entry["spec"])) for entry in job["passes"]]

    import torch
    import transformers

    from mismatch.training.world import World

    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    world = World.start()
    try:
        _score_all(world, rollout, passes, job)
    except torch.OutOfMemoryError as error:
        raise MismatchError(
            f"rank {world.rank} is out of GPU memory: {str(error).splitlines()[0]}",
            "lower --micro-batch-tokens, or use more GPUs: --nproc-per-node",
        ) from error
    world.close()


def _score_all(world: World, rollout: Rollout, passes: list[Pass], job: dict[str, Any]) -> None:
    from mismatch.training.load import load
    from mismatch.training.score import score_pass

    loaded: Loaded | None = None
    for one in passes:
        if loaded is None or load_key(loaded.spec) != load_key(one.spec):
            loaded = None  # the old weights must be gone before the new ones come
            _free()
            loaded = load(one.spec, world.mesh, world.device, bool(job.get("resident_report")))
        scoring = score_pass(world, loaded, rollout, one)
        if scoring is not None:
            save_scoring(job["run_dir"], scoring, rollout)


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
    sys.exit(main(sys.argv[1:]))
