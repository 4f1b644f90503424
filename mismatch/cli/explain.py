"""`mismatch explain`: what a name means, its levels, and what to do."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import typer

from mismatch.cli.command import with_flags
from mismatch.cli.flags import JSON, Flags, Option

SCHEMA = "mismatch.explain/1"
NAME = Option("name", str | None, "", "A name; without one, all are listed.", argument=True)


@with_flags(NAME, JSON)
def explain(flags: Flags) -> int:
    """Say what a metric, check, cause, fix or word of a report means, and what to do about it.

    Names on the dashboards of frameworks are known too. Nothing is loaded, and no network is used.

    Examples:
    mismatch explain k3_kl
    mismatch explain training/rollout_probs_diff_mean
    """
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from mismatch.reports.meanings import meanings_of, names

    found = meanings_of(flags["name"]) if flags["name"] else []
    if flags.as_json:
        document: dict[str, Any] = {"schema": SCHEMA, "meanings": [asdict(each) for each in found]}
        document |= {} if flags["name"] else {"names": names()}
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return 0
    console = Console()
    shown = [(f"{each.kind} {each.name}", each.facts) for each in found]
    if not flags["name"]:
        shown = [("names", {kind: ", ".join(held) for kind, held in names().items()})]
    for title, facts in shown:
        console.print(Text(title, "bold"))
        for heading, text in facts.items():
            console.print(Padding(Text.assemble((f"{heading}: ", "dim"), text), (0, 0, 0, 2)))
    return 0
