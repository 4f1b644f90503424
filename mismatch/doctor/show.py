"""Plans and diagnoses for people: plain text where the output is no terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mismatch.doctor.plan import side_passes
from mismatch.run.machine import gib

if TYPE_CHECKING:
    from rich.console import Console

    from mismatch.doctor.examine import Diagnosis
    from mismatch.doctor.machine import Machine
    from mismatch.doctor.plan import Plan

STYLES = {"fits": "green", "tight": "yellow", "does not fit": "bold red"}


def print_plan(plan: Plan, console: Console) -> None:
    """Print a dry run; the last line says whether it fits."""
    place = plan.gpus or plan.device
    _say(console, f"plan for {plan.model} on {place} (config.json: {plan.config_source})")
    _table(console, "stages", [(s.name, s.processes, s.work) for s in plan.stages])
    _table(console, "tokens", [(name, f"{count:,}") for name, count in plan.tokens.items()])
    _table(console, "what would run", list(plan.kernels.items()))
    print_memory(plan, console)
    _list(console, "not measured here", plan.not_measured)
    _list(console, "assumed", plan.notes)
    _list(console, "warnings", plan.warnings)
    _say(console, "")
    if plan.minutes is not None:
        fewest, most = plan.minutes
        _say(console, f"time: {fewest:.0f} to {most:.0f} minutes (estimate, never measured)")
    out = sorted(side_passes(plan.sides) & {fit.side for fit in plan.sides if fit.certain})
    if out and plan.fits:
        _say(console, f"left out, for want of memory: {', '.join(out)}")
    _say(console, "it fits" if plan.fits else "it does not fit: see the warnings")


def print_memory(plan: Plan, console: Console) -> None:
    """Both sides' memory on one device: every side's total, and the parts of the highest pass."""
    device = "GPU" if plan.device == "cuda" else "rank (CPU)"
    header = ("side", "needed", "there", "", "at its highest")
    rows = [
        (f.side, gib(f.needed), gib(f.capacity), f.level, f.prediction.moment) for f in plan.sides
    ]
    _table(console, f"memory per {device}", rows, header)
    engine, *passes = plan.sides
    for fit in (engine, *sorted(passes, key=lambda fit: -fit.needed)[:1]):
        parts = [(p.name, gib(p.bytes), p.formula) for p in fit.prediction.highest.parts]
        if reserve := fit.needed - fit.prediction.peak_bytes:
            parts.append(("the process itself", gib(reserve), "runtime, context, libraries"))
        _table(console, f"{fit.side}, at its highest", parts)
    ways = [
        (
            choice.name + (" (chosen)" if choice.chosen else ""),
            gib(choice.peak_bytes),
            f"{choice.token_bytes / 1e6:,.2f} MB",
            gib(choice.backward_bytes),
        )
        for choice in plan.experts
    ]
    if ways:
        titles = ("", "peak", "per token", "backward, one layer")
        _table(console, "ways to run the experts", ways, titles)


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print what the doctor found; the last line says whether a check could run here."""
    _table(console, "machine", _machine(diagnosis.machine))
    for title, abilities in (
        ("engines", diagnosis.engines),
        ("trainer's kernels", diagnosis.kernels),
        ("what can be measured here", diagnosis.measurable),
    ):
        rows = [
            (item.name, "yes" if item.possible else "no", "; ".join(filter(None, remarks)))
            for item in abilities
            for remarks in [(item.why, item.fix)]
        ]
        _table(console, title, rows)
    if diagnosis.plan is not None:
        _say(console, "")
        print_memory(diagnosis.plan, console)
        _table(console, "what would run", list(diagnosis.plan.kernels.items()))
    _list(console, "warnings", diagnosis.warnings)
    _say(console, "")
    if diagnosis.ready:
        _say(console, "ready: mismatch check can run here")
        return
    _say(console, "not ready: mismatch check cannot run here")
    for problem in diagnosis.problems:
        _say(console, f"  {problem.name}: {problem.why}")
        if problem.fix:
            _say(console, f"    fix: {problem.fix}")


def _machine(machine: Machine) -> list[tuple[str, str]]:
    free = gib(machine.ram_free_bytes)
    states = {True: "", False: " (cannot be imported)", None: ""}
    gpus = [f"{g.name}, {gib(g.memory_bytes)}, driver {g.driver}" for g in machine.gpus]
    installed = [package for package in machine.packages.values() if package.version is not None]
    return [
        ("python", machine.python),
        ("CPU", f"{machine.cores} cores, {gib(machine.ram_bytes)}, {free} free"),
        ("shared memory", gib(machine.shm_bytes)),
        ("disk, here", f"{gib(machine.disk_free_bytes)} free"),
        ("disk, hub's cache", f"{gib(machine.cache_free_bytes)} free in {machine.cache_dir}"),
        *(("GPU", text) for text in gpus or ["none (nvidia-smi lists none)"]),
        *((p.distribution, f"{p.version}{states[p.works]}") for p in installed),
    ]


def _table(
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
    _say(console, "")
    _say(console, title)
    console.print(table)


def _list(console: Console, title: str, lines: Sequence[str]) -> None:
    if lines:
        _say(console, "")
        _say(console, title)
        for text in lines:
            _say(console, f"- {text}")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False)
