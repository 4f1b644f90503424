"""`mismatch doctor`: what is installed here, and whether a model fits."""

from __future__ import annotations

import json

import typer

from mismatch.cli.command import with_flags
from mismatch.cli.flags import Flags, Option
from mismatch.cli.options import JSON
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, TrainSpec


@with_flags(
    Option("model", str | None, "", "Also: does it fit on both sides, offline."),
    Option("engine", str, "", "The engine that the check would use.", default="vllm"),
    JSON,
)
def doctor(flags: Flags) -> int:
    """What this machine can run, and whether a model fits.

    Engines, libraries and GPUs, and what is missing. With --model also the plan of a check with its
    defaults; `mismatch check --dry-run` plans one with any flags. Exit code 0: `mismatch check`
    could run here (for the model, if given). 2: it could not; the fix is printed.

    Examples:
    mismatch doctor
    mismatch doctor --model gpt-oss-20b
    """
    from rich.console import Console

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
