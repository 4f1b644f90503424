"""Plans for people: plain text where the output is no terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mismatch.doctor.plan import IN_FLOAT32, Plan
from mismatch.run.machine import gib

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"fits": "green", "tight": "yellow", "does not fit": "bold red"}


def print_plan(plan: Plan, console: Console) -> None:
    """Print a dry run; its second line, and the last, say whether it fits."""
    say(console, f"plan for {plan.model} on {plan.machine} (config.json: {plan.config_source})")
    fits = "it fits" if plan.fits else "it does not fit: see the warnings"
    say(console, fits if plan.sides else "memory is not predicted: see what is assumed")
    stages = [*plan.stages.items(), ("the trainer's attention", plan.attention)]
    print_table(console, "stages", stages)
    print_table(console, "tokens", [(name, f"{count:,}") for name, count in plan.tokens.items()])
    rows = [
        (f.side, gib(f.needed), gib(f.capacity), f.level, f.prediction.moment) for f in plan.sides
    ]
    device = "GPU" if plan.device == "cuda" else "rank (CPU)"
    header = ("side", "needed", "there", "", "at its highest")
    print_table(console, f"memory per {device}", rows, header)
    trainers = [fit for fit in plan.sides[1:] if not fit.side.endswith(IN_FLOAT32)]
    for fit in (*plan.sides[:1], *sorted(trainers, key=lambda fit: -fit.needed)[:1]):
        parts = {**fit.prediction.highest}
        parts["runtime, context, libraries"] = fit.needed - fit.prediction.peak_bytes
        sizes = [(name, gib(size)) for name, size in parts.items() if size]
        print_table(console, f"{fit.side}, at its highest", sizes)
    print_list(console, "assumed", plan.notes)
    print_list(console, "warnings", plan.warnings)
    say(console, "")
    out = plan.left_out()
    if out and plan.fits:
        say(console, f"left out, for want of memory: {', '.join(sorted(out))}")
    if plan.sides:
        say(console, fits)


def print_table(
    console: Console, title: str, rows: Sequence[tuple[str, ...]], header: tuple[str, ...] = ()
) -> None:
    """Print a table, if it has rows."""
    if not rows:
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=bool(header), padding=(0, 2, 0, 0))
    width = max(map(len, rows))
    for column in range(width):
        table.add_column(header[column] if header else "", no_wrap=column == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    say(console, "")
    say(console, title)
    console.print(table)


def print_list(console: Console, title: str, lines: Sequence[str]) -> None:
    if lines:
        say(console, "")
        say(console, title)
        for text in lines:
            say(console, f"- {text}")


def say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False)
