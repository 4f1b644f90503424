"""What keeps a check from running on this machine, and what to install."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mismatch.codec import to_json
from mismatch.doctor.machine import Machine, inspect_machine
from mismatch.doctor.memory import BYTES
from mismatch.doctor.plan import Plan, plan, refused
from mismatch.doctor.show import print_plan, print_table, say
from mismatch.engines.registry import engine_info
from mismatch.errors import MismatchError
from mismatch.features.doctor.packages import Package, packages
from mismatch.models.config import find_config
from mismatch.models.sizes import UnknownSize, sized
from mismatch.pipeline.preflight import IN_A_CLONE, preflight
from mismatch.run.hub import cache_folder, offline
from mismatch.run.machine import gib
from mismatch.specs import CheckSpec

if TYPE_CHECKING:
    from rich.console import Console

TRAINER = ("torch", "transformers")


@dataclass(frozen=True, slots=True)
class Problem:
    """What keeps `mismatch check` from running here; ``fix``: "" where its text has it."""

    what: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the doctor found; ``plan`` is that of the model that was asked about."""

    machine: Machine
    packages: dict[str, Package]
    problems: tuple[Problem, ...]
    plan: Plan | None

    @property
    def ready(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {"schema": "mismatch.doctor/3", "ready": self.ready, **to_json(self)}


def examine(
    spec: CheckSpec, machine: Machine | None = None, installed: dict[str, Package] | None = None
) -> Diagnosis:
    """Examine this machine, or one that is described, for a check; plan it if it names a model."""
    machine, installed = machine or inspect_machine(), installed or packages()
    problems, planned = [], None
    for name, package in installed.items():
        if package.error and name in (spec.rollout.engine.engine, *TRAINER):
            fix = IN_A_CLONE if name in TRAINER else engine_info(name).install_hint
            what = f"{package.distribution} {package.version} cannot be used: {package.error}"
            problems.append(Problem(what, fix))
    try:
        preflight(spec, reach=False)
        if spec.train.model:
            planned = plan(spec, machine)
            problems += [Problem(fit.warnings[0]) for fit in refused(planned.sides)]
            problems += _missing_weights(spec)
    except MismatchError as error:
        problems.append(Problem(error.message, error.fix))
    return Diagnosis(machine, installed, tuple(problems), planned)


def _missing_weights(spec: CheckSpec) -> Iterator[Problem]:
    """Weights that are not here and cannot be fetched, as far as their size is known."""
    config, cache = find_config(spec.train.model, spec.train.revision), cache_folder()
    if config.weights is not None:
        return
    try:
        size = sized(config).stored_bytes(BYTES[spec.rollout.engine.dtype], keeps_mxfp4=True)
    except UnknownSize:
        return
    need = f"{size / 1e9:.0f} GB of weights are not on this machine"
    free = shutil.disk_usage(next(at for at in (cache, *cache.parents) if at.exists())).free
    if offline():
        yield Problem(f"{need}, and HF_HUB_OFFLINE is set", "unset it, or --model DIR")
    elif size > free:
        what = f"{need}, and {cache} has {free / 1e9:.0f} GB free"
        yield Problem(what, "set HF_HOME to a larger disk, or --model DIR")


def print_diagnosis(found: Diagnosis, console: Console) -> None:
    """Print what the doctor found; the last line says whether a check could run here."""
    machine = found.machine
    rows = [("CPU", f"{machine.cores} cores, {gib(machine.ram_free_bytes)} of memory free")]
    rows += [("GPU", f"{g.name}, {gib(g.memory_bytes)}, driver {g.driver}") for g in machine.gpus]
    print_table(console, "machine", rows)
    states = [(each.name, each.version or "", each.state) for each in found.packages.values()]
    print_table(console, "packages", states)
    say(console, "")
    if found.plan is not None:
        print_plan(found.plan, console)
        say(console, "")
    if found.ready:
        say(console, "ready: mismatch check can run here")
        return
    say(console, "not ready: mismatch check cannot run here")
    for problem in found.problems:
        say(console, f"  {problem.what}")
        if problem.fix:
            say(console, f"    fix: {problem.fix}")
