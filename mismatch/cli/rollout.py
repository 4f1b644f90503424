"""`mismatch rollout`: the engine's side alone."""

from __future__ import annotations

from dataclasses import replace

from mismatch.cli.command import with_flags
from mismatch.cli.flags import Flags
from mismatch.cli.options import (
    ADAPTER,
    CONFIG,
    ENGINE_FLAGS,
    LAYERS,
    MODEL_FLAGS,
    NEW_RUN,
    PROMPT_FLAGS,
    PYTHON,
    ROUTING,
    SERVER_FLAGS,
    TRUST_RUN,
    WEIGHTS,
)
from mismatch.specs import CheckSpec, TrainSpec


@with_flags(
    *(MODEL_FLAGS, LAYERS, ADAPTER, PROMPT_FLAGS, ENGINE_FLAGS, SERVER_FLAGS, ROUTING, NEW_RUN),
    *(PYTHON, WEIGHTS, TRUST_RUN, CONFIG),
)
def rollout(flags: Flags) -> int:
    """Sample in the engine; score later, here or elsewhere.

    The engine's own logprobs and routed experts are kept with the tokens.

    Examples:
    mismatch rollout --model MODEL --out runs/A
    """
    from mismatch.cli import output, session
    from mismatch.cli.to_spec import refuse_sides, require_model, rollout_spec
    from mismatch.doctor.plan import placed
    from mismatch.models import resolve_model
    from mismatch.pipeline.commands import run_rollout
    from mismatch.pipeline.preflight import preflight_rollout

    spec = session.stored_spec(flags)
    if spec is None:
        refuse_sides(flags, ("train", "effect"), "is for the trainer, which scores later")
        model = resolve_model(require_model(flags))
        asked = rollout_spec(flags, model)
        shared = flags.pick("revision trust_remote_code layers")
        train = TrainSpec(model=model, adapter=asked.engine.adapter, **shared)
        spec = CheckSpec(rollout=asked, train=train, seed=flags["seed"])
    ranks = spec.nproc_per_node
    session.require_directory(flags)
    session.warn_of_key(spec.rollout)
    spec = replace(placed(replace(spec, nproc_per_node=0)), nproc_per_node=ranks)
    preflight_rollout(spec.rollout)
    run_dir = session.open_run("rollout", spec, flags)
    run_rollout(spec, run_dir, session.narrator(), session.command())
    output.say(f"Everything is in {run_dir}. Score it: mismatch score {run_dir}")
    return 0
