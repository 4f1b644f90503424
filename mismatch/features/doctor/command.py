"""`mismatch doctor`: what is installed here, and whether a model fits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from mismatch.cli.command import with_flags
from mismatch.cli.flags import Flags, Option
from mismatch.cli.options import JSON
from mismatch.errors import MismatchError
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, TrainSpec

if TYPE_CHECKING:
    from rich.console import Console


@with_flags(
    Option("model", str | None, "", "Also plan a check of this model, offline."),
    Option("engine", str, "", "The engine that the check would use.", default="vllm"),
    Option("python", str | None, "", "Inspect the environment of this interpreter instead."),
    JSON,
)
def doctor(flags: Flags) -> int:
    """Show what this machine can run, and whether a model fits.

    Engines, libraries and GPUs, and what is missing. With --model also the plan of a check with its
    defaults; `mismatch check --dry-run` plans one with any flags. Exit code 0: `mismatch check`
    could run here (for the model, if given). 2: it could not; the fix is printed. With --python:
    what a check can measure in your environment, which does not need mismatch.

    Examples:
    mismatch doctor
    mismatch doctor --model gpt-oss-20b
    mismatch doctor --python ENV/bin/python
    """
    from rich.console import Console

    if flags["python"] is not None:
        return look_into_environment(flags, Console())
    from mismatch.features.doctor.examine import examine, print_diagnosis
    from mismatch.models import resolve_model
    from mismatch.run.machine import local_gpus

    model = "" if flags["model"] is None else resolve_model(flags["model"])
    spec = CheckSpec(
        rollout=RolloutSpec(engine=EngineSpec(engine=flags["engine"], model=model)),
        train=TrainSpec(model=model),
        nproc_per_node=local_gpus() or 2,
    )
    diagnosis = examine(spec)
    if flags["as_json"]:
        typer.echo(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        print_diagnosis(diagnosis, Console())
    return 0 if diagnosis.ready else 2


def look_into_environment(flags: Flags, console: Console) -> int:
    """Say what can be measured in another environment; the exit code.

    Raises:
        MismatchError: its interpreter cannot be started, or a model was named too.
    """
    from mismatch.features.doctor.environment import examine_environment, print_environment

    if flags["model"] is not None:
        fault = "--python and --model: an environment is examined without a model"
        raise MismatchError(fault, "mismatch check --model MODEL --python PATH --dry-run")
    environment = examine_environment(flags["python"])
    if flags["as_json"]:
        typer.echo(json.dumps(environment.to_dict(), indent=2))
    else:
        print_environment(environment, console)
    return 0 if environment.ready else 2
