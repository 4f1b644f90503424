"""Every command's `--help`: it fits the terminal and shows every flag."""

from __future__ import annotations

import re

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from mismatch.cli.main import COMMANDS, app


def help_of(command: str, columns: int) -> str:
    arguments = ["--help"] if command == "mismatch" else [command, "--help"]
    shown = CliRunner().invoke(app, arguments, prog_name="mismatch", env={"COLUMNS": str(columns)})
    assert shown.exit_code == 0, shown.output
    return shown.output


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("command", ["mismatch", *COMMANDS])
def test_help_fits_the_terminal(command: str, columns: int) -> None:
    assert max(map(len, help_of(command, columns).splitlines())) <= columns


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_of_a_command_is_shown(command: str) -> None:
    text = help_of(command, 100)
    group = get_command(app)
    parameters = group.get_command(None, command).params  # type: ignore[attr-defined, arg-type]
    flags = [parameter for parameter in parameters if parameter.param_type_name == "option"]
    for parameter in flags:
        if not getattr(parameter, "hidden", False):
            assert re.search(rf"{parameter.opts[0]}\b", text), parameter.opts
