"""Two engines in one check: each samples, and rescores what the other sampled.

The first engine samples in the run itself, the second in ``engines/NAME``, a run directory of its
own; then the first is started once more for the second's tokens. One training world scores both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError
from mismatch.experiments.engine_pair import DIRECTORY, other_place, other_spec
from mismatch.experiments.passes import Job
from mismatch.processes.launch import Worker
from mismatch.processes.stages import Stages
from mismatch.run import resume
from mismatch.run.directory import at_work
from mismatch.run.scorings import TRAIN
from mismatch.specs import CheckSpec, Pass


def measure_two(stages: Stages, passes: list[Pass]) -> None:
    """Everything that a check with two engines needs.

    Raises:
        MismatchError: an engine or the training world failed; what is there stays, to be resumed.
    """
    stages.measure(passes, beside=SecondEngine(stages))


class SecondEngine:
    """The second engine of a check; a :class:`mismatch.processes.stages.Beside`."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.spec = other_spec(stages.spec)
        self.place = stages.run_dir / other_place(stages.spec)
        train = self.spec.train
        done = resume.rollout_done(self.place, self.spec.rollout)
        scored = done and resume.scoring_done(self.place, TRAIN, train)
        self.jobs = [] if scored else [Job(self.place, Pass(TRAIN, train))]

    def prepare(self, *world: Worker) -> dict[str, Any]:
        """Sample with the second engine, and have each rescore the other's tokens."""
        home, engine = self.stages.run_dir, self.spec.rollout.engine.engine
        self.place.mkdir(parents=True, exist_ok=True)
        command = self.stages.journal.entry["command"]
        try:
            with at_work(self.place, "check", self.spec, command) as journal:
                own = Stages(self.spec, self.place, self.stages.narrator, journal)
                own.sample(*world, also=[home])
        except MismatchError as error:
            for worker in world:
                worker.ended()  # raises if it was the world that failed
            raise MismatchError(
                f"the second engine, {engine}: {error.message}",
                error.fix or f"its log is {Path(DIRECTORY) / engine / 'logs/engine.log'}",
            ) from error
        self.stages.sample(*world, also=[self.place])
        return {}


def dry_run_lines(spec: CheckSpec) -> list[str]:
    """What ``--dry-run`` says about the second engine."""
    if spec.other_engine is None:
        return []
    first, second = spec.rollout.engine.engine, spec.other_engine.engine
    return [
        f"two engines: {first} samples, then {second}, and each rescores the other's tokens: "
        "three engine starts, and one more pass of the trainer; one engine at a time in memory"
    ]
