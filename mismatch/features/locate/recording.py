"""Record both sides of a run module by module, and name the first source."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.analysis.diagnosis.possible import impossible
from mismatch.codec import from_json, to_json
from mismatch.doctor.plan import Memory, memory_of
from mismatch.errors import MismatchError
from mismatch.experiments.scoring_passes import float32_engine, training_passes
from mismatch.features.locate import exact
from mismatch.features.locate.exact import Compared, ExactLocation
from mismatch.features.locate.judge import FILE, SCHEMA, to_document
from mismatch.features.locate.kinds import fault_of, kind_of
from mismatch.features.locate.plan import (
    EAGER,
    actions_of,
    dtype_of,
    eager,
    passes_of,
    select,
    side_folder,
)
from mismatch.features.locate.results import Location, Sequence, SideLocation
from mismatch.keys import FIRST, FLOAT32, TRAIN, TRAINER_FLOAT32, Key
from mismatch.models.config import find_config
from mismatch.pipeline.build import square_of
from mismatch.pipeline.on_disk import with_disk
from mismatch.processes.launch import EXACT, finish, started
from mismatch.processes.stages import Narrator, engine_command
from mismatch.run import store
from mismatch.run.machine import local_gpus, placement, visible_as
from mismatch.specs import OWN_SCORER, CheckSpec, Dtype, TrainSpec, portable, to_dict
from mismatch.types import Floats, NotTested, Rollout

WORKER = "mismatch.features.locate.worker"
PLACE = "locate"  # scratch in the run directory; gone at the end
ENGINE, PASSES = "locate-engine", "locate"
NO_PLAIN = "no plain forward computes in its precision"


def locate_in(
    run_dir: Path,
    spec: CheckSpec,
    narrator: Narrator,
    *,
    sequences: int = 8,
    tokens: int = 512,
    limit_s: float = math.inf,
    both: bool = False,
    gap: tuple[str, str] | None = None,
    alike: bool = False,
) -> Location:
    """Record a run's engine and trainer on some of its tokens; leave ``locate.json``.

    The caller holds the run directory.

    Args:
        sequences: how many; the worst half of them, and others at random.
        tokens: of a sequence at most.
        limit_s: after which a process that is still at work is ended.
        both: an engine that cannot be recorded is an error; else the trainer is located alone.
        gap: scorings in float32 that differ: both sides run as they did, and on the sequences that
            are worst by them; None: as the run's two sides.
        alike: modules that round otherwise than the plain forward's are sources, whatever their
            size. Ranks of an engine that add up rounded parts do so by nature: it is not asked.

    Raises:
        MismatchError: a trainer whose modules cannot be recorded, or the time was used up.
    """
    end, place, report = time.monotonic() + limit_s, run_dir / PLACE, run_dir / "report.json"
    square = None
    with suppress(MismatchError):  # a run without scorings yet
        square = square_of(run_dir, spec)
    if gap is not None:
        room = Memory()
        with suppress(MismatchError):  # as in the check: split or offloaded where it does not fit
            room = memory_of(spec)
        layers = room.float32_layers if Key(gap[0]).kind == FIRST else 0
        fitting = room.float32_split, room.float32_offload, layers
        sampler = float32_engine(spec.rollout, *fitting) or spec.rollout
        planned = {pass_.name: pass_.spec for pass_ in training_passes(spec)}
        train = planned.get(TRAINER_FLOAT32, spec.train)
        train = replace(train, layers=layers or train.layers)
        spec = replace(spec, rollout=sampler, train=train)
    rollout, train = store.load_rollout(run_dir), spec.train
    engine, delta = spec.rollout.engine.engine, None
    headline = (Key.of(engine, "decode"), TRAIN)
    names, present = gap or headline, set(store.scoring_names(run_dir))
    if present.issuperset(names):
        sampled, trained = (store.load_scoring(run_dir, name).logprobs for name in names)
        delta = trained - sampled
    chosen = select(rollout, delta, sequences, tokens)
    work = _Recording(run_dir, spec, narrator, chosen, end)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    try:
        dtype = work.engine()
        unseen = [dtype] if isinstance(dtype, NotTested) else []
        if unseen and both:
            raise MismatchError(f"{unseen[0].what}: {unseen[0].reason}", unseen[0].how)
        if unseen:
            narrator.note(f"{engine} is not located: {unseen[0].reason}")
        alike = alike and spec.rollout.engine.tensor_parallel_size == 1
        result = work.passes(None if isinstance(dtype, NotTested) else dtype, alike)
        sides = from_json(list[SideLocation], result["sides"])
        sides = [replace(side, held=work.held(side, rollout)) for side in sides]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    ruled_out: tuple[str, ...] = ()
    if present.issuperset(headline):
        scored = (store.load_scoring(run_dir, name) for name in headline)
        left, right = (each.fingerprint for each in with_disk(run_dir, *scored))
        sides = [replace(side, kind=kind_of(side, left, right, square)) for side in sides]
        sides = [replace(side, fault=fault_of(side, left, right)) for side in sides]
        ruled_out = tuple(sorted(impossible(left, right)))
    location = Location(
        model=Path(train.model).name,
        reference=portable({"model": train.model})["model"],
        sequences=chosen,
        tokens=len(actions_of(rollout, chosen)),
        sides=tuple(sides),
        not_tested=(*unseen, *from_json(list[NotTested], result["not_tested"])),
        broken=report.exists() and store.read_json(report)["verdict"]["status"] == "broken",
        fields=fields_of(train),
        impossible=ruled_out,
        alike=alike,
    )
    inputs = (store.ROLLOUT, *(store.scoring_file(name) for name in present))
    store.save_document(run_dir, FILE, to_document(location), schema=SCHEMA, inputs=inputs)
    return location


def locate_exact(
    run_dir: Path, spec: CheckSpec, narrator: Narrator, *, sequences: int = 8, tokens: int = 512
) -> ExactLocation:
    """Compare a run's engine and trainer module by module by bits; leave ``locate-exact.json``.

    The caller holds the run directory. Arguments: see :func:`locate_in`.

    Raises:
        MismatchError: the modules of a side cannot be recorded.
    """
    place, rollout = run_dir / PLACE, store.load_rollout(run_dir)
    engine, delta = spec.rollout.engine.engine, None
    present = set(store.scoring_names(run_dir))
    if present.issuperset(names := (Key.of(engine, "decode"), TRAIN)):
        sampled, trained = (store.load_scoring(run_dir, name).logprobs for name in names)
        delta = trained - sampled
    chosen = select(rollout, delta, sequences, tokens)
    work = _Recording(run_dir, spec, narrator, chosen, exact=True)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    try:
        if isinstance(unseen := work.engine(), NotTested) and unseen.reason != NO_PLAIN:
            raise MismatchError(f"{unseen.what}: {unseen.reason}", unseen.how)
        sides = [Key.of(engine, kind) for kind in ("prefill", "decode")]
        phases = from_json(list[Compared], work.bits(sides)["phases"])
        phases = [
            replace(each, as_run=(work.same(each.engine, rollout), work.same(TRAIN, rollout)))
            for each in phases
        ]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    missing = []
    if {each.phase for each in phases} != {"prefill", "decode"}:
        reason = f"{engine} cannot be given the tokens that it decodes"
        missing.append(NotTested(f"modules of {engine} while it decodes", reason))
    if spec.train.scorer != OWN_SCORER:
        reason = "mismatch's own trainer ran with its settings; its modules show no hooks"
        missing.append(NotTested(f"modules of {spec.train.scorer}'s own code", reason))
    found = ExactLocation(Path(spec.train.model).name, chosen, tuple(phases), tuple(missing))
    inputs = (store.ROLLOUT, *(store.scoring_file(name) for name in present))
    store.save_document(
        run_dir, exact.FILE, exact.to_document(found), schema=exact.SCHEMA, inputs=inputs
    )
    return found


def fields_of(train: TrainSpec) -> tuple[str, ...]:
    """Return the names that the model's config.json sets; () where there is none to be read."""
    with suppress(MismatchError):
        values = find_config(train.model, train.revision).values
        text = values.get("text_config") or {}
        return tuple(sorted(name for name, value in (values | text).items() if value is not None))
    return ()


@dataclass(frozen=True, slots=True)
class _Recording:
    """The processes that record one run."""

    run_dir: Path
    spec: CheckSpec
    narrator: Narrator
    sequences: tuple[Sequence, ...]
    end: float = math.inf
    exact: bool = False

    def engine(self) -> Dtype | NotTested:
        """Return what the engine computed in, or why it could not be recorded."""
        spec = self.spec.rollout
        name = spec.engine.engine
        what = f"the modules of {name}"
        if spec.engine.servers:
            fix = "check a local engine of the same version: --engine vllm"
            return NotTested(what, "a running server shows none of its modules", fix)
        if name not in (*EAGER, "transformers"):
            return NotTested(what, "no hooks reach them yet", "use --engine vllm")
        job = self._job(ENGINE, {"spec": to_dict(replace(spec, engine=eager(spec.engine)))})
        where = placement(self.spec, local_gpus())
        command, env = engine_command(spec.engine, where, WORKER, job)
        try:
            self._run(ENGINE, command, env, f"{name} records its modules")
        except MismatchError as error:
            return NotTested(what, error.message, error.fix)
        folder = side_folder(self.run_dir / PLACE, Key.of(name, "prefill"))
        dtype = dtype_of(store.read_json(folder / "facts.json"))
        return dtype or NotTested(what, NO_PLAIN)

    def passes(self, engine_dtype: Dtype | None, alike: bool) -> dict[str, Any]:
        """Return what the worker found in the trainer, and in the engine's recording if any."""
        train = self.spec.train
        precision = dtype_of({"dtype": train.dtype, "autocast": train.autocast})
        assert precision is not None  # a trainer quantises nothing
        sides = [{"name": TRAIN, "role": "trainer", "dtype": precision}]
        if engine_dtype is not None:
            name = Key.of(self.spec.rollout.engine.engine, "prefill")
            sides.insert(0, {"name": name, "role": "engine", "dtype": engine_dtype})
        passes = passes_of(train, {precision, engine_dtype or precision})
        named = [{"name": pass_.name, "spec": to_dict(pass_.spec)} for pass_ in passes]
        return self._compared({"passes": named, "sides": sides, "alike": alike})

    def bits(self, sides: list[Key]) -> dict[str, Any]:
        """Return what the worker found of the engine's recordings and the trainer by bits."""
        trainer = passes_of(self.spec.train, set())[0]
        named = [{"name": trainer.name, "spec": to_dict(trainer.spec)}]
        return self._compared({"passes": named, "sides": sides})

    def _compared(self, asked: dict[str, Any]) -> dict[str, Any]:
        job = self._job(PASSES, asked)
        threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count() or 1))
        env = {"OMP_NUM_THREADS": threads, **EXACT}
        env |= visible_as(placement(self.spec, local_gpus()).trainer[:1])
        command = [sys.executable, "-m", WORKER, str(job)]
        self._run(PASSES, command, env, "trainer" if self.exact else "trainer and float32")
        result: dict[str, Any] = store.read_json(self.run_dir / PLACE / "sides.json")
        return result

    def held(self, side: SideLocation, rollout: Rollout) -> float | None:
        """Return a side's distance from what the run itself recorded, nats."""
        engine = Key(side.name).side
        names: list[str] = [Key.of(engine, precision=FLOAT32)] if side.dtype == "fp32" else []
        names += [side.name, Key.of(engine, "decode")] if side.role == "engine" else [side.name]
        name = next((name for name in names if name in store.scoring_names(self.run_dir)), None)
        if name is None or not rollout.sampling.plain:  # recorded with other probabilities
            return None
        own = store.load_scoring(self.run_dir, name).logprobs[actions_of(rollout, self.sequences)]
        return float(np.abs(self._recorded(side.name) - own).mean())

    def same(self, name: str, rollout: Rollout) -> int | None:
        """Return how many tokens have the bits that the run holds; None: it holds none."""
        if name not in store.scoring_names(self.run_dir) or not rollout.sampling.plain:
            return None
        own = store.load_scoring(self.run_dir, name).logprobs[actions_of(rollout, self.sequences)]
        return int((self._recorded(name) == own).sum())

    def _recorded(self, side: str) -> Floats:
        folder = side_folder(self.run_dir / PLACE, side)
        return np.concatenate([np.load(folder / f"{n}.npy") for n in range(len(self.sequences))])

    def _job(self, label: str, asked: dict[str, Any]) -> Path:
        asked |= {
            "run_dir": str(self.run_dir),
            "place": str(self.run_dir / PLACE),
            "label": label,
            "exact": self.exact,
            "sequences": to_json(self.sequences),
        }
        return store.write_json(self.run_dir / "jobs" / f"{label}.json", asked)

    def _run(self, label: str, command: list[str], env: dict[str, str], title: str) -> None:
        with (
            self.narrator.stage(f"locate: {title}") as progress,
            started(label, command, self.run_dir, progress, env) as worker,
        ):
            finish(worker, end=self.end)
