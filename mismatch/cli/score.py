"""`mismatch score`: score the tokens of a run again, by the trainer or by another engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mismatch.cli.command import with_flags
from mismatch.cli.configuration import configured
from mismatch.cli.flags import RUN, Flags, Option
from mismatch.cli.options import (
    CONFIG,
    MODEL_FLAGS,
    PYTHON,
    ROUTING,
    SCORING_ENGINE,
    TRAIN_ADAPTER,
    TRAIN_FLAGS,
    TRUST_RUN,
    WEIGHTS,
)
from mismatch.errors import MismatchError
from mismatch.keys import Key
from mismatch.specs import TRAIN, CheckSpec

TRAIN_NAME = "fsdp"
PLAIN_NAME = r"[A-Za-z0-9][A-Za-z0-9._]*"
NAME = Option(
    "name", str | None, TRAIN, "Name of the new scoring; default: fsdp, or ENGINE:prefill."
)
# Flags that a scoring by an engine shares with one by the trainer.
ENGINE_NAMES = frozenset(option.name for option in SCORING_ENGINE)
SHARED = {"run", "model", "revision", "trust_remote_code", "name", "trust_run", "config"}
SHARED |= {"python", "weights"}


@with_flags(
    *(RUN, MODEL_FLAGS, TRAIN_ADAPTER, TRAIN_FLAGS, SCORING_ENGINE, NAME, ROUTING, TRUST_RUN),
    *(PYTHON, WEIGHTS, CONFIG),
)
def score(flags: Flags) -> int:
    """Score the tokens of a run under FSDP2, or with --engine by the prefill of another engine.

    Passes that the run already holds are not run again. The run may come from another machine:
    --model says where the checkpoint is here. Under torchrun, srun or Ray it joins the running
    process group, on any number of machines: docs/how-to/clusters.md.

    --engine NAME adds the scoring NAME:prefill; that engine need not have sampled. Then:
    mismatch compare RUN --left vllm:prefill --right sglang:prefill

    Examples:
    mismatch score runs/A --attention eager --name eager
    mismatch score runs/A --engine sglang
    """
    import re

    from mismatch.cli import session
    from mismatch.cli.to_spec import refuse_sides, train_spec, training_fields
    from mismatch.engines.registry import startable_engines
    from mismatch.models import resolve_model
    from mismatch.pipeline.commands import run_score
    from mismatch.pipeline.preflight import preflight_training
    from mismatch.processes.launched import launched
    from mismatch.run.directory import load_spec

    name = flags["name"]
    if name is not None and not re.fullmatch(PLAIN_NAME, name):
        fault = f"--name {name!r} is not a plain name"
        raise MismatchError(fault, "use letters, digits, dots, underscores")
    run: Path = flags["run"]
    stored = load_spec(run)
    model = resolve_model(flags["model"]) if flags["model"] else stored.train.model
    if Path(model).is_absolute() and not Path(model).is_dir():
        fault = f"the run's model {model} is not on this machine"
        raise MismatchError(fault, "say where it is: --model MODEL")
    if "engine" in flags.explicit:
        return _by_engine(flags, run, stored, model)
    flags.refuse(sorted(ENGINE_NAMES), "is for a scoring by an engine", "name it: --engine NAME")
    refuse_sides(flags, ("engine", *startable_engines()), "is for a scoring by an engine")
    train = train_spec(flags, model)
    adapter = train.adapter or stored.train.adapter
    train = replace(train, layers=stored.train.layers, adapter=adapter)
    if not flags["model"]:  # the run's own model, so as the run names it
        revision = flags["revision"] or stored.train.revision
        trusted = session.trusted_code(run, stored.train, flags)
        train = replace(train, revision=revision, trust_remote_code=trusted)
    spec, notes = configured(replace(stored, train=train, **training_fields(flags)), flags)
    world = launched()
    if world is not None:
        spec = replace(spec, nproc_per_node=world.size)
    ranks = spec.nproc_per_node if world is None else world.local_size
    preflight_training(spec.train, ranks, meets=world is None)
    narrator = session.narrator(silent=world is not None and world.rank > 0)
    for note in notes:
        narrator.note(note)
    run_score(spec, run, narrator, name or TRAIN_NAME, session.command(), world)
    narrator.note(f"Compare: mismatch compare {run}")
    return 0


def _by_engine(flags: Flags, run: Path, stored: CheckSpec, model: str) -> int:
    from mismatch.cli import session
    from mismatch.cli.to_spec import engine_spec, refuse_sides
    from mismatch.pipeline.commands import run_engine_score
    from mismatch.pipeline.preflight import preflight_engine

    others = sorted(flags.explicit - ENGINE_NAMES - SHARED)
    flags.refuse(others, "is for a scoring by the trainer", "drop it, or --engine")
    refuse_sides(flags, ("train", "effect"), "is for a scoring by the trainer")
    ran = stored.rollout.engine
    given = engine_spec(flags, model, flags["engine"], flags["engine_arg"])
    engine = replace(given, routing=False, layers=ran.layers, adapter=ran.adapter)
    if not flags["model"]:
        trusted = session.trusted_code(run, stored.train, flags)
        revision = flags["revision"] or ran.revision
        engine = replace(engine, revision=revision, trust_remote_code=trusted)
    preflight_engine(engine)
    narrator, name = session.narrator(), flags["name"] or Key.of(engine.engine, "prefill")
    run_engine_score(engine, run, narrator, name, session.command())
    narrator.note(
        f"Compare: mismatch compare {run} --left {Key.of(ran.engine, 'prefill')} --right {name}"
    )
    return 0
