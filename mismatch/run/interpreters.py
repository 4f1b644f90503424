"""What another interpreter's environment holds, read from its metadata; nothing is imported there.

A worker runs in that environment without mismatch being installed in it: it finds the package by
its path (mismatch/processes/launch.py).
"""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from mismatch.errors import MismatchError

LEAST = (3, 10)
# What our own workers import; those of trainer adapters import numpy alone.
WORKER_MODULES = ("numpy", "pyarrow", "safetensors", "psutil")
_PROBE = """
import importlib.metadata as m, importlib.util as u, json, sys
modules, packages = json.loads(sys.argv[1])
versions = {}
for name in packages:
    try:
        versions[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
missing = []
for name in modules:
    try:
        found = u.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it is in
        found = False
    if not found:
        missing.append(name)
print(json.dumps([list(sys.version_info[:3]), versions, missing]))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An environment.

    Attributes:
        version: of Python.
        packages: distribution -> version, of those that were asked for and are there.
        missing: modules that were asked for and are not there.
    """

    python: str
    version: tuple[int, int, int]
    packages: dict[str, str]
    missing: tuple[str, ...]


@lru_cache
def look_into(
    python: str, modules: tuple[str, ...] = (), packages: tuple[str, ...] = ()
) -> Interpreter:
    """Return what an interpreter's environment holds.

    Raises:
        MismatchError: it cannot be started, fails, or is too old.
    """
    try:
        done = subprocess.run(
            [python, "-c", _PROBE, json.dumps([modules, packages])],
            env=os.environ | {"PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        fault = f"{python} cannot be started: {getattr(error, 'strerror', error)}"
        fix = "give the path of an interpreter, such as ENV/bin/python"
        raise MismatchError(fault, fix) from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        least = ".".join(map(str, LEAST))
        raise MismatchError(f"{python} fails: {last}", f"give a working Python of {least} or newer")
    version, versions, missing = json.loads(done.stdout.strip().splitlines()[-1])
    return Interpreter(python, tuple(version), versions, tuple(missing))


def require_modules(python: str, flag: str, modules: tuple[str, ...], who: str) -> None:
    """Check that an interpreter's environment holds these modules.

    Args:
        flag: that names the interpreter.
        who: what runs there.

    Raises:
        MismatchError: as :func:`look_into`, or a module is missing.
    """
    try:
        found = look_into(python, modules)
    except MismatchError as error:
        raise MismatchError(f"{flag}: {error.message}", error.fix) from error
    if found.missing:
        fault = f"{flag}: {python} has no {', '.join(found.missing)}, which {who} needs"
        fix = f"{python} -m pip install {' '.join(found.missing)}, or name the right environment"
        raise MismatchError(fault, fix)


def source_files(package: str, python: str | None, *patterns: str) -> list[Path]:
    """Return source files of a package that importing would take long; [] where it is not.

    Args:
        python: interpreter of the environment that holds it; None: this interpreter.
        patterns: of files below the package.
    """
    code = f"import importlib.util as u; s = u.find_spec({package!r}); print(s.origin if s else '')"
    origin: str | None = None
    if python is None:
        found = find_spec(package)
        origin = found.origin if found else None
    else:
        with suppress(OSError):  # no interpreter: the preflight says so
            run = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True)
            origin = run.stdout.strip()
    folder = Path(origin or "none/there").parent
    return [path for each in patterns for path in folder.glob(each)]
