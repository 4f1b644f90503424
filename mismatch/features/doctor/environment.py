"""What a check can measure in the user's environment, which need not hold mismatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from mismatch.codec import to_json
from mismatch.engines.known_faults import known_faults
from mismatch.engines.registry import engine_infos
from mismatch.reports.plan import print_sections
from mismatch.reports.section import Section, named
from mismatch.reports.terminal import say
from mismatch.run.interpreters import WORKER_MODULES, Interpreter, look_into

FRAMEWORKS = ("verl", "trl")


@dataclass(frozen=True, slots=True)
class Use:
    """One thing to run there.

    Attributes:
        side: "engine" or "trainer".
        name: as ``--engine`` or ``--scorer`` takes it.
        version: of the engine or framework; "": not there.
        missing: modules that its process needs and that are not there.
        faults: known faults of that version, one sentence each.
    """

    side: str
    name: str
    version: str
    missing: tuple[str, ...]
    faults: tuple[str, ...] = ()

    @property
    def possible(self) -> bool:
        return bool(self.version) and not self.missing

    @property
    def state(self) -> str:
        """As a table has it."""
        if not self.version:
            return "not there"
        if self.missing:
            return f"lacks {', '.join(self.missing)}"
        return "; ".join(("can be measured", *self.faults))


@dataclass(frozen=True, slots=True)
class Environment:
    """What an interpreter's environment can run."""

    interpreter: Interpreter
    uses: tuple[Use, ...]

    @property
    def ready(self) -> bool:
        """Whether both sides of a check can run there."""
        return {use.side for use in self.uses if use.possible} == {"engine", "trainer"}

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {"schema": "mismatch.environment/1", "ready": self.ready, **to_json(self)}

    def show(self, console: Console) -> None:
        """Print what can be measured there, and the command that does it."""
        found = self.interpreter
        python = ("python", ".".join(map(str, found.version)))
        flags = {"engine": "--engine", "trainer": "--scorer"}
        uses = [(f"{flags[u.side]} {u.name}", u.version, u.state) for u in self.uses]
        print_sections(
            console,
            Section("packages", found.python, tables=[named([python, *found.packages.items()])]),
            Section("uses", "what a check can measure there", tables=[named(uses)]),
        )
        lacking = sorted({name for use in self.uses if use.version for name in use.missing})
        say(console, "")
        if lacking:
            say(console, f"to measure the rest: {found.python} -m pip install {' '.join(lacking)}")
        if self.ready:
            say(console, f"ready: mismatch check --model MODEL --python {found.python}")
        else:
            say(console, "not ready: engine and trainer have to be in one environment for --python")
            say(console, "  fix: name both: --vllm-python A/bin/python --train-python B/bin/python")


def examine_environment(python: str) -> Environment:
    """Return what a check can measure there, without importing anything from it.

    Raises:
        MismatchError: the interpreter cannot be started.
    """
    engines = {
        name: info
        for name, info in engine_infos().items()
        if info.started and info.module not in (None, "transformers")  # no engine of a rollout
    }
    packages = [package for info in engines.values() for package in info.packages]
    fsdp = (*WORKER_MODULES, "transformers", "accelerate")
    found = look_into(python, (*fsdp, "torch"), ("torch", "transformers", *FRAMEWORKS, *packages))

    def use(side: str, name: str, packages: Sequence[str], modules: Sequence[str]) -> Use:
        version = next((found.packages[p] for p in packages if p in found.packages), "")
        missing = tuple(module for module in modules if module in found.missing)
        release = version.partition("+")[0]
        known = (f for f in known_faults() if f.engine == name and release in f.versions)
        return Use(side, name, version, missing, tuple(f"{f.what} ({f.link})" for f in known))

    uses = [use("engine", name, info.packages, WORKER_MODULES) for name, info in engines.items()]
    uses.append(use("trainer", "fsdp", ["torch"], fsdp))
    uses += [use("trainer", name, [name], ("numpy", "torch")) for name in FRAMEWORKS]
    return Environment(found, tuple(uses))
