"""Interpreters of other environments: the base package's alone, and one with other versions."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAME = re.compile(r"[A-Za-z0-9._-]+")


def base_python(folder: Path) -> str:
    """Make an environment that holds what the base package needs and nothing else: no torch.

    Its packages are links to those of this environment; this checkout is on its path.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in needed():
        for file in distribution(name).files or ():
            top, link = file.parts[0], packages / file.parts[0]
            if top not in ("..", "__pycache__") and not link.exists():
                link.symlink_to(Path(str(distribution(name).locate_file(top))))
    (packages / "checkout.pth").write_text(f"{ROOT}\n")
    return str(folder / "bin" / "python")


def needed() -> set[str]:
    """Return the distributions that the base package needs, and those that they need."""
    found: set[str] = set()
    wanted = ["train-infer-mismatch"]
    while wanted:
        requires = distribution(wanted.pop()).requires or ()
        for requirement in (each for each in requires if "extra ==" not in each):
            match = NAME.match(requirement)
            assert match is not None
            name = match[0].lower().replace("_", "-")
            try:
                distribution(name)
            except PackageNotFoundError:  # for another platform or Python
                continue
            if name not in found:
                found.add(name)
                wanted.append(name)
    return found


class Environment:
    """An interpreter whose environment is this one, but for the version that it gives of torch."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.packages, python = folder / "packages", folder / "python"
        python.write_text(
            f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{self.packages}" exec {sys.executable} "$@"\n'
        )
        python.chmod(0o755)
        self.python = str(python)

    def install(self, package: str, version: str) -> None:
        """Let it say that it holds this version."""
        shutil.rmtree(self.packages, ignore_errors=True)
        folder = self.packages / f"{package}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
