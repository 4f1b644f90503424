"""Every command's `--help`, at 80 and 100 columns: no flag, default or choice vanishes unseen.

Compared without white space, so that lines may break elsewhere. After a change that is meant:
``python -m tests.cli.test_help`` writes the files anew, and their diff is read by eye.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mismatch.cli.main import app

HELP = Path(__file__).resolve().parents[1] / "goldens" / "help"
COMMANDS = (
    *("mismatch", "check", "rollout", "score", "compare", "corrections", "selftest"),
    *("fixes", "kernels", "locate", "sync-probe", "loop", "report", "serve", "doctor", "metrics"),
    *("models", "template", "read-rollouts"),
)


def help_of(command: str, columns: int) -> str:
    arguments = ["--help"] if command == "mismatch" else [command, "--help"]
    shown = CliRunner().invoke(app, arguments, prog_name="mismatch", env={"COLUMNS": str(columns)})
    assert shown.exit_code == 0, shown.output
    return shown.output


def packed(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_it_said(command: str, columns: int) -> None:
    golden = (HELP / f"{command}.txt").read_text("utf-8")
    assert packed(help_of(command, columns)) == packed(golden)


if __name__ == "__main__":
    for name in COMMANDS:
        (HELP / f"{name}.txt").write_text(help_of(name, 80), "utf-8")
