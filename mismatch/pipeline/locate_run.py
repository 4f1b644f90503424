"""``mismatch locate``: record both sides of a run module by module, and name the first source."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mismatch.codec import from_json, to_json
from mismatch.engines.registry import engine_info
from mismatch.errors import MismatchError
from mismatch.experiments.locate.judge import FILE, SCHEMA, to_document
from mismatch.experiments.locate.plan import (
    SEQUENCES,
    TOKENS,
    actions_of,
    dtype_of,
    eager,
    passes_of,
    require_disk,
    select,
)
from mismatch.experiments.locate.types import Location, SideLocation
from mismatch.models.config import find_config
from mismatch.processes.launch import (
    EXACT,
    engine_python,
    finish,
    interpreter_environment,
    own_python,
)
from mismatch.processes.launch import started as start_worker
from mismatch.processes.stages import Narrator
from mismatch.run import store
from mismatch.run.directory import at_work, load_spec
from mismatch.run.machine import local_gpus, placement, visible_as
from mismatch.run.store import TRAIN
from mismatch.specs import CheckSpec, RolloutSpec, to_dict
from mismatch.types import Floats, NotTested

MOST_SIDES = 4  # engine, trainer, a plain forward in the dtype of each
WORKER = "mismatch.processes.workers.locate_modules"
PLACE = "locate"  # scratch in the run directory; gone at the end
ENGINE, PASSES = "locate-engine", "locate"


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user asked for.

    Attributes:
        tokens: of a sequence at most.
        seconds: after which no further sequence or pair is begun.
    """

    sequences: int = SEQUENCES
    tokens: int = TOKENS
    seconds: float = 600.0
    seed: int = 0


def locate(
    run_dir: Path, narrator: Narrator, asked: Asked | None = None, command: str = ""
) -> Location:
    """Record the run's engine and trainer on some of its tokens, and say where each parts.

    The result is also left in the run, as ``locate.json``.

    Raises:
        MismatchError: no run there, or a trainer whose modules cannot be told apart.
    """
    asked, spec = asked or Asked(), load_spec(run_dir)
    with at_work(run_dir, "locate", spec, command):
        location = locate_in(run_dir, spec, narrator, asked)
        store.save_document(run_dir, FILE, to_document(location), schema=SCHEMA)
    return location


def locate_in(run_dir: Path, spec: CheckSpec, narrator: Narrator, asked: Asked) -> Location:
    """The same within a command that holds the run already; nothing is left in it."""
    start, recordings = time.monotonic(), run_dir / PLACE
    shutil.rmtree(recordings, ignore_errors=True)
    recordings.mkdir()
    try:
        location = _Locating(run_dir, spec, narrator, asked).located()
    finally:
        shutil.rmtree(recordings, ignore_errors=True)
    return replace(location, seconds=round(time.monotonic() - start, 2))


class _Locating:
    """One run at work."""

    def __init__(self, run_dir: Path, spec: CheckSpec, narrator: Narrator, asked: Asked) -> None:
        self.run_dir, self.spec, self.narrator, self.asked = run_dir, spec, narrator, asked
        self.rollout = store.load_rollout(run_dir)
        self.scorings = set(store.scoring_names(run_dir))
        engine = spec.rollout.engine.engine
        self.engine = f"{engine}:prefill"
        self.sequences = select(
            self.rollout, self._delta(), asked.sequences, asked.tokens, asked.seed
        )
        self.not_tested: list[NotTested] = []

    def located(self) -> Location:
        tokens = sum(sequence.tokens for sequence in self.sequences)
        train = self.spec.train
        config = find_config(train.model, train.revision).model
        require_disk(config, tokens, MOST_SIDES, shutil.disk_usage(self.run_dir).free)
        facts = self._recorded_engine()
        result = self._passes(facts)
        sides = tuple(self._held(from_json(SideLocation, side)) for side in result["sides"])
        self.not_tested += [from_json(NotTested, entry) for entry in result["not_tested"]]
        places = actions_of(self.rollout, self.sequences)
        return Location(
            model=Path(self.spec.train.model).name,
            reference=self.spec.train.model,
            sequences=self.sequences,
            tokens=len(places),
            layers=int(result["layers"]),
            between=self._between(),
            sides=sides,
            not_tested=tuple(self.not_tested),
        )

    def _delta(self) -> Floats | None:
        names = [f"{self.engine.partition(':')[0]}:decode", TRAIN]
        if not self.scorings.issuperset(names):
            return None
        rollout_side, train = (store.load_scoring(self.run_dir, name).logprobs for name in names)
        return train - rollout_side

    # ------------------------------------------------------------ recording

    def _recorded_engine(self) -> dict[str, Any] | None:
        """What the engine said of itself; None where it could not be recorded, with the reason."""
        spec = self.spec.rollout
        name = spec.engine.engine
        obstacle = not_recordable(spec)
        if obstacle is not None:
            self.not_tested.append(obstacle)
            return None
        job = self._job(ENGINE) | {"spec": to_dict(replace(spec, engine=eager(spec.engine)))}
        path = store.write_json(self.run_dir / "jobs" / f"{ENGINE}.json", job)
        command = [engine_python(spec.engine), "-m", WORKER, str(path)]
        env = interpreter_environment(own_python(spec.engine)) | dict(spec.engine.env)
        env |= visible_as(placement(self.spec, local_gpus()).engine)
        try:
            self._run(ENGINE, command, env, f"{name} records its modules")
        except MismatchError as error:
            self.not_tested.append(NotTested(f"the modules of {name}", error.message, error.fix))
            self.narrator.note(f"{name} is not located: {error.headline}")
            return None
        facts: dict[str, Any] = store.read_json(self._folder(self.engine) / "facts.json")
        if dtype_of(facts) is None:
            reason = "no plain forward computes in its precision"
            self.not_tested.append(NotTested(f"the modules of {name}", reason))
            return None
        return facts

    def _passes(self, facts: dict[str, Any] | None) -> dict[str, Any]:
        train = self.spec.train
        dtype = dtype_of({"dtype": train.dtype, "autocast": train.autocast})
        assert dtype is not None  # a trainer quantises nothing
        sides = [{"name": TRAIN, "role": "trainer", "dtype": dtype}]
        if facts is not None:
            precision = dtype_of(facts) or dtype
            sides.insert(0, {"name": self.engine, "role": "engine", "dtype": precision})
        dtypes = {side["dtype"] for side in sides}
        passes = passes_of(train, dtypes)  # type: ignore[arg-type]
        job = self._job(PASSES) | {
            "passes": [{"name": pass_.name, "spec": to_dict(pass_.spec)} for pass_ in passes],
            "plain": [{"dtype": dtype} for dtype in sorted(dtypes - {"fp32"})],
            "sides": sides,
            "seconds": self.asked.seconds,
        }
        path = store.write_json(self.run_dir / "jobs" / f"{PASSES}.json", job)
        threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count() or 1))
        env = {"OMP_NUM_THREADS": threads, **EXACT}
        env |= visible_as(placement(self.spec, local_gpus()).trainer[:1])
        self._run(PASSES, [sys.executable, "-m", WORKER, str(path)], env, "trainer and float32")
        result: dict[str, Any] = store.read_json(self.run_dir / PLACE / "sides.json")
        return result

    def _job(self, label: str) -> dict[str, Any]:
        return {
            "run_dir": str(self.run_dir),
            "place": str(self.run_dir / PLACE),
            "label": label,
            "sequences": to_json(self.sequences),
        }

    def _run(self, label: str, command: list[str], env: dict[str, str], title: str) -> None:
        with (
            self.narrator.stage(f"locate: {title}") as progress,
            start_worker(label, command, self.run_dir, progress, env) as worker,
        ):
            finish(worker)

    # ------------------------------------------------------------ against the run

    def _folder(self, side: str) -> Path:
        return self.run_dir / PLACE / side.replace(":", "-")

    def _recorded(self, side: str) -> Floats:
        files = [self._folder(side) / f"{n}.npy" for n in range(len(self.sequences))]
        return np.concatenate([np.load(file) for file in files])

    def _held(self, side: SideLocation) -> SideLocation:
        """With its distance from what the run itself recorded."""
        names = [side.name, side.name.replace(":prefill", ":decode")]
        name = next((name for name in names if name in self.scorings), None)
        if name is None or self.rollout.sampling.truncates:  # recorded under another law
            return side
        own = store.load_scoring(self.run_dir, name).logprobs
        there = own[actions_of(self.rollout, self.sequences)]
        return replace(side, held=float(np.abs(self._recorded(side.name) - there).mean()))

    def _between(self) -> float | None:
        if not (self._folder(self.engine) / "0.npy").exists():
            return None
        return float(np.abs(self._recorded(TRAIN) - self._recorded(self.engine)).mean())


def not_recordable(spec: RolloutSpec) -> NotTested | None:
    """Why an engine's modules are not recorded; None where they are."""
    engine = spec.engine
    what = f"the modules of {engine.engine}"
    if engine.servers:
        reason = "a running server shows none of its modules"
        return NotTested(what, reason, "check a local engine of the same version: --engine vllm")
    if engine_info(engine.engine).record is None:
        return NotTested(what, "no hooks reach them yet", "use --engine vllm or transformers")
    return None
