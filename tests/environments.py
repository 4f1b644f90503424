"""Interpreters of other environments: the base package's alone, and one with other versions."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.base_package import link, required
from tests.pages import ROOT


def base_python(folder: Path) -> str:
    """Make an environment that holds what the base package needs and nothing else: no torch.

    Its packages are links to those of this environment; this checkout is on its path.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for each in required():
        link(each, packages)
    (packages / "checkout.pth").write_text(f"{ROOT}\n")
    return str(folder / "bin" / "python")


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
