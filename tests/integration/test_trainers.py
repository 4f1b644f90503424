"""Frameworks' own trainer code against float32, in environments that the user names.

Set ``MISMATCH_VERL_PYTHON`` and ``MISMATCH_TRL_PYTHON`` to interpreters that hold verl 0.9 and TRL.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .conftest import run_check

pytestmark = [pytest.mark.slow, pytest.mark.grid]


def python_of(framework: str) -> str:
    """Return the interpreter, or skip."""
    name = f"MISMATCH_{framework.upper()}_PYTHON"
    if name not in os.environ:
        pytest.skip(f"client: {framework}: name an interpreter that has it: {name}")
    return os.environ[name]


def flags_for(framework: str) -> list[str]:
    return ["--num-prompts", "8", "--scorer", framework, "--train-python", python_of(framework)]


def test_verls_packed_rows_of_gpt_oss_see_each_other(tmp_path: Path) -> None:
    run = run_check(tmp_path / "run", *flags_for("verl"))
    assert run.report["verdict"]["status"] == "broken"
    (cause, *_) = run.report["causes"]["ranked"]
    assert (cause["id"], cause["side"], cause["status"]) == ("packing-leak", "trainer", "confirmed")


def test_trls_own_code_rounds_and_nothing_more(tmp_path: Path) -> None:
    run = run_check(tmp_path / "run", *flags_for("trl"))
    assert run.report["verdict"]["status"] in ("healthy", "tolerable")
    assert run.report["causes"]["ranked"] == []
