"""Every example in a docstring is true."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import mismatch

ROOT = Path(mismatch.__file__).parent
MODULES = [
    ".".join(("mismatch", *path.relative_to(ROOT).with_suffix("").parts))
    for path in sorted(ROOT.rglob("*.py"))
    if ">>> " in path.read_text()
]
MODULES.append("tests.texts")


@pytest.mark.parametrize("module", MODULES)
def test_examples(module: str) -> None:
    pytest.importorskip("torch", reason="engine: no torch here")
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted > 0
    assert results.failed == 0
