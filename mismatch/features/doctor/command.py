"""`mismatch doctor`: what is installed here, or in another environment."""

from __future__ import annotations

import json

import typer

from mismatch.cli.command import with_flags
from mismatch.cli.flags import Flags, Option
from mismatch.cli.options import JSON


@with_flags(
    Option("engine", str, "", "The engine that a check would use.", default="vllm"),
    Option("python", str | None, "", "Inspect the environment of this interpreter instead."),
    JSON,
)
def doctor(flags: Flags) -> int:
    """Show what this machine can run: engines, libraries, GPUs, and what is missing.

    `mismatch check --model MODEL --dry-run` says whether a model fits. Exit code 0: `mismatch
    check` could run here. 2: it could not; the fix is printed. With --python: what a check can
    measure in your environment, which does not need mismatch.

    Examples:
    mismatch doctor
    mismatch doctor --engine sglang
    mismatch doctor --python ENV/bin/python
    """
    from rich.console import Console

    from mismatch.features.doctor.environment import examine_environment, print_environment
    from mismatch.features.doctor.examine import examine, print_diagnosis

    if flags["python"] is not None:
        environment = examine_environment(flags["python"])
        document, ready = environment.to_dict(), environment.ready
        if not flags["as_json"]:
            print_environment(environment, Console())
    else:
        diagnosis = examine(flags["engine"])
        document, ready = diagnosis.to_dict(), diagnosis.ready
        if not flags["as_json"]:
            print_diagnosis(diagnosis, Console())
    if flags["as_json"]:
        typer.echo(json.dumps(document, indent=2))
    return 0 if ready else 2
