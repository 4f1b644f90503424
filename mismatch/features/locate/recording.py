"""Record both sides of a run module by module, and name the first source."""

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
from mismatch.errors import MismatchError
from mismatch.features.locate.judge import FILE, SCHEMA, to_document
from mismatch.features.locate.plan import (
    EAGER,
    SEQUENCES,
    TOKENS,
    actions_of,
    dtype_of,
    eager,
    passes_of,
    require_disk,
    select,
)
from mismatch.features.locate.results import Location, SideLocation
from mismatch.models.config import find_config
from mismatch.processes.launch import (
    EXACT,
    engine_python,
    finish,
    interpreter_environment,
    own_python,
    started,
)
from mismatch.processes.stages import Narrator
from mismatch.run import store
from mismatch.run.directory import at_work, load_spec
from mismatch.run.machine import local_gpus, placement, visible_as
from mismatch.run.store import TRAIN
from mismatch.specs import CheckSpec, to_dict
from mismatch.types import NotTested

MOST_SIDES = 4  # engine, trainer, a plain forward in the dtype of each
WORKER = "mismatch.features.locate.worker"
PLACE = "locate"  # scratch in the run directory; gone at the end
ENGINE, PASSES = "locate-engine", "locate"


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user asked for.

    Attributes:
        tokens: of a sequence at most.
        seconds: after which no further sequence is begun.
    """

    sequences: int = SEQUENCES
    tokens: int = TOKENS
    seconds: float = 600.0
    seed: int = 0


def locate(run_dir: Path, narrator: Narrator, asked: Asked, command: str = "") -> Location:
    """Record the run's engine and trainer on some of its tokens; leave ``locate.json``.

    Raises:
        MismatchError: no run there, or a trainer whose modules cannot be recorded.
    """
    spec = load_spec(run_dir)
    with at_work(run_dir, "locate", spec, command):
        return locate_in(run_dir, spec, narrator, asked)


def locate_in(run_dir: Path, spec: CheckSpec, narrator: Narrator, asked: Asked) -> Location:
    """Do the same within a command that holds the run already.

    Raises:
        MismatchError: a trainer whose modules cannot be recorded.
    """
    start, recordings = time.monotonic(), run_dir / PLACE
    shutil.rmtree(recordings, ignore_errors=True)
    recordings.mkdir()
    try:
        location = _Locating(run_dir, spec, narrator, asked).located()
    finally:
        shutil.rmtree(recordings, ignore_errors=True)
    report = run_dir / "report.json"
    location = replace(
        location,
        seconds=round(time.monotonic() - start, 2),
        broken=report.exists() and store.read_json(report)["verdict"]["status"] == "broken",
    )
    store.save_document(run_dir, FILE, to_document(location), schema=SCHEMA)
    return location


class _Locating:
    """One run at work."""

    def __init__(self, run_dir: Path, spec: CheckSpec, narrator: Narrator, asked: Asked) -> None:
        self.run_dir, self.spec, self.narrator, self.asked = run_dir, spec, narrator, asked
        self.rollout = store.load_rollout(run_dir)
        self.scorings = set(store.scoring_names(run_dir))
        engine = spec.rollout.engine.engine
        self.engine = f"{engine}:prefill"
        delta, names = None, (f"{engine}:decode", TRAIN)
        if self.scorings.issuperset(names):
            sampled, train = (store.load_scoring(run_dir, name).logprobs for name in names)
            delta = train - sampled
        self.sequences = select(self.rollout, delta, asked.sequences, asked.tokens, asked.seed)
        self.not_tested: list[NotTested] = []

    def located(self) -> Location:
        train = self.spec.train
        tokens = sum(sequence.tokens for sequence in self.sequences)
        config = find_config(train.model, train.revision).model
        require_disk(config, tokens, MOST_SIDES, shutil.disk_usage(self.run_dir).free)
        result = self._passes(self._recorded_engine())
        self.not_tested += from_json(list[NotTested], result["not_tested"])
        sides = from_json(list[SideLocation], result["sides"])
        return Location(
            model=Path(train.model).name,
            reference=train.model,
            sequences=self.sequences,
            tokens=len(actions_of(self.rollout, self.sequences)),
            sides=tuple(replace(side, held=self._held(side.name)) for side in sides),
            not_tested=tuple(self.not_tested),
        )

    # ------------------------------------------------------------ recording

    def _recorded_engine(self) -> dict[str, Any] | None:
        """Return what the engine said of itself; None where it could not be recorded."""
        spec = self.spec.rollout
        name = spec.engine.engine
        what = f"the modules of {name}"
        missing = None
        if spec.engine.servers:
            fix = "check a local engine of the same version: --engine vllm"
            missing = NotTested(what, "a running server shows none of its modules", fix)
        elif name not in (*EAGER, "transformers"):
            missing = NotTested(what, "no hooks reach them yet", "use --engine vllm")
        facts: dict[str, Any] = {}
        if missing is None:
            job = {"spec": to_dict(replace(spec, engine=eager(spec.engine)))}
            env = interpreter_environment(own_python(spec.engine)) | dict(spec.engine.env)
            env |= visible_as(placement(self.spec, local_gpus()).engine)
            try:
                self._run(ENGINE, job, engine_python(spec.engine), env, f"{name} records")
                facts = store.read_json(self._folder(self.engine) / "facts.json")
                if dtype_of(facts) is None:
                    missing = NotTested(what, "no plain forward computes in its precision")
            except MismatchError as error:
                missing = NotTested(what, error.message, error.fix)
        if missing is None:
            return facts
        self.not_tested.append(missing)
        self.narrator.note(f"{name} is not located: {missing.reason}")
        return None

    def _passes(self, facts: dict[str, Any] | None) -> dict[str, Any]:
        """Return what the worker found in the trainer and in the engine's recording."""
        train = self.spec.train
        precision = dtype_of({"dtype": train.dtype, "autocast": train.autocast})
        assert precision is not None  # a trainer quantises nothing
        dtypes = {TRAIN: precision}
        sides = [{"name": TRAIN, "role": "trainer", "dtype": precision}]
        if facts is not None and (engine := dtype_of(facts)) is not None:
            dtypes[self.engine] = engine
            sides.insert(0, {"name": self.engine, "role": "engine", "dtype": engine})
        passes = passes_of(train, set(dtypes.values()))
        job = {
            "passes": [{"name": pass_.name, "spec": to_dict(pass_.spec)} for pass_ in passes],
            "sides": sides,
            "seconds": self.asked.seconds,
        }
        threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count() or 1))
        env = {"OMP_NUM_THREADS": threads, **EXACT}
        env |= visible_as(placement(self.spec, local_gpus()).trainer[:1])
        self._run(PASSES, job, sys.executable, env, "trainer and float32")
        result: dict[str, Any] = store.read_json(self.run_dir / PLACE / "sides.json")
        return result

    def _run(
        self, label: str, job: dict[str, Any], python: str, env: dict[str, str], title: str
    ) -> None:
        job |= {
            "run_dir": str(self.run_dir),
            "place": str(self.run_dir / PLACE),
            "label": label,
            "sequences": to_json(self.sequences),
        }
        path = store.write_json(self.run_dir / "jobs" / f"{label}.json", job)
        command = [python, "-m", WORKER, str(path)]
        with (
            self.narrator.stage(f"locate: {title}") as progress,
            started(label, command, self.run_dir, progress, env) as worker,
        ):
            finish(worker)

    # ------------------------------------------------------------ against the run

    def _folder(self, side: str) -> Path:
        return self.run_dir / PLACE / side.replace(":", "-")

    def _held(self, side: str) -> float | None:
        """Return the distance from what the run itself recorded, nats."""
        names = [side, side.replace(":prefill", ":decode")]
        name = next((name for name in names if name in self.scorings), None)
        if name is None or self.rollout.sampling.truncates:  # recorded with other probabilities
            return None
        own = store.load_scoring(self.run_dir, name).logprobs
        files = [self._folder(side) / f"{n}.npy" for n in range(len(self.sequences))]
        here = np.concatenate([np.load(file) for file in files])
        return float(np.abs(here - own[actions_of(self.rollout, self.sequences)]).mean())
