"""The engine in float32: started once more, to score the tokens that it sampled.

A failure (no memory, no float32 kernels) is no failure of the check: its reason is left in
``errors/float32-engine.json`` and stands in the report.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from mismatch.errors import MismatchError
from mismatch.experiments.square import float32_engine
from mismatch.processes.launch import Worker
from mismatch.run import manifest, store
from mismatch.run.machine import gib, local_gpus
from mismatch.run.messages import error_path, write_error
from mismatch.run.scorings import FLOAT32
from mismatch.specs import CheckSpec, RolloutSpec, spec_hash

LABEL = "float32-engine"
FACTOR, RESERVE = 5, 3 << 30  # float32 beside bf16 files, and what the process itself takes


class Starter(Protocol):
    """What starts engines; :class:`mismatch.processes.stages.Stages`."""

    spec: CheckSpec
    run_dir: Path
    narrator: Any

    def engine(
        self, spec: RolloutSpec, label: str, job: dict[str, Any]
    ) -> AbstractContextManager[Worker]: ...

    def wait(self, worker: Worker, key: str, title: str, *beside: Worker) -> None: ...


def score_in_float32(stages: Starter, *beside: Worker) -> None:
    """Leave ``<engine>:fp32``, or the reason why there is none."""
    place = stages.run_dir
    try:
        spec = float32_engine(stages.spec.rollout)
        name = f"{stages.spec.rollout.engine.engine}:{FLOAT32}"
        if spec is None or is_done(place, name, spec):
            return
        error_path(place, LABEL).unlink(missing_ok=True)
        require_memory(spec)
        job = {"label": LABEL, "score": name}
        title = f"rollout: {spec.engine.engine} in float32 scores the same tokens"
        with stages.engine(spec, LABEL, job) as worker:
            stages.wait(worker, LABEL, title, *beside)
    except MismatchError as error:
        for worker in beside:
            worker.ended()  # raises if it was that one that failed
        write_error(place, LABEL, error)
        stages.narrator.note(f"the engine in float32: {error.message}")


def is_done(place: Path, name: str, spec: RolloutSpec) -> bool:
    """Whether the scoring is there, of these tokens and this spec."""
    return manifest.is_current(place, store.scoring_file(name), spec_hash(spec))


def require_memory(spec: RolloutSpec) -> None:
    """On a CPU, refuse what would drive other processes out of memory.

    Raises:
        MismatchError: float32 weights do not fit into what is free.
    """
    import psutil

    files = [*Path(spec.engine.model).glob("*.safetensors")]
    if local_gpus() or not files:
        return
    needed = FACTOR * sum(file.stat().st_size for file in files) // 2 + RESERVE
    free = psutil.virtual_memory().available
    if needed > free:
        raise MismatchError(
            f"the engine in float32 needs about {gib(needed)} of memory, {gib(free)} are free",
            "check on a machine with more memory",
        )
