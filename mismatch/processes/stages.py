"""The stages that need processes: an engine that samples, a training world that scores.

They run in separate processes; nothing here imports torch. What is there already, made by the
same spec from the same inputs, is not made again.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import psutil

from mismatch.errors import MismatchError
from mismatch.experiments import beyond
from mismatch.experiments.scoring_passes import by_load, float32_engine
from mismatch.keys import FIRST, FLOAT32, SAMPLES, Key
from mismatch.models.config import unpacks_mxfp4
from mismatch.models.derived import cache
from mismatch.processes.adapter import askable, keep_scores, missing_corner, prepared
from mismatch.processes.exchange import column_of, read_scores, require_file
from mismatch.processes.launch import (
    EXACT,
    EXACT_TRITON,
    Worker,
    engine_python,
    finish,
    own_python,
    rendezvous_args,
    started,
    worker_path,
)
from mismatch.processes.tasks import (
    FLOAT32_ENGINE,
    EngineSession,
    EngineTask,
    Sample,
    Score,
    ScoreLong,
    TrainerSession,
    let_score,
    write_session,
)
from mismatch.run import manifest, resume, store
from mismatch.run.directory import Journal
from mismatch.run.long_rollout import FOLDER as LONG
from mismatch.run.long_rollout import leave_first_samples
from mismatch.run.machine import Placement, free_gpu_bytes, gib, local_gpus, placement, visible_as
from mismatch.run.messages import SAMPLED, error_path, pass_label, write_error
from mismatch.specs import (
    FILE_SCORER,
    OWN_SCORER,
    CheckSpec,
    EngineSpec,
    Pass,
    RolloutSpec,
    TrainSpec,
    spec_hash,
)
from mismatch.types import Rollout

WORKER = "mismatch.processes.workers.session"
# What a trainer needs next to an engine at work: both hold the weights, one of them in float32 and
# with a copy on its way; and what two Python processes with torch take by themselves.
EARLY_FACTOR, EARLY_BYTES = 8, 6 * 2**30
# The driver gives an ended process's memory back a moment later; contexts of others come and go.
FREE_AGAIN_S, FREE_POLL_S, FREE_SLACK_BYTES = 60.0, 0.5, 2**30


class Narrator(Protocol):
    """Tells the user what happens while it happens."""

    def stage(self, title: str) -> Any:
        """Return a context manager around one stage; gives a callable for progress lines."""

    def note(self, text: str) -> None:
        """One line between stages."""


@dataclass
class Count:
    """How many stages of a command began, and how many there are as far as is known."""

    begun: int = 0
    total: int = 0

    def next(self, title: str) -> str:
        """Return the title of the next stage, with its place where it is not the only one.

        >>> Count(1, 5).next("score"), Count(0, 1).next("score")
        ('[2/5] score', 'score')
        """
        self.begun += 1
        self.total = max(self.total, self.begun)
        return f"[{self.begun}/{self.total}] {title}" if self.total > 1 else title


class Room(NamedTuple):
    """What a check leaves out for want of memory.

    Attributes:
        left_out: passes other than the trainer's that are not run, and why.
        float32_split: tensor parallel size of the engine in float32; 0: as it samples.
        float32_offload: GiB of each GPU's weights that it keeps in the host's memory.
        float32_layers: its first layers alone run, as the whole does not fit; 0: the whole.
        float32_left_out: why it does not run in float32; "": it does.
        float32_few: both sides score the first sample of each prompt alone in float32.
    """

    left_out: Mapping[str, str] = MappingProxyType({})
    float32_split: int = 0
    float32_offload: int = 0
    float32_layers: int = 0
    float32_left_out: str = ""
    float32_few: bool = False


ALL = Room()


@dataclass(frozen=True)
class Todo:
    """What a run lacks of a check."""

    samples: bool  # the engine has to sample or to rescore
    float32: bool  # it is started once more, in float32
    long: bool  # a long sequence is scored as well
    adapted: list[Pass]  # what a framework's own code has to score
    world: TrainerSession | None  # what the training world has to score

    @property
    def stages(self) -> int:
        """How many stages that makes, of those that the user sees."""
        from_code = bool(self.adapted) and self.adapted[0].spec.scorer != FILE_SCORER
        return sum((self.samples, self.float32, from_code, self.world is not None))


@dataclass
class Stages:
    """Runs the stages of one command in one run directory."""

    spec: CheckSpec
    run_dir: Path
    narrator: Narrator
    journal: Journal
    square: bool = False  # whether the engine is started once more, in float32
    room: Room = ALL
    count: Count = field(default_factory=Count)
    order: tuple[Pass, ...] = ()  # in which the last training world scores, or scored

    @cached_property
    def placement(self) -> Placement:
        """Which GPUs each side takes."""
        return placement(self.spec, local_gpus())

    def measure(
        self,
        passes: list[Pass],
        sample: bool = True,
        more: Sequence[Pass] = (),
        prepare: Callable[..., float | None] | None = None,
    ) -> None:
        """Sample and rescore in the engine, then score ``passes`` in one training world.

        The training world starts while the engine is at work: it refuses what it cannot run before
        anything is sampled, and where memory allows loads the weights meanwhile. Where each has
        separate devices it scores as soon as the tokens are there, while the engine rescores.

        Args:
            sample: False leaves the rollout as it is, wherever it was made.
            more: further passes for the same world, all of them missing and optional.
            prepare: called with the processes at work before anything is scored; returns the
                seconds that optional passes may take, None: no limit.
        """
        todo = self._missing(passes, sample, more)
        alone = todo.world is not None and prepare is None and not todo.adapted
        overlap = alone and self.placement.overlap
        self.order = todo.world.passes if todo.world else ()
        self.count.total += todo.stages + (overlap and todo.samples)
        with self._world(todo.world) as train:
            beside = [train] if train else []
            if todo.samples:
                self._run_engine(todo, overlap, *beside)
            elif sample:
                self.narrator.note("rollout: there already")
            self._leave_first_samples()
            if overlap and todo.world and not todo.samples:
                let_score(todo.world)
            if todo.long and (why := beyond.prepare(self.run_dir, self.spec)):
                self.narrator.note(f"--context-length: {why}")
            if todo.float32:
                begun = self.count.begun
                score_in_float32(self, *beside)
                self.count.total -= self.count.begun == begun
            if todo.adapted:
                self._score_with_adapter(todo.adapted, *beside)
            allowed_s = None if prepare is None else prepare(*beside)
            if train and todo.world:
                self._await_scores(train, todo.world, allowed_s)
            elif passes and not todo.adapted:
                self.narrator.note("score: there already")

    def _missing(self, passes: list[Pass], sample: bool, more: Sequence[Pass]) -> Todo:
        """Return what the run lacks of a check; what kept a pass out before is forgotten."""
        sampled = not sample or self.sampled(self.spec.rollout)
        long = any(pass_.folder == LONG for pass_ in passes)
        if sampled:
            passes = [
                pass_
                for pass_ in passes
                if not scored(self.spec, self.run_dir / pass_.folder, pass_)
            ]
        for pass_ in passes:
            error_path(self.run_dir, pass_label(pass_.name)).unlink(missing_ok=True)
        adapted = askable([p for p in passes if p.spec.scorer != OWN_SCORER], self.run_dir)
        own = [pass_ for pass_ in passes if pass_.spec.scorer == OWN_SCORER]
        world = None
        if ordered := tuple(by_load([*own, *more])):
            early = bool(self.placement.trainer) or may_load_early(self.spec.train)
            world = TrainerSession(self.run_dir, ordered, guided=True, load_first=early)
        return Todo(
            samples=sample and not (sampled and self._rescored()),
            float32=sample and self.square,
            long=long,
            adapted=adapted,
            world=world,
        )

    def _run_engine(self, todo: Todo, overlap: bool, *beside: Worker) -> None:
        """Sample and rescore; with ``overlap`` the trainer scores once the tokens are there."""
        name = self.spec.rollout.engine.engine
        tokens = beyond.length_here(self.spec, beyond.LONGEST)[0] if todo.long else 0
        long = [ScoreLong(Key(name).over_long(), tokens)] if tokens else []
        with self.engine(self.spec.rollout, "engine", Sample(), *long) as engine:
            until = SAMPLED if overlap else ""
            self.wait(engine, "rollout", f"rollout: {name} samples", *beside, until=until)
            if overlap and todo.world:
                self._leave_first_samples()
                let_score(todo.world)
                title = f"rollout: {name} rescores, the trainer scores meanwhile"
                self.wait(engine, "rescore", title, *beside)

    def _leave_first_samples(self) -> None:
        if self.room.float32_few:
            leave_first_samples(self.run_dir)

    def _await_scores(self, train: Worker, world: TrainerSession, allowed_s: float | None) -> None:
        names = [pass_.name for pass_ in world.passes]
        with self.timed("score", f"score: {self._title(len(names))}") as progress:
            train.show(numbered(progress, names))
            let_score(world, allowed_s)  # once more where both overlap
            finish(train)
        self.journal.timings[train.label] = train.timings
        self.journal.save()

    def sampled(self, spec: RolloutSpec) -> bool:
        """Return whether the run holds all that the engine samples."""
        return resume.rollout_done(self.run_dir, spec, own_python(spec.engine))

    def _score_with_adapter(self, passes: list[Pass], *beside: Worker) -> None:
        """Let a framework's own code score passes; float32 alone may be missing afterwards."""
        rollout = store.load_rollout(self.run_dir)
        if passes[0].spec.scorer == FILE_SCORER:
            self._score_from_file(passes, rollout)
            return
        run = prepared(self.spec, passes, self.run_dir, rollout, self.placement.trainer)
        title = f"score: {self._title(len(passes), passes[0].spec.scorer)}"
        try:
            with started("trainer", run.command, self.run_dir, env=run.env) as worker:
                self.wait(worker, "trainer", title, *beside)
        except MismatchError as error:
            corner = missing_corner(run.outputs)
            if not corner:
                raise
            write_error(self.run_dir, pass_label(corner), error)
            self.narrator.note(f"the trainer in float32: {error.message}")
        keep_scores(passes, self.run_dir, rollout)

    def _score_from_file(self, passes: list[Pass], rollout: Rollout) -> None:
        """Keep the scores that another machine left in a file; optional passes may be missing."""
        file = require_file(passes[0].spec.scorer_config)
        scores = read_scores(file, passes, rollout)
        for pass_ in passes:
            if pass_.name in scores:
                scoring = scores[pass_.name]
                store.save_scoring(self.run_dir, scoring, rollout, made_by=pass_.spec)
            else:
                lacking = MismatchError(f"{file.name} has no column {column_of(pass_.name)}")
                write_error(self.run_dir, pass_label(pass_.name), lacking)
        self.narrator.note(f"score: {len(scores)} passes from {file}")

    def sample(self, *beside: Worker) -> None:
        """Run the engine alone, unless all that it makes is there."""
        spec = self.spec.rollout
        done = self.sampled(spec)
        if done and self._rescored():
            return
        with self.engine(spec) as engine:
            verb = "rescores" if done else "samples"
            title = f"rollout: {spec.engine.engine} {verb}, {self.run_dir.name}"
            self.wait(engine, "rescore" if done else "rollout", title, *beside)

    def _rescored(self) -> bool:
        spec = self.spec.rollout
        if not spec.engine.prefill:
            return True
        return resume.rescored(self.run_dir, spec, own_python(spec.engine))

    def _title(self, passes: int, code: str = "FSDP2") -> str:
        world = self.spec.nproc_per_node
        ranks = f"{world} rank{'s' if world > 1 else ''}"
        return f"{code}, {ranks}, {passes} pass{'' if passes == 1 else 'es'}"

    @contextmanager
    def engine(
        self, spec: RolloutSpec, label: str = "engine", *tasks: EngineTask
    ) -> Iterator[Worker]:
        """Run an engine's process; behind the block the GPUs' memory is free again.

        Args:
            tasks: what it is asked for; default: to sample, and to rescore what it sampled.
        """
        session = EngineSession(self.run_dir, spec, tasks or (Sample(),), label)
        path = write_session(session)
        where = self.placement
        if spec.engine.tensor_parallel_size > self.spec.rollout.engine.tensor_parallel_size:
            where = placement(replace(self.spec, rollout=spec), local_gpus())
        command, env = engine_command(spec.engine, where, WORKER, path)
        # With separate GPUs the engine leaves them to nobody, and others' change meanwhile.
        before = [] if where.engine else free_gpu_bytes()
        with started(label, command, self.run_dir, env=env) as worker:
            yield worker
        if held := still_held(before):
            self.narrator.note(
                f"{gib(held)} of GPU memory are still held though the engine has ended"
            )

    @contextmanager
    def _world(self, session: TrainerSession | None) -> Iterator[Worker | None]:
        if session is None:
            yield None
            return
        path = write_session(session)
        command, env = world_command(self.spec, self.placement, WORKER, path)
        with started(session.label, command, self.run_dir, env=env) as worker:
            yield worker

    def wait(self, worker: Worker, key: str, title: str, *beside: Worker, until: str = "") -> None:
        """Show a worker's progress until it ends (or as `finish`), and note its times."""
        with self.timed(key, title) as progress:
            worker.show(progress)
            # Requests to servers leave a worker idle, with their retries.
            engine = self.spec.rollout.engine
            more_s = 4 * engine.server_timeout_s if engine.servers else 0.0
            finish(worker, *beside, more_s=more_s, until=until)
        self.journal.timings[worker.label] = worker.timings
        self.journal.save()

    @contextmanager
    def timed(self, key: str, title: str) -> Iterator[Callable[[str], None]]:
        start = time.monotonic()
        with self.narrator.stage(self.count.next(title)) as progress:
            yield progress
        self.journal.seconds[key] = round(time.monotonic() - start, 2)


def numbered(progress: Callable[[str], None], passes: list[str]) -> Callable[[str], None]:
    """Say which of several passes is under way; a time left would be of this pass alone.

    >>> numbered(print, ["fsdp", "fsdp:grad"])("fsdp:grad 4096/7200 tokens, 812 tok/s, eta 4 s")
    pass 2 of 2 · 4096/7200 tokens, 812 tok/s
    """

    def show(text: str) -> None:
        name, _, done = text.partition(" ")
        if len(passes) > 1 and name in passes:
            text = f"pass {passes.index(name) + 1} of {len(passes)} · {done.partition(', eta')[0]}"
        progress(text)

    return show


def world_command(
    spec: CheckSpec, where: Placement, module: str, job: Path
) -> tuple[list[str], dict[str, str]]:
    """Return how a training world is started that runs a module, and its environment."""
    world, python = spec.nproc_per_node, world_python(spec.train)
    command = [
        *(python or sys.executable, "-m", "torch.distributed.run", *rendezvous_args()),
        *("--nproc-per-node", str(world), "-m", module, str(job)),
    ]
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)))
    env = worker_path(job.parent) if python else {}
    return command, {"OMP_NUM_THREADS": threads, **env, **EXACT, **visible_as(where.trainer)}


def world_python(train: TrainSpec) -> str | None:
    """Return the interpreter of the training world where it is not this process's.

    Next to an adapter the world scores what everything is measured from, and runs here if it can:
    then nothing of the framework's versions is in it.
    """
    own = train.scorer == OWN_SCORER or find_spec("torch") is None
    return train.python if own else None


def pass_python(spec: TrainSpec, train: TrainSpec) -> str | None:
    """Return the interpreter that computes a pass, whose versions its numbers depend on.

    Args:
        train: the trainer of the check that the pass belongs to.

    Returns:
        None: this process's.
    """
    return world_python(train) if spec.scorer == OWN_SCORER else spec.python


def scored(spec: CheckSpec, folder: Path, pass_: Pass) -> bool:
    """Return whether a folder holds a pass of a check over its tokens.

    The scores of a file are read again: the file may have changed.

    Raises:
        MismatchError: it was made with other versions or weights.
    """
    python = pass_python(pass_.spec, spec.train)
    own = pass_.spec.scorer != FILE_SCORER
    return own and resume.scoring_done(folder, pass_.name, pass_.spec, python)


def engine_command(
    spec: EngineSpec, where: Placement, module: str, job: Path
) -> tuple[list[str], dict[str, str]]:
    """Return the same of an engine's process."""
    command = [engine_python(spec), "-m", module, str(job)]
    env = worker_path(job.parent) if own_python(spec) else {}
    if spec.dtype == "fp32":
        env |= EXACT | EXACT_TRITON
    return command, env | visible_as(where.engine) | dict(spec.env)


def still_held(before: list[int], timeout_s: float = FREE_AGAIN_S) -> int:
    """Wait until the GPUs have as much memory free as ``before``; bytes that are still held."""
    end = time.monotonic() + timeout_s
    while True:
        now = free_gpu_bytes()
        held = max((old - new for old, new in zip(before, now, strict=False)), default=0)
        if held <= FREE_SLACK_BYTES:
            return 0
        if time.monotonic() > end:
            return held
        time.sleep(FREE_POLL_S)


def may_load_early(train: TrainSpec) -> bool:
    """Return whether the trainer's weights fit next to an engine at work: never on its GPU."""
    held = weight_bytes(train.model, "*.safetensors", "*.bin")
    available: int = psutil.virtual_memory().available
    return not local_gpus() and held > 0 and EARLY_FACTOR * held + EARLY_BYTES < available


def weight_bytes(model: str, *patterns: str) -> int:
    """Of the files of a model on this machine; 0: none."""
    files = (file for pattern in patterns for file in Path(model).glob(pattern))
    return sum(file.stat().st_size for file in files)


LABEL = FLOAT32_ENGINE
FACTOR, RESERVE = 5, 3 << 30  # float32 next to bf16 files, and what the process itself takes


def score_in_float32(stages: Stages, *beside: Worker) -> None:
    """Leave ``<engine>:fp32``, or the reason why there is none."""
    run_dir = stages.run_dir
    try:
        room = stages.room
        spec = float32_engine(
            stages.spec.rollout, room.float32_split, room.float32_offload, room.float32_layers
        )
        if spec is None:
            return
        kind = FIRST if room.float32_layers else ""
        own = SAMPLES if room.float32_few and not kind else ""
        tasks = [Score(Key.of(spec.engine.engine, kind, FLOAT32), own)]
        if not kind and (run_dir / LONG / store.ROLLOUT).exists():
            tasks.append(Score(Key(spec.engine.engine).over_long(FLOAT32), LONG))
        if not (tasks := lacking(run_dir, spec, tasks)):
            return
        error_path(run_dir, LABEL).unlink(missing_ok=True)
        if room.float32_left_out:
            if all(task.name in store.scoring_names(run_dir / task.folder) for task in tasks):
                return  # made while there was room
            raise MismatchError(room.float32_left_out)
        require_memory(spec)
        changed = spec.engine.weights != stages.spec.rollout.engine.weights
        if changed and not unpacks_mxfp4(spec.engine):
            stages.narrator.note(
                f"the engine in float32 reads a copy of the weights in {spec.engine.weights}, kept "
                f"in {cache()} while it runs"
            )
        title = f"rollout: {spec.engine.engine} in float32 scores the same tokens"
        with stages.engine(spec, LABEL, *tasks) as worker:
            stages.wait(worker, LABEL, title, *beside)
    except MismatchError as error:
        for worker in beside:
            worker.ended()  # raises if it was that one that failed
        write_error(run_dir, LABEL, error)
        stages.narrator.note(f"the engine in float32: {error.message}")


def lacking(run_dir: Path, spec: RolloutSpec, tasks: list[Score]) -> list[Score]:
    """Return the scorings that an engine with these settings has not made of the present tokens."""

    def is_there(task: Score) -> bool:
        file = store.scoring_file(task.name)
        return manifest.is_current(run_dir / task.folder, file, spec_hash(spec))

    return [task for task in tasks if not is_there(task)]


def require_memory(spec: RolloutSpec) -> None:
    """On a CPU, refuse what would drive other processes out of memory.

    Raises:
        MismatchError: float32 weights do not fit into what is free.
    """
    held = weight_bytes(spec.engine.model, "*.safetensors")
    if local_gpus() or spec.engine.layers or not held:
        return
    needed = FACTOR * held // 2 + RESERVE
    free = psutil.virtual_memory().available
    if needed > free:
        fault = f"the engine in float32 needs about {gib(needed)} of memory, {gib(free)} are free"
        raise MismatchError(fault, "check on a machine with more memory")
