"""`mismatch score`: the training side alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mismatch.cli.flags import Flags, with_flags
from mismatch.cli.options import (
    TRAIN,
    ConfigFlags,
    GradientFlags,
    ModelFlags,
    RoutingFlags,
    RunArgument,
    TrainFlags,
)
from mismatch.errors import MismatchError

PLAIN_NAME = r"[A-Za-z0-9][A-Za-z0-9._]*"


class ScoreFlags:
    name: Annotated[
        str,
        typer.Option(
            help="Of the scoring; another than fsdp is added beside it.", rich_help_panel=TRAIN
        ),
    ] = "fsdp"


@with_flags(
    RunArgument, ModelFlags, TrainFlags, ScoreFlags, RoutingFlags, GradientFlags, ConfigFlags
)
def score(flags: Flags) -> int:
    """Score the tokens of a run under FSDP2; passes that are there already are not made again.

    The run may come from another machine: --model says where the checkpoint is here.
    """
    import re

    from mismatch.cli import session
    from mismatch.cli.to_spec import gradient_fields, ranks, train_spec
    from mismatch.cli.trainer import with_trainer
    from mismatch.injections import parse_injections
    from mismatch.models import resolve_model
    from mismatch.pipeline.commands import run_score
    from mismatch.pipeline.preflight import preflight_training
    from mismatch.run.directory import load_spec

    if not re.fullmatch(PLAIN_NAME, flags["name"]):
        raise MismatchError(
            f"--name {flags['name']!r} is no plain name", "use letters, digits, dots, underscores"
        )
    run: Path = flags["run"]
    found = load_spec(run)
    model = resolve_model(flags["model"]) if flags["model"] else found.train.model
    if Path(model).is_absolute() and not Path(model).is_dir():
        raise MismatchError(
            f"the run's model {model} is not on this machine", "say where it is: --model MODEL"
        )
    train = train_spec(flags, model)
    if not flags["model"]:  # the run's own model, so as the run names it
        revision = flags["revision"] or found.train.revision
        trusted = flags["trust_remote_code"] or found.train.trust_remote_code
        train = replace(train, revision=revision, trust_remote_code=trusted)
    spec = replace(
        found,
        train=train,
        nproc_per_node=ranks(flags),
        noise_floor=flags["noise_floor"],
        two_passes=flags["two_passes"],
        inject=parse_injections(flags["inject"]),
        weights_effect=flags["weights_effect"] and flags["weights_effect"].value,
        **(gradient_fields(flags) if flags.given & session.GRADIENT_FLAGS else {}),
    )
    spec, notes = with_trainer(spec, flags)
    for note in notes:
        session.say(note)
    preflight_training(spec.train, spec.nproc_per_node)
    run_score(spec, run, session.narrator(), flags["name"], session.command())
    session.say(f"Compare: mismatch compare {run}")
    return 0
