"""Plans for people: plain text where the output is no terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mismatch.doctor.plan import Plan, side_passes
from mismatch.run.machine import gib

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"fits": "green", "tight": "yellow", "does not fit": "bold red"}


def print_plan(plan: Plan, console: Console) -> None:
    """Print a dry run; the last line says whether it fits."""
    machine = plan.gpus or plan.device
    say(console, f"plan for {plan.model} on {machine} (config.json: {plan.config_source})")
    print_table(console, "stages", list(plan.stages.items()))
    print_table(console, "tokens", [(name, f"{count:,}") for name, count in plan.tokens.items()])
    print_table(console, "what would run", list(plan.kernels.items()))
    print_memory(plan, console)
    print_list(console, "not measured here", plan.not_measured)
    print_list(console, "assumed", plan.notes)
    print_list(console, "warnings", plan.warnings)
    say(console, "")
    out = sorted(side_passes(plan.sides) & {fit.side for fit in plan.sides if fit.certain})
    if out and plan.fits:
        say(console, f"left out, for want of memory: {', '.join(out)}")
    unknown = "memory is not predicted: see what is assumed"
    fits = "it fits" if plan.fits else "it does not fit: see the warnings"
    say(console, fits if plan.sides else unknown)


def print_memory(plan: Plan, console: Console) -> None:
    """Both sides' memory on one device: every side's total, and the parts of the highest pass."""
    if not plan.sides:
        return
    device = "GPU" if plan.device == "cuda" else "rank (CPU)"
    header = ("side", "needed", "there", "", "at its highest")
    rows = [
        (f.side, gib(f.needed), gib(f.capacity), f.level, f.prediction.moment) for f in plan.sides
    ]
    print_table(console, f"memory per {device}", rows, header)
    engine, *passes = plan.sides
    for fit in (engine, *sorted(passes, key=lambda fit: -fit.needed)[:1]):
        parts = [(name, gib(size)) for name, size in fit.prediction.highest.items()]
        if reserve := fit.needed - fit.prediction.peak_bytes:
            parts.append(("runtime, context, libraries", gib(reserve)))
        print_table(console, f"{fit.side}, at its highest", parts)


def print_table(
    console: Console, title: str, rows: Sequence[tuple[str, ...]], header: tuple[str, ...] = ()
) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=bool(header), padding=(0, 2, 0, 0))
    width = max((len(row) for row in rows), default=1)
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
