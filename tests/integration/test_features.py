"""The core runs without any feature: their folders can be deleted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mismatch
from mismatch.plugins import Feature, built_in, load
from tests.conftest import grid

PACKAGE = Path(mismatch.__file__).parent
EXAMPLE = PACKAGE.parent / "examples" / "tiny-gpt-oss-no-sinks"
FEATURES = [feature.name for feature in built_in()]
TINY = (
    *("--model", "tiny-gpt-oss", "--engine", "transformers", "--num-prompts", "4"),
    *(
        "--samples-per-prompt",
        "2",
        "--max-tokens",
        "8",
        "--nproc-per-node",
        "1",
        "--depth",
        "quick",
    ),
)


def without(place: Path, *features: str) -> dict[str, str]:
    """Copy the package without some features; return the environment that finds the copy."""
    skipped = shutil.ignore_patterns("__pycache__")
    copy = shutil.copytree(PACKAGE, place / "mismatch", ignore=skipped)
    for name in features:
        shutil.rmtree(copy / "features" / name)
    return {**os.environ, "PYTHONPATH": str(place)}


def run(env: dict[str, str], place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mismatch", *arguments]
    return subprocess.run(command, env=env, cwd=place, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.grid
def test_a_check_runs_without_any_feature(tmp_path: Path) -> None:
    env = without(tmp_path, *FEATURES)
    done = run(env, tmp_path, "check", *TINY, "--out", "run")
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert done.returncode == report["headline"]["exit_code"]
    assert report["comparisons"][0]["metrics"]["k3_kl"]["value"] > 0
    again = run(env, tmp_path, "compare", "run")
    assert again.returncode == done.returncode, again.stderr


@pytest.mark.parametrize("feature", built_in(), ids=lambda feature: feature.name)
def test_a_feature_takes_its_commands_and_flags_with_it(feature: Feature, tmp_path: Path) -> None:
    env = without(tmp_path, feature.name)
    listed = {line.split()[0] for line in run(env, tmp_path, "--help").stdout.splitlines() if line}
    assert "check" in listed
    for command in feature.commands:
        refused = run(env, tmp_path, command.name)
        assert command.name not in listed
        assert (refused.returncode, "No such command" in refused.stderr) == (2, True)
    if feature.check_flags:
        flags: Any = load(feature.check_flags)
        shown = run(env, tmp_path, "check", "--help-all").stdout
        assert not [flag for flag in flags if f"--{flag.name}" in shown]


GONE = grid([*([name] for name in FEATURES), FEATURES], FEATURES)


@pytest.mark.parametrize("gone", GONE, ids="-".join)
def test_a_stored_report_and_a_plan_need_no_feature(gone: list[str], tmp_path: Path) -> None:
    env = without(tmp_path, *gone)
    stored = shutil.copytree(EXAMPLE, tmp_path / "stored")  # its report holds results of features
    (stored / "report.html").unlink()
    shown = run(env, tmp_path, "report", str(stored))
    assert shown.returncode in (0, 1), shown.stderr
    assert (stored / "report.html").exists()
    if gone == FEATURES:
        plan = run(
            env, tmp_path, "check", "--model", "tiny-gpt-oss", "--depth", "quick", "--dry-run"
        )
        assert plan.returncode == 0, plan.stderr
