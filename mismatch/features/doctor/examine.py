"""What an environment can measure, what keeps a check from running there, and the fixes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from mismatch.codec import to_json
from mismatch.doctor.machine import Machine, inspect_machine
from mismatch.engines.known_faults import known_faults
from mismatch.engines.registry import EngineInfo, engine_info, engine_infos
from mismatch.errors import MismatchError
from mismatch.pipeline.preflight import IN_A_CLONE, TRAINER_MODULES, preflight
from mismatch.reports.plan import print_sections
from mismatch.reports.section import Section, named
from mismatch.reports.terminal import say
from mismatch.run.interpreters import WORKER_MODULES, Interpreter, look_into
from mismatch.run.machine import gib, local_gpus
from mismatch.specs import OWN_SCORER, CheckSpec, EngineSpec, RolloutSpec

IMPORT_TIMEOUT_S = 180.0
# What a training world asks of torch before it starts: that it can use the GPUs that are here.
USABLE_TORCH = (
    "import torch.distributed.fsdp, transformers\n"
    "from mismatch.training.distributed import require_usable_gpus\n"
    "require_usable_gpus()"
)
ASK_CUDA = """
import ctypes
cuda, name = ctypes.CDLL("libcuda.so.1"), ctypes.c_char_p()
code = cuda.cuInit(0)
cuda.cuGetErrorName(code, ctypes.byref(name))
print(code, (name.value or b"").decode())
"""
CUDA_FIXES = {
    "802": "start nvidia-fabricmanager, or wait until it has started",
    "803": "restart the machine: the driver was updated, and the kernel runs the old one",
    "804": "take CUDA's forward-compatibility libraries out of LD_LIBRARY_PATH",
}
TORCH = ("torch", "transformers")
FLAGS = {"engine": "--engine", "trainer": "--scorer"}


@dataclass(frozen=True, slots=True)
class Use:
    """One thing to run there.

    Attributes:
        side: "engine" or "trainer".
        name: as ``--engine`` or ``--scorer`` takes it.
        version: of the engine or framework; "": not there.
        missing: modules that its process needs and that are not there.
        faults: known faults of that version, one sentence each.
        error: last line of a failed import; "": it works, or was not tried.
    """

    side: str
    name: str
    version: str
    missing: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    error: str = ""

    @property
    def possible(self) -> bool:
        return bool(self.version) and not self.missing and not self.error

    @property
    def state(self) -> str:
        """As a table has it."""
        if not self.version:
            return "not installed"
        if self.missing:
            return f"lacks {', '.join(self.missing)}"
        return self.error or "; ".join(("can be measured", *self.faults))


@dataclass(frozen=True, slots=True)
class Problem:
    """What keeps `mismatch check` from running there; ``fix``: "" where its text has it."""

    what: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the doctor found.

    Attributes:
        machine: None where another environment was examined.
    """

    interpreter: Interpreter
    uses: tuple[Use, ...]
    problems: tuple[Problem, ...] = ()
    machine: Machine | None = None

    @property
    def ready(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {"schema": "mismatch.doctor/5", "ready": self.ready, **to_json(self)}

    def show(self, console: Console) -> None:
        """Print what was found; after it whether a check could run there, or what to do."""
        found, machine, hardware = self.interpreter, self.machine, []
        ready = f"ready: mismatch check --model MODEL --python {found.python}"
        if machine is not None:
            ready = "ready: mismatch check can run here"
            free = gib(machine.ram_free_bytes)
            hardware.append(("CPU", f"{machine.cores} cores, {free} of memory free"))
            for gpu in machine.gpus:
                text = f"{gpu.name}, {gib(gpu.memory_bytes)}, driver {gpu.driver}"
                hardware.append(("GPU", text))
        packages = [("python", ".".join(map(str, found.version))), *found.packages.items()]
        uses = [(f"{FLAGS[use.side]} {use.name}", use.version, use.state) for use in self.uses]
        print_sections(
            console,
            Section("machine", "machine", tables=[named(hardware)]),
            Section("packages", found.python, tables=[named(packages)]),
            Section("uses", "what a check can measure", tables=[named(uses)]),
        )
        say(console, "")
        if lacking := sorted({name for use in self.uses if use.version for name in use.missing}):
            say(console, f"to measure the rest: {found.python} -m pip install {' '.join(lacking)}")
        say(console, ready if self.ready else "not ready: mismatch check cannot run")
        for problem in self.problems:
            say(console, f"  {problem.what}")
            if problem.fix:
                say(console, f"    fix: {problem.fix}")


def examine(
    engine: str, machine: Machine | None = None, uses: tuple[Use, ...] | None = None
) -> Diagnosis:
    """Examine this environment and machine, or those that are described, for checks with an engine.

    Everything that is installed is loaded in a separate process: what is there may not work.
    """
    machine, found = machine or inspect_machine(), look(sys.executable)
    if uses is None:
        with ThreadPoolExecutor() as pool:
            uses = tuple(pool.map(tried, uses_of(found)))
    problems = []
    for use in uses:
        if use.error and use.name in (engine, OWN_SCORER):
            fix = IN_A_CLONE if use.side == "trainer" else engine_info(use.name).install_hint
            what = f"{FLAGS[use.side]} {use.name} {use.version} cannot be used: {use.error}"
            problems.append(Problem(what, fix))
    problems += [*_broken_driver(machine), *_missing_compiler(machine)]
    try:
        rollout, ranks = RolloutSpec(EngineSpec(engine)), local_gpus() or 2
        preflight(CheckSpec(rollout, nproc_per_node=ranks), reach=False)
    except MismatchError as error:
        problems.append(Problem(error.message, error.fix))
    return Diagnosis(found, uses, tuple(problems), machine)


def examine_environment(python: str) -> Diagnosis:
    """Examine another environment by its metadata; nothing is imported there.

    Raises:
        MismatchError: the interpreter cannot be started.
    """
    found = look(python)
    uses = uses_of(found)
    if {use.side for use in uses if use.possible} == {*FLAGS}:
        return Diagnosis(found, uses)
    what = "engine and trainer have to be in one environment for --python"
    fix = "name both: --python vllm=A/bin/python --python train=B/bin/python"
    return Diagnosis(found, uses, (Problem(what, fix),))


def engines() -> dict[str, EngineInfo]:
    """Return the engines that mismatch starts, without transformers: nobody rolls out with that."""
    infos = engine_infos().items()
    own = (None, "transformers")
    return {name: info for name, info in infos if info.started and info.module not in own}


def look(python: str) -> Interpreter:
    """Return what an environment holds of what a check could use."""
    infos = engines().values()
    modules = chain((str(info.module) for info in infos), *TRAINER_MODULES.values())
    packages = chain(TORCH, *(info.packages for info in infos), TRAINER_MODULES)
    return look_into(python, tuple(modules), tuple(packages))


def uses_of(found: Interpreter) -> tuple[Use, ...]:
    """Return every engine and trainer, whether it is there or not."""
    rows: list[tuple[str, str, str, Sequence[str], Sequence[str]]] = [
        ("engine", name, str(info.module), info.packages, WORKER_MODULES)
        for name, info in engines().items()
    ]
    for name, modules in TRAINER_MODULES.items():
        code = "torch" if name == OWN_SCORER else name
        rows.append(("trainer", name, code, (code,), modules))
    uses = []
    for side, name, module, packages, needs in rows:
        versions = [found.packages[each] for each in packages if each in found.packages]
        version = [*versions, "" if module in found.missing else "unknown"][0]
        missing = tuple(each for each in needs if each in found.missing)
        release = version.partition("+")[0]
        known = (f for f in known_faults() if f.engine == name and release in f.versions)
        uses.append(Use(side, name, version, missing, tuple(f"{f.what} ({f.link})" for f in known)))
    return tuple(uses)


def tried(use: Use) -> Use:
    """Return a use with what is wrong with its import, which may take IMPORT_TIMEOUT_S."""
    info = engines().get(use.name) if use.side == "engine" else None
    statement = USABLE_TORCH if use.name == OWN_SCORER else info and info.import_check
    if not use.version or use.missing or not statement:
        return use
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", statement],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            env=os.environ | quiet,
        )
    except subprocess.TimeoutExpired:
        return replace(use, error=f"its import did not end within {IMPORT_TIMEOUT_S:.0f} s")
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("fix: ")]  # of our own errors
    error = (lines or [f"exit code {done.returncode}"])[-1] if done.returncode else ""
    return replace(use, error=error.removeprefix("mismatch.errors.MismatchError: "))


def _broken_driver(machine: Machine) -> Iterator[Problem]:
    """Yield the error with which CUDA's driver refuses to start, though it lists GPUs."""
    if not machine.gpus:
        return
    asked = [sys.executable, "-c", ASK_CUDA]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S)
        said = done.stdout.strip() or "0"  # no libcuda: torch says what it lacks
        if done.returncode < 0:
            said = f"signal {-done.returncode}"
    except subprocess.TimeoutExpired:
        said = f"nothing within {IMPORT_TIMEOUT_S:.0f} s"
    if said.partition(" ")[0] != "0":
        fix = CUDA_FIXES.get(said.partition(" ")[0], "repair the driver: dmesg may say more")
        yield Problem(f"CUDA's driver does not start: cuInit gives {said}", fix)


def _missing_compiler(machine: Machine) -> Iterator[Problem]:
    """Yield what Triton lacks to compile its launchers with, which it does while a model runs."""
    if not machine.gpus:
        return
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        yield Problem("Triton finds no C compiler", "apt-get install gcc, or set CC")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        yield Problem("Triton finds no Python.h", "apt-get install python3-dev")
