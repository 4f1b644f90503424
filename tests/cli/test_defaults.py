"""Defaults of flags out of the environment and of pyproject.toml, and short flags."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from mismatch.cli.command import project_config, with_flags
from mismatch.cli.flags import NO_VARIABLE, VARIABLE, Flags, switch
from mismatch.cli.options import CHECK, CONFIG
from mismatch.errors import MismatchError
from mismatch.specs import OUTPUT
from tests.command import mismatch

ROOT = Path(__file__).parents[2]
NUMBER = tuple(option for option in CHECK if option.name == "num_prompts")
OTHERS = (
    "CACHE",
    "API_KEY",
    "STALL_S",
    "WATCH_DIR",
    "WATCH_EVERY",
    "WATCH_ROWS",
    "WORKER",
    "PLANT",
)


def number_of(*arguments: str, **env: str) -> int | None:
    """Return --num-prompts as a command of this one flag reads it."""
    seen: list[Any] = []

    def verb(flags: Flags) -> int:
        seen.append(flags["num_prompts"])
        return 0

    app = typer.Typer()
    app.command()(with_flags(NUMBER, CONFIG)(verb))
    done = CliRunner().invoke(app, arguments, env=env, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    number: int | None = seen[0]
    return number


def test_the_command_line_wins_then_the_environment_then_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert number_of() is None
    (tmp_path / "pyproject.toml").write_text("[tool.mismatch]\nnum-prompts = 3\n")
    (tmp_path / "own.toml").write_text("num-prompts = 4\n")
    assert number_of() == 3
    assert number_of("--config", "own.toml") == 4
    assert number_of(MISMATCH_NUM_PROMPTS="5") == 5
    assert number_of("--num-prompts", "7", MISMATCH_NUM_PROMPTS="5") == 7
    (tmp_path / "pyproject.toml").write_text("[tool.other]\nmismatch = 1\n")
    assert number_of() is None


@pytest.mark.grid
def test_a_check_takes_them(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.mismatch]\nnum-prompts = 3\n")
    dry = mismatch(
        "check", "--model", "tiny-gpt-oss", "--dry-run", "--format", "json", cwd=tmp_path
    )
    assert json.loads(dry.stdout)["tokens"]["prompts"] == 3
    assert "pyproject.toml sets --num-prompts" in dry.stderr


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("num-promts = 3", "num-promts"),
        ("num-prompts = 'x'", "num-prompts"),
        ("trust-run = true", "--trust-run"),
        ("num-prompts = ", "TOML"),
        ("[[tool.mismatch]]", "TOML"),
    ],
)
def test_a_project_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text(f"[tool.mismatch]\n{table}\n")
    with pytest.raises(MismatchError, match=said) as raised:
        project_config((*NUMBER, switch("trust_run", OUTPUT, "")))
    assert "pyproject.toml" in raised.value.message


def test_trust_has_no_variable_and_no_variable_is_another_ones() -> None:
    names = {option.name.upper() for option in CHECK if option.name not in NO_VARIABLE}
    assert "TRUST_RUN" not in names
    assert not names & set(OTHERS)
    assert VARIABLE == "MISMATCH_"


def test_short_flags(tmp_path: Path) -> None:
    assert mismatch("-V", cwd=tmp_path).stdout == mismatch("--version", cwd=tmp_path).stdout
    run = shutil.copytree(ROOT / "examples" / "tiny-gpt-oss", tmp_path / "run")  # it is written to
    done = mismatch("report", run, "-q", cwd=tmp_path)
    assert "verdict" in done.stdout
    assert len(done.stdout.splitlines()) < 8


def test_the_hook_for_others_is_a_command(tmp_path: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    _, *command = hook["entry"].split()
    good, bad = (
        shutil.copytree(ROOT / "examples" / name, tmp_path / name)
        for name in ("tiny-gpt-oss", "tiny-gpt-oss-no-sinks")
    )
    assert [mismatch(*command, run, cwd=tmp_path).returncode for run in (good, bad)] == [0, 1]
