"""The training world: load the model under FSDP2, score a rollout in one or more passes.

Started by the tool, or by your own torchrun::

    torchrun --nproc-per-node 2 -m mismatch.processes.workers.train JOB.json

JOB.json::

    {"run_dir": "runs/x", "resident_report": false,
     "passes": [{"name": "fsdp", "spec": {…TrainSpec…}}, {"name": "reference:fp32", "spec": {…}}],
     "wait_for": "runs/x/jobs/train.go", "load_first": true}

A "side" pass that runs out of memory leaves its reason like an optional one, and the others go on.
A pass may have a "run_dir" of its own, whose rollout it scores, and be "optional": one that cannot
run leaves its reason in ``errors/pass-<name>.json`` of the job's run directory and the others go
on; "optional_s" is the time that optional passes may take, and those that would exceed it are left
out. They note their seconds and memory in their fingerprints.

Each pass becomes ``scores/<name>.parquet`` (and ``routing/<name>.safetensors``). Passes that need
the same weights in the same form share one load, whatever kernels they run. With "wait_for", what
cannot run is refused at once, and scoring begins when that file appears (the engine is done);
"load_first" loads the first pass's weights before that, without it no GPU is touched until then. A
rank that fails leaves its reason in ``errors/<label>-rank<N>.json``, label being the job's "label"
or "train".
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.captures import LIKELIEST
from mismatch.errors import MismatchError, OutOfMemory, first_line, named_line
from mismatch.experiments.scoring_passes import Job
from mismatch.processes.workers.replayed_routes import replay_source, routes_from
from mismatch.run.messages import (
    exit_worker,
    pass_label,
    report_ready,
    report_timing,
    say,
    write_error,
)
from mismatch.run.store import (
    NEW_REPLAYED,
    REPLAYED,
    ROLLOUT,
    TRAIN,
    distributions_file,
    load_distributions,
    load_rollout,
    load_vocabulary,
    read_json,
    routing_file,
    save_scoring,
    save_vocabulary,
    scoring_header,
)
from mismatch.specs import Pass, TrainSpec, load_key

if TYPE_CHECKING:
    from mismatch.captures import Distributions, Likeliest
    from mismatch.training.distributed import World
    from mismatch.training.load import LoadedModel
    from mismatch.types import Rollout

EXIT_FAILED = 2
POLL_S = 0.05


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m mismatch.processes.workers.train JOB.json", file=sys.stderr)
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
    items = [Job.of(entry, job["run_dir"]) for entry in job["passes"]]

    import pyarrow.parquet  # noqa: F401 (start-up, not part of the first pass)
    import torch
    import transformers

    from mismatch.training.distributed import World, require_usable_gpus

    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if "wait_for" in job:
        require_usable_gpus()
        items = runnable(items, job)
        if not job.get("load_first"):
            wait_for(Path(job["wait_for"]))
    world = World.start()
    if job.get("same_on_all_ranks"):
        require_same(world, job)
    try:
        _Passes(world, job).score(items)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"rank {world.rank} is out of GPU memory: {first_line(error)}",
            "lower --micro-batch-tokens, or use more GPUs: --nproc-per-node",
        ) from error
    world.close()


def require_same(world: World, job: dict[str, Any]) -> None:
    """Ranks that worked out the job for themselves agree on it.

    Raises:
        MismatchError: they do not: they see different files.
    """
    import torch

    text = json.dumps(job, sort_keys=True, default=str)
    own = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
    if int(world.sum(torch.tensor(own))) != own * world.size:
        raise MismatchError(
            f"the ranks see different things in {job['run_dir']}",
            "the run directory must be on a file system that all machines share, and the command "
            "the same everywhere",
        )


class _Passes:
    """Scores the passes of a job one after the other, with as few loads as there are weights."""

    def __init__(self, world: World, job: dict[str, Any]) -> None:
        self.world, self.job = world, job
        self.loaded: LoadedModel | None = None
        self.seconds: list[float] = []  # of the optional passes so far
        self.attempts = 0
        self.rollouts: dict[Path, Rollout] = {}
        self.began = time.monotonic()

    def score(self, items: list[Job]) -> None:
        first = items[0] if items else None
        if first is not None and not (first.optional or first.side):
            self.load(first.pass_)
        if self.world.rank == 0:
            report_ready()
        if "wait_for" in self.job:
            wait_for(Path(self.job["wait_for"]))
            signal = Path(self.job["wait_for"]).read_text()
            self.job = self.job | (json.loads(signal) if signal.strip() else {})
            self.began = time.monotonic()
        for item in items:
            if item.side and not item.optional:
                self.attempt(item)
            elif not item.optional:
                self.run_pass(item)
            elif (item.run_dir / ROLLOUT).exists() and not self.late():
                self.attempt(item)

    def attempt(self, item: Job) -> None:
        """One pass that may fail. Where ranks fail at different places the world ends.

        A rank that went on alone would meet the others in the middle of another pass, and their
        numbers would mix.
        """
        start = time.monotonic()
        self.attempts += 1
        failed: Exception | None = None
        try:
            self.run_pass(item)
        except Exception as error:
            if item.side and not item.optional and not is_out_of_memory(error):
                raise
            traceback.print_exc()
            leave_out(self.job, item, error)
            failed = error
            if is_out_of_memory(error):
                self.drop(error)
        try:
            self.world.meet(f"{self.attempts}:{item.pass_.name}")
        except RuntimeError as lost:
            if failed is not None:
                leave_out(self.job, item, failed, any_rank=True)
            raise MismatchError(
                f"the ranks parted in the pass {item.pass_.name}", "see logs/train.log"
            ) from lost
        if item.optional:
            self.seconds.append(time.monotonic() - start)

    def drop(self, error: Exception) -> None:
        """Give back what a pass without enough memory holds: weights half gathered, its frames."""
        self.loaded = None
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = error.__context__ = error.__cause__ = None
        free_memory()

    def late(self) -> bool:
        """Whether one more optional pass would exceed their time; all ranks say the same."""
        import torch

        allowed = self.job.get("optional_s")
        if allowed is None:
            return False
        expected = sum(self.seconds) + (max(self.seconds[-2:]) if self.seconds else 0.0)
        over = self.world.rank == 0 and expected > allowed
        return bool(self.world.sum(torch.tensor(int(over))))

    def load(self, pass_: Pass) -> None:
        from mismatch.training.load import switched

        if self.loaded is not None and load_key(self.loaded.spec) == load_key(pass_.spec):
            return
        held, self.loaded = self.loaded, None  # what fails half way is loaded anew
        self.loaded = None if held is None else switched(held, pass_.spec)
        if self.loaded is not None:
            return
        del held
        free_memory()  # the old weights must be gone before the new ones come
        self.loaded = _load(self.world, pass_, self.job)

    def run_pass(self, item: Job) -> None:
        from mismatch.training.score import score_pass

        world, pass_ = self.world, item.pass_
        self.load(pass_)
        assert self.loaded is not None
        rollout = self.rollout(item)
        # Fixes are compared by their log-ratios alone.
        asked = None if item.optional else engine_distributions(self.job, rollout)
        start = time.monotonic()
        if pass_.spec.replay_routing is not None:
            world.barrier()  # the routes may come from an earlier pass, which rank 0 saves
        if left_out(item.run_dir, rollout, pass_):
            return
        source = replay_source(item.run_dir, rollout, pass_.spec)
        likeliest = LIKELIEST if pass_.name == TRAIN and not item.optional else 0
        scoring = score_pass(world, self.loaded, rollout, pass_, source, asked, likeliest)
        seconds = time.monotonic() - start
        if scoring is None:
            return
        report_timing(pass_.name, seconds)
        also = () if source is None else (routing_file(source.name),)
        if scoring.likeliest is not None:  # first: a pass whose scoring is there is not made again
            name_likeliest(item.run_dir, scoring.likeliest, pass_.spec)
        save_scoring(item.run_dir, scoring, rollout, made_by=pass_.spec, also_from=also)

    def rollout(self, item: Job) -> Rollout:
        if item.run_dir not in self.rollouts:
            self.rollouts[item.run_dir] = load_rollout(item.run_dir)
        return self.rollouts[item.run_dir]


def runnable(items: list[Job], job: dict[str, Any]) -> list[Job]:
    """The passes without those optional ones that are refused before any weight is loaded.

    Raises:
        MismatchError: see :func:`validate`, of one that is not optional.
    """
    validate([item.pass_ for item in items if not item.optional])
    kept = []
    for item in items:
        try:
            if item.optional:
                validate([item.pass_])
            kept.append(item)
        except MismatchError as error:
            leave_out(job, item, error)
    return kept


def leave_out(job: dict[str, Any], item: Job, error: Exception, *, any_rank: bool = False) -> None:
    """Note why an optional pass is missing; rank 0 does, where all ranks fail alike."""
    if os.environ.get("RANK", "0") != "0" and not any_rank:
        return
    if not isinstance(error, MismatchError):
        error = MismatchError(named_line(error), "see logs/train.log")
    write_error(job["run_dir"], pass_label(item.pass_.name), error)


def _load(world: World, pass_: Pass, job: dict[str, Any]) -> LoadedModel:
    import torch

    from mismatch.training.load import load

    start = time.monotonic()
    try:
        loaded = load(pass_.spec, world.mesh, world.device, bool(job.get("resident_report")))
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"rank {world.rank} is out of GPU memory while it loads the weights of {pass_.name}: "
            f"{first_line(error)}",
            "--master-dtype auto, --offload, or more GPUs: --nproc-per-node",
        ) from error
    if world.rank == 0:
        report_timing(f"load:{pass_.name}", time.monotonic() - start)
    return loaded


def is_out_of_memory(error: Exception) -> bool:
    import torch

    return isinstance(error, (torch.OutOfMemoryError, OutOfMemory))


def validate(passes: list[Pass]) -> None:
    """Refuse before any weight is loaded what could not run.

    Raises:
        MismatchError: model or tokenizer missing, an architecture, attention or experts
            implementation that cannot run it.
    """
    from mismatch.training.load import require_runnable

    seen = set()
    for pass_ in passes:
        key = (*load_key(pass_.spec), pass_.spec.replay_routing, bool(pass_.spec.inject))
        if key not in seen:
            seen.add(key)
            require_runnable(pass_.spec)


def left_out(run_dir: Path | str, rollout: Rollout, pass_: Pass) -> bool:
    """Whether a side pass has no routes to replay, because nobody could capture them.

    The report says so; a pass that was asked for by ``--replay-routing`` is refused instead.
    """
    if pass_.name not in (NEW_REPLAYED, REPLAYED):
        return False
    return not scoring_header(run_dir, routes_from(rollout, pass_.spec)).get("routing")


def wait_for(path: Path) -> None:
    """Sleep until a file appears, or until whoever started this process is gone."""
    parent = os.getppid()
    while not path.exists():
        if os.getppid() != parent:
            raise MismatchError(f"nobody is left to make {path}", "start the run again: --resume")
        time.sleep(POLL_S)


def engine_distributions(job: dict[str, Any], rollout: Rollout) -> Distributions | None:
    """What the engine took while it sampled; None where it took nothing."""
    run_dir = Path(job["run_dir"])
    name = f"{rollout.fingerprint.get('engine')}:decode"
    if not (run_dir / distributions_file(name)).exists():
        return None
    return load_distributions(run_dir, name)


def name_likeliest(run_dir: Path, likeliest: Likeliest, spec: TrainSpec) -> None:
    """Add the texts of ids that the trainer thinks likeliest, and the engine nowhere."""
    from mismatch.models.tokenizers import load_tokenizer, token_texts

    texts = load_vocabulary(run_dir)
    unnamed = sorted(set(np.unique(likeliest.ids).tolist()) - texts.keys())
    if not texts or not unnamed:
        return
    with contextlib.suppress(MismatchError):  # a checkpoint without a tokenizer: the ids will do
        tokenizer = load_tokenizer(spec.model, spec.revision, spec.trust_remote_code)
        save_vocabulary(run_dir, texts | token_texts(tokenizer, unnamed))


def free_memory() -> None:
    """Give back what this process only keeps at hand."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    exit_worker(main(sys.argv[1:]))
