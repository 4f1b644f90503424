"""What a check can measure in the user's environment, which need not hold mismatch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mismatch.codec import to_json
from mismatch.doctor.show import print_table, say
from mismatch.engines.known_faults import known_faults
from mismatch.engines.registry import engine_infos
from mismatch.run.interpreters import WORKER_MODULES, Interpreter, look_into

if TYPE_CHECKING:
    from rich.console import Console

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
        found = to_json(self)
        return {"schema": "mismatch.environment/1", "ready": self.ready, **found}


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
    of_engines = [str(info.module) for info in engines.values()]
    packages = [package for info in engines.values() for package in info.packages]
    modules = (*WORKER_MODULES, "torch", "transformers", "accelerate", *of_engines)
    found = look_into(python, modules, ("torch", "transformers", *FRAMEWORKS, *packages))
    versions = found.packages

    def uses() -> Iterator[Use]:
        for name, info in engines.items():
            version = next((versions[p] for p in info.packages if p in versions), "")
            release = version.partition("+")[0]
            faults = tuple(
                f"{fault.what} ({fault.link})"
                for fault in known_faults()
                if fault.engine == name and release in fault.versions
            )
            yield Use("engine", name, version, lacking(WORKER_MODULES), faults)
        own = lacking((*WORKER_MODULES, "transformers", "accelerate"))
        yield Use("trainer", "fsdp", versions.get("torch", ""), own)
        for name in FRAMEWORKS:
            yield Use("trainer", name, versions.get(name, ""), lacking(("numpy", "torch")))

    def lacking(needed: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in needed if name in found.missing)

    return Environment(found, tuple(uses()))


def print_environment(environment: Environment, console: Console) -> None:
    """Print what can be measured there, and the command that does it."""
    found = environment.interpreter
    rows = [(name, version) for name, version in sorted(found.packages.items())]
    python = ".".join(map(str, found.version))
    print_table(console, found.python, [("python", python), *rows])
    flags = {"engine": "--engine", "trainer": "--scorer"}
    uses = [(f"{flags[u.side]} {u.name}", u.version, u.state) for u in environment.uses]
    print_table(console, "what a check can measure there", uses)
    lacking = sorted({name for use in environment.uses if use.version for name in use.missing})
    say(console, "")
    if lacking:
        say(console, f"to measure the rest: {found.python} -m pip install {' '.join(lacking)}")
    if environment.ready:
        say(console, f"ready: mismatch check --model MODEL --python {found.python}")
    else:
        say(console, "not ready: engine and trainer have to be in one environment for --python")
        say(console, "  fix: name both: --vllm-python A/bin/python --train-python B/bin/python")
