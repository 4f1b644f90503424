"""A training world's session: load the model under FSDP2, score a rollout in one or more passes.

Each pass becomes ``scores/<name>.parquet`` (and ``routing/<name>.safetensors``). Passes that need
the same weights in the same form share one load, whatever kernels they run. A pass that may fail,
or one that may run out of memory and does (:class:`mismatch.specs.Pass`), leaves its reason in
``errors/pass-<name>.json`` and the others go on. A rank that fails leaves its reason in
``errors/<label>-rank<N>.json``.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import time
import traceback
from pathlib import Path

import numpy as np
import pyarrow.parquet  # noqa: F401 (start-up, not part of the first pass)
import torch

from mismatch.captures import LIKELIEST, Distributions, Likeliest
from mismatch.codec import to_json
from mismatch.errors import MismatchError, OutOfMemory, first_line, named_line
from mismatch.keys import NEW_REPLAYED, REPLAYED, TRAIN, Key
from mismatch.models.tokenizers import load_tokenizer, token_texts
from mismatch.processes.tasks import TrainerSession, allowed
from mismatch.run.messages import pass_label, report_ready, report_timing, say, write_error
from mismatch.run.store import (
    ROLLOUT,
    distributions_file,
    keys_file,
    load_distributions,
    load_rollout,
    load_scoring,
    load_vocabulary,
    routing_file,
    save_scoring,
    save_vocabulary,
    scoring_header,
)
from mismatch.specs import Pass, TrainSpec, load_key
from mismatch.training.distributed import World, require_usable_gpus
from mismatch.training.load import LoadedModel, load, require_runnable, switched
from mismatch.training.routing.replay import ReplaySource
from mismatch.training.score import score_pass
from mismatch.training.source import quieten
from mismatch.types import Rollout

EXIT_FAILED = 2


def work(session: TrainerSession) -> int:
    """Run one session; 0, or another code with the error left for the parent."""
    rank = os.environ.get("RANK", "0")
    try:
        run(session)
    except MismatchError as error:
        say(f"rank {rank}: {error}")
        write_error(session.run_dir, f"{session.label}-rank{rank}", error)
        return EXIT_FAILED
    return 0


def run(session: TrainerSession) -> None:
    """Score the passes of a session; every rank calls it.

    Raises:
        MismatchError: see :func:`mismatch.training.load.load` and
            :func:`mismatch.training.score.score_pass`; also out of memory.
    """
    quieten()
    refused: set[int] = set()
    if session.guided:
        require_usable_gpus()
        refused = refused_passes(session)
        if not session.load_first:
            allowed(session)
    world = World.start()
    if session.same_on_all_ranks:
        require_same(world, session)
    try:
        passes = Passes(world, session)
        first = session.passes[0]
        if not first.optional:
            passes.load(first)
        if world.rank == 0:
            report_ready()
        passes.score_all(refused, allowed(session) if session.guided else None)
    except torch.OutOfMemoryError as error:
        fault = f"rank {world.rank} is out of GPU memory: {first_line(error)}"
        fix = "lower --micro-batch-tokens, or use more GPUs: --nproc-per-node"
        raise OutOfMemory(fault, fix) from error
    world.close()


def require_same(world: World, session: TrainerSession) -> None:
    """Require that ranks which worked out the session for themselves agree on it.

    Raises:
        MismatchError: they do not: they see different files.
    """
    text = json.dumps(to_json(session), sort_keys=True)
    own = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
    if int(world.sum(torch.tensor(own))) != own * world.size:
        raise MismatchError(
            f"the ranks see different things in {session.run_dir}",
            "the run directory must be on a file system that all machines share, and the command "
            "the same everywhere",
        )


class Passes:
    """Scores passes one after the other, with as few loads as there are weights."""

    def __init__(self, world: World, session: TrainerSession) -> None:
        self.world, self.session = world, session
        self.loaded: LoadedModel | None = None
        self.attempts = 0
        self.rollouts: dict[Path, Rollout] = {}

    def score_all(self, refused: set[int], allowed_s: float | None) -> None:
        """Score the passes in order, optional passes as long as their seconds last.

        Args:
            refused: the numbers of those that cannot run.
            allowed_s: that optional passes may take; None: no limit.
        """
        seconds: list[float] = []  # of the optional passes so far
        for number, item in enumerate(self.session.passes):
            expected = sum(seconds) + max(seconds[-2:], default=0.0)
            late = allowed_s is not None and self._of_rank_0(expected > allowed_s)
            if item.optional == "any" and (late or not (self.place(item) / ROLLOUT).exists()):
                continue
            start = time.monotonic()
            if number in refused:
                self.note_over(item)
            else:
                self.score(item)
            if item.optional == "any":
                seconds.append(time.monotonic() - start)

    def _of_rank_0(self, holds: bool) -> bool:
        """Return what rank 0 says: clocks differ, and ranks must agree on what they score."""
        said = torch.tensor(int(holds and self.world.rank == 0))
        return bool(self.world.sum(said))

    def score(self, item: Pass) -> None:
        """Score one pass; one that may fail leaves its reason and the others go on.

        Where ranks fail at different places the world ends: a rank that went on alone would meet
        the others in the middle of another pass, and their numbers would mix.
        """
        if not item.optional:
            self.run_pass(item)
            return
        self.attempts += 1
        failed: Exception | None = None
        try:
            self.run_pass(item)
        except Exception as error:
            if item.optional == "memory" and not is_out_of_memory(error):
                raise
            traceback.print_exc()
            leave_out(self.session, item, error)
            failed = error
            if is_out_of_memory(error):  # give back weights half gathered, and frames
                self.loaded = None
                traceback.clear_frames(error.__traceback__)
                error.__traceback__ = error.__context__ = error.__cause__ = None
                free_memory()
        try:
            self.world.meet(f"{self.attempts}:{item.name}")
        except RuntimeError as lost:
            if failed is not None:
                leave_out(self.session, item, failed, any_rank=True)
            fault = f"the ranks parted in the pass {item.name}"
            raise MismatchError(fault, "see logs/train.log") from lost
        if failed is not None:
            self.note_over(item)

    def note_over(self, item: Pass) -> None:
        """Tell the parent that a pass is over without a scoring."""
        if self.world.rank == 0:
            report_timing(item.name, 0.0)

    def load(self, pass_: Pass) -> None:
        if self.loaded is not None and load_key(self.loaded.spec) == load_key(pass_.spec):
            return
        held, self.loaded = self.loaded, None  # what fails half way is loaded again
        self.loaded = None if held is None else switched(held, pass_.spec)
        if self.loaded is not None:
            return
        del held
        free_memory()  # the old weights must be gone before the new weights come
        start = time.monotonic()
        try:
            self.loaded = load(
                pass_.spec, self.world.mesh, self.world.device, self.session.resident_report
            )
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"rank {self.world.rank} is out of GPU memory while it loads the weights of "
                f"{pass_.name}: {first_line(error)}",
                "--master-dtype auto, --offload, or more GPUs: --nproc-per-node",
            ) from error
        if self.world.rank == 0:
            report_timing(f"load:{pass_.name}", time.monotonic() - start)

    def run_pass(self, pass_: Pass) -> None:
        world, run_dir = self.world, self.place(pass_)
        self.load(pass_)
        assert self.loaded is not None
        rollout = self.rollout(run_dir)
        asked = None
        if pass_.optional != "any":  # fixes are compared by their log-ratios alone
            asked = engine_distributions(self.session.run_dir, rollout)
        start = time.monotonic()
        if pass_.spec.replay_routing is not None:
            world.barrier()  # the routes may come from an earlier pass, which rank 0 saves
        if left_out(run_dir, rollout, pass_):
            self.note_over(pass_)
            return
        source = replay_source(run_dir, rollout, pass_.spec)
        likeliest = LIKELIEST if pass_.name == TRAIN else 0
        scoring = score_pass(world, self.loaded, rollout, pass_, source, asked, likeliest)
        seconds = time.monotonic() - start
        if scoring is None:
            return
        report_timing(pass_.name, seconds)
        also = [] if source is None else [routing_file(source.name)]
        if source is not None and source.keys is not None:
            also.append(keys_file(source.name))
        if scoring.likeliest is not None:  # first: a pass whose scoring is there is not made again
            name_likeliest(run_dir, scoring.likeliest, pass_.spec)
        save_scoring(run_dir, scoring, rollout, made_by=pass_.spec, also_from=also)

    def place(self, pass_: Pass) -> Path:
        """Return the directory whose rollout a pass scores."""
        return self.session.run_dir / pass_.folder

    def rollout(self, run_dir: Path) -> Rollout:
        if run_dir not in self.rollouts:
            self.rollouts[run_dir] = load_rollout(run_dir)
        return self.rollouts[run_dir]


def refused_passes(session: TrainerSession) -> set[int]:
    """Return the optional passes that cannot run, before any weight is loaded.

    Raises:
        MismatchError: model or tokenizer missing, an architecture, attention or experts
            implementation that cannot run it, in a pass that is not optional.
    """
    refused, seen = set(), set()
    strict_first = sorted(enumerate(session.passes), key=lambda pair: pair[1].optional == "any")
    for number, item in strict_first:
        spec = item.spec
        key = (*load_key(spec), spec.replay_routing, bool(spec.inject))
        if key in seen:
            continue
        try:
            require_runnable(spec)
            seen.add(key)
        except MismatchError as error:
            if item.optional != "any":
                raise
            leave_out(session, item, error)
            refused.add(number)
    return refused


def leave_out(
    session: TrainerSession, item: Pass, error: Exception, *, any_rank: bool = False
) -> None:
    """Note why an optional pass is missing; rank 0 does, where all ranks fail alike."""
    if os.environ.get("RANK", "0") != "0" and not any_rank:
        return
    if not isinstance(error, MismatchError):
        error = MismatchError(named_line(error), "see logs/train.log")
    write_error(session.run_dir, pass_label(item.name), error)


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, OutOfMemory))


def left_out(run_dir: Path | str, rollout: Rollout, pass_: Pass) -> bool:
    """Return whether an optional pass has no routes to replay, because nobody could capture them.

    The report says so; a pass that was asked for by ``--replay-routing`` is refused instead.
    """
    if pass_.name not in (NEW_REPLAYED, REPLAYED):
        return False
    return not scoring_header(run_dir, routes_from(rollout, pass_.spec)).get("routing")


def engine_distributions(run_dir: Path, rollout: Rollout) -> Distributions | None:
    """Return what the engine took while it sampled; None where it took nothing."""
    name = Key.of(rollout.fingerprint.get("engine") or "", "decode")
    if not (run_dir / distributions_file(name)).exists():
        return None
    return load_distributions(run_dir, name)


def name_likeliest(run_dir: Path, likeliest: Likeliest, spec: TrainSpec) -> None:
    """Add the texts of ids that the trainer thinks likeliest, and the engine nowhere."""
    texts = load_vocabulary(run_dir)
    unnamed = sorted(set(np.unique(likeliest.ids).tolist()) - texts.keys())
    if not texts or not unnamed:
        return
    with contextlib.suppress(MismatchError):  # a checkpoint without a tokenizer: the ids will do
        tokenizer = load_tokenizer(spec.model, spec.revision, spec.trust_remote_code)
        save_vocabulary(run_dir, texts | token_texts(tokenizer, unnamed))


def free_memory() -> None:
    """Release what this process only keeps for later use."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def routes_from(rollout: Rollout, spec: TrainSpec) -> str:
    """Return the name of the scoring whose routes a pass replays."""
    return spec.replay_source or Key.of(rollout.fingerprint["engine"], "decode")


def replay_source(run_dir: Path, rollout: Rollout, spec: TrainSpec) -> ReplaySource | None:
    """Return the routes that a pass replays, of the engine's decode or of an earlier pass, if any.

    Raises:
        MismatchError: no such scoring, no routes in it, or routes that cannot be true.
    """
    if spec.replay_routing is None:
        return None
    scoring = load_scoring(run_dir, routes_from(rollout, spec))
    return ReplaySource.of(scoring, spec.replay_routing, rollout)
