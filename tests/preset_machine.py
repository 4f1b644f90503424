"""The machine that a framework's settings are followed on."""

import pytest

from mismatch.engines.vllm import arguments
from mismatch.features.presets import apply


def be_on(monkeypatch: pytest.MonkeyPatch, *, flash: bool = True, cpu_engine: bool = False) -> None:
    """Have flash_attn installed or not, and vLLM's CPU build or another."""
    monkeypatch.setattr(apply, "find_spec", lambda name: flash or None)
    monkeypatch.setattr(arguments, "is_cpu_build", lambda python: cpu_engine)
