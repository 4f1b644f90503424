"""Play CUDA's driver library on a machine without GPUs: it gives the answers of a test."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = """
int cuInit(unsigned flags) {{ return {code}; }}
int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}
int cuGetErrorName(int code, const char **name) {{ *name = "CUDA_ERROR_PLAYED"; return 0; }}
"""


def play_driver(
    place: Path, monkeypatch: pytest.MonkeyPatch, code: int, version: int = 13_000
) -> None:
    """Let processes that are started from now on find a driver whose cuInit returns ``code``."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("machine: no C compiler makes the library")
    place.mkdir(exist_ok=True)
    text = SOURCE.format(code=code, version=version)
    library = str(place / "libcuda.so.1")
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", library]
    subprocess.run(command, input=text, text=True, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(place))
