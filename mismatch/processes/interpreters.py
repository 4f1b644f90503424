"""Which Python an engine's process runs under, and what that needs in its environment."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from mismatch.specs import EngineSpec

OWN_ENVIRONMENTS = ("sglang",)  # engines whose pins clash with vLLM's


def interpreter_environment(python: str | None) -> dict[str, str]:
    """What another interpreter needs to find this package where it runs from a checkout."""
    root = Path(__file__).parents[2]
    if python is None or root.name in ("site-packages", "dist-packages"):
        return {}
    known = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(root), *([known] if known else [])])}


def engine_python(spec: EngineSpec) -> str:
    """The interpreter of the engine's process."""
    return own_python(spec) or sys.executable


def own_python(spec: EngineSpec) -> str | None:
    """The interpreter of an environment that holds the engine; None: this one.

    The one that was named, else that of ``.venv-sglang`` beside this environment, as
    `make env-sglang` makes it, where SGLang is asked for and not installed here.
    """
    if spec.python is not None or spec.engine not in OWN_ENVIRONMENTS or find_spec(spec.engine):
        return spec.python
    beside = Path(sys.prefix).parent / f".venv-{spec.engine}" / "bin" / "python"
    return str(beside) if beside.exists() else None
