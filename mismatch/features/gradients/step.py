"""``mismatch check --gradients``: a separate training world, once the scorings are there."""

from __future__ import annotations

from dataclasses import asdict

import psutil

from mismatch.codec import from_json, to_json
from mismatch.errors import MismatchError
from mismatch.features.gradients.flags import GRADIENTS
from mismatch.features.gradients.plan import choose_batch, plan_gradients
from mismatch.features.gradients.results import FILE, ID, SCHEMA, Taken, compare_gradients
from mismatch.models.config import find_config
from mismatch.models.sizes import UnknownSize, sized
from mismatch.processes.launch import started
from mismatch.processes.stages import Stages, world_command
from mismatch.run import manifest, store
from mismatch.run.machine import gib, local_gpus
from mismatch.specs import TrainSpec

WORKER = "mismatch.features.gradients.worker"
UNFINISHED = "unfinished"  # recorded in place of the plan where a pass failed: it is tried again


def take_gradients(stages: Stages) -> None:
    """Take what ``--gradients`` asks for, unless it is there; leave ``gradients.json``.

    Raises:
        MismatchError: the plan, the world or the comparison failed.
    """
    run_dir, prompts = stages.run_dir, stages.spec.extra(GRADIENTS)
    if prompts is None:
        return
    plan = plan_gradients(stages.spec, int(prompts))
    if manifest.is_current(run_dir, FILE, plan.made_by):
        stages.narrator.note("gradients: there already")
        return
    rollout = store.load_rollout(run_dir)
    batch = choose_batch(rollout, plan.prompts, plan.seed)
    require_room(stages.spec.train)
    left = run_dir / "jobs" / "gradients-taken.json"
    minutes = stages.spec.budget_minutes
    job = {
        "run_dir": str(run_dir),
        "plan": asdict(plan),
        "taken": str(left),
        "seconds": None if minutes is None else 60.0 * minutes,
    }
    path = store.write_json(run_dir / "jobs" / "gradients.json", job)
    command, env = world_command(stages.spec, stages.placement, WORKER, path)
    with started(ID, command, run_dir, env=env) as world:
        stages.wait(world, ID, f"gradients of {len(plan.passes)} trainers")
    taken = from_json(Taken, store.read_json(left))
    check = compare_gradients(taken, plan, batch)
    made_by = UNFINISHED if taken.failed else plan.made_by
    document = {"schema": SCHEMA, ID: to_json(check)}
    store.save_document(
        run_dir, FILE, document, schema=SCHEMA, made_by=made_by, inputs=(store.ROLLOUT,)
    )


def require_room(train: TrainSpec) -> None:
    """Refuse gradients that cannot fit into host memory, before a world starts.

    The reference's gradient is kept on the host in float32; without GPUs the weights and the
    gradient at work are there too.

    Raises:
        MismatchError: too little memory is free, with the numbers.
    """
    try:
        parameters = sized(find_config(train.model, train.revision)).parameters
    except UnknownSize:
        return
    needed = 4 * parameters * (1 if local_gpus() else 3)
    free = psutil.virtual_memory().available
    if needed > free:
        raise MismatchError(
            f"gradients of {parameters:,} parameters need {gib(needed)} of host memory, "
            f"{gib(free)} are free",
            "use a host with more memory, or leave --gradients out",
        )
