"""A dry run for people: what would run, on how many tokens, in how much memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mismatch.doctor.fit import Fit
from mismatch.doctor.plan import IN_FLOAT32, Plan
from mismatch.reports.formatting import plural, seconds, text
from mismatch.reports.section import Cell, Column, Section, Table, Tone, named
from mismatch.reports.terminal import print_section, say
from mismatch.run.machine import gib

if TYPE_CHECKING:
    from rich.console import Console

LEVELS: dict[str, Tone] = {"fits": "healthy", "tight": "warn", "does not fit": "critical"}
MEMORY = ("side", "needed", "there", "", "at its highest")


def print_plan(plan: Plan, console: Console, more: Iterable[Section] = ()) -> None:
    """Print a dry run; its first line, and the last, say whether it fits, the first how long.

    Args:
        more: what features say of it.
    """
    total = plural(math.ceil(plan.time.seconds / 60), "minute")
    fits = "it fits" if plan.fits else "it does not fit: see the warnings"
    first = f"{fits}, about {total}" if plan.time.stages and plan.fits else fits
    out = plan.left_out()
    if out and plan.fits:
        lacking = ", ".join(sorted(out))
        first += f"; at best {plan.best_verdict} on this machine, which has no room for {lacking}"
    elif plan.best_verdict:
        first += f"; the memory allows {plan.best_verdict}"
    if plan.float32_layers:
        first += f", with the function checked on the first {plan.float32_layers} layers alone"
    unknown = f"cannot plan memory and time: {'; '.join(plan.notes[-1:])}"
    say(console, first if plan.sides else unknown)
    say(console, f"plan for {plan.model} on {plan.machine} (config.json: {plan.config_source})")
    stages = [*plan.stages.items(), ("the trainer's attention", plan.attention)]
    tokens = [(name, f"{count:,}") for name, count in plan.tokens.items()]
    device = "GPU" if plan.device == "cuda" else "rank (CPU)"
    times = [(name, seconds(spent)) for name, spent in plan.time.stages.items()]
    memory = memory_table((fit.side, fit) for fit in plan.sides)
    trainers = [fit for fit in plan.sides[1:] if not fit.side.endswith(IN_FLOAT32)]
    largest = (*plan.sides[:1], *sorted(trainers, key=lambda fit: -fit.needed)[:1])
    print_sections(
        console,
        Section("stages", "stages", tables=[named(stages)]),
        Section("tokens", "tokens", tables=[named(tokens)]),
        Section("time", f"about {total}", tables=[named(times)] if times else ()),
        Section("memory", f"memory per {device}", tables=[memory]),
        *(Section(fit.side, f"{fit.side}, at its highest", tables=[parts(fit)]) for fit in largest),
        Section("assumed", "assumed", notes=(*plan.notes, *plan.time.notes)),
        *more,
        Section("warnings", "warnings", warnings=plan.warnings),
    )
    say(console, "")
    if out and plan.fits:
        say(console, f"left out, for want of memory: {', '.join(sorted(out))}")
    if plan.cheaper:
        say(console, f"settings with more room: {plan.cheaper}")
    if plan.sides:
        say(console, fits)


def memory_table(sides: Iterable[tuple[str, Fit]]) -> Table:
    """Return what each side needs and has, under the name it is given here."""
    rows = [
        (
            *(name, gib(fit.needed), gib(fit.capacity)),
            *(Cell(fit.level, LEVELS[fit.level]), fit.prediction.moment),
        )
        for name, fit in sides
    ]
    return Table(tuple(Column(title, text) for title in MEMORY), rows)


def parts(fit: Fit) -> Table:
    """Return what a side's memory holds at its highest moment."""
    runtime = {"runtime, context, libraries": fit.needed - fit.prediction.peak_bytes}
    sizes = fit.prediction.highest | runtime
    return named((name, gib(size)) for name, size in sizes.items() if size)


def print_sections(console: Console, *sections: Section) -> None:
    """Print those that hold anything."""
    for section in sections:
        if section.holds:
            print_section(section, console)
