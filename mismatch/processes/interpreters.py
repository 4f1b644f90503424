"""Which Python an engine's process runs under, and what that needs in its environment."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from mismatch.engines.registry import engine_info
from mismatch.specs import EngineSpec

ROOT = Path(__file__).parents[2]


def package_path() -> dict[str, str]:
    """What a worker needs to find this package where only the working directory holds it."""
    return {} if str(ROOT) in sys.path[1:] else interpreter_environment(sys.executable)


def interpreter_environment(python: str | None) -> dict[str, str]:
    """What another interpreter needs to find this package where it runs from a checkout."""
    if python is None or ROOT.name in ("site-packages", "dist-packages"):
        return {}
    known = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *([known] if known else [])])}


def engine_python(spec: EngineSpec) -> str:
    """The interpreter of the engine's process."""
    return own_python(spec) or sys.executable


def own_python(spec: EngineSpec) -> str | None:
    """The interpreter of an environment that holds the engine; None: this one.

    The one that was named, else that of ``.venv-NAME`` beside this environment, as
    `make env-sglang` makes it, for an engine that declares so and is not installed here.
    """
    info = engine_info(spec.engine)
    here = info.module is None or find_spec(info.module) is not None
    if spec.python is not None or here or not info.own_environment:
        return spec.python
    beside = Path(sys.prefix).parent / f".venv-{spec.engine}" / "bin" / "python"
    return str(beside) if beside.exists() else None
