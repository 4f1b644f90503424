"""Plans and diagnoses for people: plain text where the output is no terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mismatch.doctor.fit import Fit
from mismatch.doctor.plan import side_passes
from mismatch.run.machine import gib

if TYPE_CHECKING:
    from rich.console import Console

    from mismatch.doctor.examine import Ability, Diagnosis
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
    out = sorted(side_passes(plan.sides) & {s.prediction.side for s in plan.sides if s.certain})
    if out and plan.fits:
        _say(console, f"left out, for want of memory: {', '.join(out)}")
    _say(console, "it fits" if plan.fits else "it does not fit: see the warnings")


def print_memory(plan: Plan, console: Console) -> None:
    """Both sides' memory on one device: every side's total, and the parts of the highest pass."""
    device = "GPU" if plan.device == "cuda" else "rank (CPU)"
    rows = [
        (f.prediction.side, gib(f.needed), gib(f.capacity), f.level, f.prediction.moment)
        for f in plan.sides
    ]
    header = ("side", "needed", "there", "", "at its highest")
    _table(console, f"memory per {device}", rows, header)
    for side in _worth_showing(plan.sides):
        parts = [(p.name, gib(p.bytes), p.formula) for p in side.prediction.highest.parts]
        reserve = side.needed - side.prediction.peak_bytes
        if reserve:
            parts.append(("the process itself", gib(reserve), "runtime, context, libraries"))
        _table(console, f"{side.prediction.side}, at its highest", parts)
    if plan.experts:
        ways = [
            (
                choice.name + (" (chosen)" if choice.chosen else ""),
                gib(choice.peak_bytes),
                f"{choice.token_bytes / 1e6:,.2f} MB",
                gib(choice.backward_bytes),
            )
            for choice in plan.experts
        ]
        titles = ("", "peak", "per token", "backward, one layer")
        _table(console, "ways to run the experts", ways, titles)


def _worth_showing(sides: Sequence[Fit]) -> list[Fit]:
    """The engine and the trainer's highest pass."""
    engine, *passes = sides
    return [engine, max(passes, key=lambda side: side.needed)] if passes else [engine]


def print_diagnosis(found: Diagnosis, console: Console) -> None:
    """Print what the doctor found; the last line says whether a check could run here."""
    _machine(found.machine, console)
    _abilities(console, "engines", found.engines)
    _abilities(console, "trainer's kernels", found.kernels)
    _abilities(console, "what can be measured here", found.measurable)
    if found.plan is not None:
        _say(console, "")
        print_memory(found.plan, console)
        _table(console, "what would run", list(found.plan.kernels.items()))
    _list(console, "warnings", found.warnings)
    _say(console, "")
    if found.ready:
        _say(console, "ready: mismatch check can run here")
        return
    _say(console, "not ready: mismatch check cannot run here")
    for problem in found.problems:
        _say(console, f"  {problem.name}: {problem.why}")
        if problem.fix:
            _say(console, f"    fix: {problem.fix}")


def _machine(machine: Machine, console: Console) -> None:
    rows = [
        ("python", machine.python),
        (
            "CPU",
            f"{machine.cores} cores, {gib(machine.ram_bytes)}, {gib(machine.ram_free_bytes)} free",
        ),
        ("shared memory", gib(machine.shm_bytes)),
        ("disk, here", f"{gib(machine.disk_free_bytes)} free"),
        ("disk, hub's cache", f"{gib(machine.cache_free_bytes)} free in {machine.cache_dir}"),
    ]
    for gpu in machine.gpus:
        rows.append(("GPU", f"{gpu.name}, {gib(gpu.memory_bytes)}, driver {gpu.driver}"))
    if not machine.gpus:
        rows.append(("GPU", "none (nvidia-smi lists none)"))
    for package in machine.packages.values():
        if package.version is not None:
            state = {True: "", False: " (cannot be imported)", None: ""}[package.works]
            rows.append((package.distribution, f"{package.version}{state}"))
    _table(console, "machine", rows)


def _abilities(console: Console, title: str, items: Sequence[Ability]) -> None:
    rows = []
    for item in items:
        remark = "; ".join(text for text in (item.why, item.fix) if text)
        rows.append((item.name, "yes" if item.possible else "no", remark))
    _table(console, title, rows)


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
