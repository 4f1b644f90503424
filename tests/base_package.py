"""The base package as a user installs it: a wheel of this checkout, and what it requires alone.

Its requirements are links to the distributions of the tests' own environment, which takes seconds
and no network. Nothing else can be imported there: no torch, no engine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

from tests.pages import ROOT

SOURCES = ("mismatch", "pyproject.toml", "README.md", "LICENSE", "NOTICE")


def install(folder: Path) -> Path:
    """Make an environment below a folder; return the directory of its commands."""
    venv.create(folder / "base")
    commands = folder / "base" / "bin"
    (site,) = (folder / "base").glob("lib/python*/site-packages")
    for each in (distribution("pip"), *required()):
        link(each, site)
    (commands / "pip").write_text(f'#!/bin/sh\nexec "{commands}/python" -m pip "$@"\n')
    (commands / "pip").chmod(0o755)
    tree = copied(folder / "tree")
    pip(sys.executable, "wheel", str(tree), "--no-build-isolation", "--wheel-dir", str(folder))
    (wheel,) = folder.glob("*.whl")
    pip(str(commands / "python"), "install", "--no-index", "--no-compile", str(wheel))
    return commands


def copied(folder: Path) -> Path:
    """Copy what a wheel is built from: a build leaves files behind."""
    folder.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def required() -> list[Distribution]:
    """Return the distributions that the base package requires, directly or not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    asked, found = list(project["dependencies"]), dict[str, Distribution]()
    while asked:
        each = Requirement(asked.pop())
        applies = each.marker is None or each.marker.evaluate({"extra": ""})
        if applies and each.name not in found:
            found[each.name] = distribution(each.name)
            asked += found[each.name].requires or ()
    return list(found.values())


def link(one: Distribution, site: Path) -> None:
    """Link a distribution's modules and metadata into another environment."""
    for name in {path.parts[0] for path in one.files or ()} - {"..", "__pycache__"}:
        target = site / name
        if not target.exists():
            target.symlink_to(Path(str(one.locate_file(name))))


def pip(python: str, verb: str, *arguments: str) -> None:
    command = [python, "-m", "pip", verb, "--quiet", "--no-deps", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
