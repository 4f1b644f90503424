"""`mismatch doctor`: what is installed here, or in another environment."""

from __future__ import annotations

import json

import typer

from mismatch.cli.command import with_flags
from mismatch.cli.flags import JSON, Flags, Option


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

    from mismatch.features.doctor.examine import examine, examine_environment

    python = flags["python"]
    found = examine(flags["engine"]) if python is None else examine_environment(python)
    if flags.as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        found.show(Console())
    return 0 if found.ready else 2
