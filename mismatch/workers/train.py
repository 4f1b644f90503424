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
from mismatch.pipeline import NEW_REPLAYED, REPLAYED
from mismatch.specs import Pass, TrainSpec, from_dict
from mismatch.store import (
    distributions_file,
    load_distributions,
    load_rollout,
    load_scoring,
    read_json,
    routing_file,
    save_scoring,
    scoring_header,
)
from mismatch.workers.launch import leave, report_ready, report_timing, say, write_error

if TYPE_CHECKING:
    from mismatch.distributions import Distributions
    from mismatch.training.load import Loaded
    from mismatch.training.replay import Source
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
    asked = engine_distributions(job, rollout)
    for one in passes:
        if load_key(loaded.spec) != load_key(one.spec):
            del loaded  # the old weights must be gone before the new ones come
            _free()
            loaded = _load(world, one, job)
        start = time.monotonic()
        if one.spec.replay_routing is not None:
            world.barrier()  # the routes may come from an earlier pass, which rank 0 saves
        if left_out(job["run_dir"], rollout, one):
            continue
        source = replay_source(job, rollout, one.spec)
        scoring = score_pass(world, loaded, rollout, one, source, asked)
        if scoring is not None:
            report_timing(one.name, time.monotonic() - start)
            also = () if source is None else (routing_file(source.name),)
            save_scoring(job["run_dir"], scoring, rollout, made_by=one.spec, also_from=also)


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
        key = (*load_key(one.spec), one.spec.replay_routing, bool(one.spec.inject))
        if key not in seen:
            seen.add(key)
            require_runnable(one.spec)


def routes_from(rollout: Rollout, spec: TrainSpec) -> str:
    """Name of the scoring whose routes a pass replays."""
    return spec.replay_source or f"{rollout.fingerprint['engine']}:decode"


def left_out(run_dir: Path | str, rollout: Rollout, one: Pass) -> bool:
    """Whether a side pass has no routes to replay, because nobody could capture them.

    The report says so; a pass that was asked for by ``--replay-routing`` is refused instead.
    """
    if one.name not in (NEW_REPLAYED, REPLAYED):
        return False
    return not scoring_header(run_dir, routes_from(rollout, one.spec)).get("routing")


def replay_source(job: dict[str, Any], rollout: Rollout, spec: TrainSpec) -> Source | None:
    """The routes that a pass replays, if it does: of the engine's decode, or of an earlier pass.

    Raises:
        MismatchError: no such scoring, no routes in it, or routes that cannot be true.
    """
    if spec.replay_routing is None:
        return None
    from mismatch.training.replay import Source

    scoring = load_scoring(job["run_dir"], routes_from(rollout, spec))
    return Source.of(scoring, spec.replay_routing, rollout)


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
        spec.weights,
        spec.attention,
        spec.experts,
        spec.trust_remote_code,
    )


def _rollout(job: dict[str, Any]) -> Rollout:
    path = Path(job["run_dir"]) / job.get("rollout", "rollout.parquet")
    return load_rollout(path.parent)


def engine_distributions(job: dict[str, Any], rollout: Rollout) -> Distributions | None:
    """What the engine took while it sampled; None where it took nothing."""
    run_dir = (Path(job["run_dir"]) / job.get("rollout", "rollout.parquet")).parent
    name = f"{rollout.fingerprint.get('engine')}:decode"
    if not (run_dir / distributions_file(name)).exists():
        return None
    return load_distributions(run_dir, name)


def _free() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
