"""`mismatch score`: the training side alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mismatch.cli.command import with_flags
from mismatch.cli.flags import Flags, Option, spec_values
from mismatch.cli.options import (
    CONFIG,
    GRADIENT_FLAGS,
    MODEL_FLAGS,
    ROUTING,
    RUN,
    TRAIN_FLAGS,
    TRUST_RUN,
)
from mismatch.errors import MismatchError
from mismatch.specs import TRAIN

PLAIN_NAME = r"[A-Za-z0-9][A-Za-z0-9._]*"
NAME = Option(
    "name", str, TRAIN, "Of the scoring; another than fsdp is added beside it.", default="fsdp"
)


@with_flags(RUN, MODEL_FLAGS, TRAIN_FLAGS, NAME, ROUTING, GRADIENT_FLAGS, TRUST_RUN, CONFIG)
def score(flags: Flags) -> int:
    """Score the tokens of a run under FSDP2.

    Passes that the run holds already are not run again. The run may come from another machine:
    --model says where the checkpoint is here. Under torchrun, srun or Ray it joins the world that
    is there, over any number of machines: docs/clusters.md.
    """
    import re

    from mismatch.cli import session
    from mismatch.cli.to_spec import GRADIENT_FIELDS, train_spec, training_fields, with_trainer
    from mismatch.models import resolve_model
    from mismatch.pipeline.commands import run_score
    from mismatch.pipeline.preflight import preflight_training
    from mismatch.processes.launched import launched
    from mismatch.run.directory import load_spec
    from mismatch.specs import CheckSpec

    if not re.fullmatch(PLAIN_NAME, flags["name"]):
        raise MismatchError(
            f"--name {flags['name']!r} is no plain name", "use letters, digits, dots, underscores"
        )
    run: Path = flags["run"]
    stored = load_spec(run)
    model = resolve_model(flags["model"]) if flags["model"] else stored.train.model
    if Path(model).is_absolute() and not Path(model).is_dir():
        raise MismatchError(
            f"the run's model {model} is not on this machine", "say where it is: --model MODEL"
        )
    train = train_spec(flags, model)
    if not flags["model"]:  # the run's own model, so as the run names it
        revision = flags["revision"] or stored.train.revision
        trusted = session.trusted_code(run, stored.train, flags)
        train = replace(train, revision=revision, trust_remote_code=trusted)
    asks_gradients = flags.explicit & set(GRADIENT_FIELDS.split())
    spec = replace(
        stored,
        train=train,
        **training_fields(flags),
        **(spec_values(CheckSpec, flags, GRADIENT_FIELDS) if asks_gradients else {}),
    )
    spec, notes = with_trainer(spec, flags)
    world = launched()
    if world is not None:
        spec = replace(spec, nproc_per_node=world.size)
    ranks = spec.nproc_per_node if world is None else world.local_size
    preflight_training(spec.train, ranks, meets=world is None)
    narrator = session.narrator(silent=world is not None and world.rank > 0)
    for note in notes:
        narrator.note(note)
    run_score(spec, run, narrator, flags["name"], session.command(), world)
    narrator.note(f"Compare: mismatch compare {run}")
    return 0
