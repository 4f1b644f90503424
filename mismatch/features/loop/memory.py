"""What a training loop takes in memory, before it starts."""

from __future__ import annotations

from dataclasses import replace

from mismatch.doctor.fit import Fit, engine_fit, trainer_fits
from mismatch.doctor.machine import Machine, inspect_machine
from mismatch.doctor.plan import work_of
from mismatch.errors import MismatchError
from mismatch.models.config import find_config
from mismatch.models.sizes import sized
from mismatch.run.machine import placement
from mismatch.run.store import TRAIN
from mismatch.specs import CheckSpec, Pass


def memory_of_loop(spec: CheckSpec, machine: Machine | None = None) -> tuple[Fit, ...]:
    """Predict engine and trainer with its optimiser, alive at once; empty where sizes are unknown.

    The trainer has what the engine leaves, unless each has separate GPUs.

    Args:
        machine: where it would run; None: this machine.
    """
    machine = machine or inspect_machine()
    try:
        shape = sized(find_config(spec.train.model, spec.train.revision))
        work = work_of(spec)[0]
        where = placement(spec, len(machine.gpus))
    except MismatchError:
        return ()
    steps = [Pass(TRAIN, replace(spec.train, grad=True))]
    engine = engine_fit(spec, shape, work, machine)
    beside = 0 if where.trainer else engine.needed
    return (engine, *trainer_fits(spec, shape, work, machine, steps, beside))
