"""`mismatch demo`: the page of a broken run, without an engine, a model or a network."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import typer

from mismatch.cli.command import with_flags
from mismatch.cli.flags import Flags, switch
from mismatch.specs import OUTPUT

PAGE = Path(__file__).parents[1] / "reports" / "examples" / "no-sinks.html"
NO_BROWSER = switch("no_browser", OUTPUT, "Print where the page is, and open no browser.")


@with_flags(NO_BROWSER)
def demo(flags: Flags) -> int:
    """Open the report of a broken run: the trainer's attention ignored the model's sinks.

    The page ships with mismatch; nothing is run and nothing is written.

    Examples:
    mismatch demo
    """
    opened = not flags["no_browser"] and webbrowser.open(PAGE.as_uri())
    typer.echo(f"{'opened' if opened else 'open it in a browser:'} {PAGE}")
    typer.echo(
        "Yours: mismatch check --model MODEL before a run, mismatch postmortem DUMP after it."
    )
    typer.echo("A name on the page: mismatch explain NAME")
    return 0
