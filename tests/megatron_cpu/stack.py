"""Where Megatron-Core is, and the environment of processes that run it on a CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / ".megatron"
HOOK = Path(__file__).with_name("hook")


def environment() -> dict[str, str]:
    """Return the variables of a command whose trainer is Megatron-Core on this CPU; skip where the
    package is not there."""
    if not (PACKAGE / "megatron" / "core").is_dir():
        pytest.skip("client: Megatron-Core 0.16.1; make env-tests installs it in .megatron")
    parts = [str(HOOK), str(PACKAGE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(part for part in parts if part)}
