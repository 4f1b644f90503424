"""Every command's `--help`: it fits the terminal, shows what people need, and has examples."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from mismatch.cli.main import GROUPS, MOST_FLAGS, app, summaries

NAMES = [*summaries()]
MOST_IN_ALL = 75  # flags of a command


def help_of(command: str, columns: int, flag: str = "--help") -> str:
    arguments = [flag] if command == "mismatch" else [command, flag]
    shown = CliRunner().invoke(app, arguments, prog_name="mismatch", env={"COLUMNS": str(columns)})
    assert shown.exit_code == 0, shown.output
    return shown.output


def options_of(command: str, rare: bool = False) -> list[str]:
    """The flags of a command, or the settings that its help only names."""
    parameters = get_command(app).get_command(None, command).params  # type: ignore[attr-defined, arg-type]
    options = [each for each in parameters if each.param_type_name == "option"]
    return [each.opts[0] for each in options if each.hidden == rare]


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"^  (?:-[hoq], )?(--[a-z0-9-]+)", text, re.MULTILINE))


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("command", ["mismatch", *NAMES])
def test_help_fits_the_terminal(command: str, columns: int) -> None:
    assert max(map(len, help_of(command, columns).splitlines())) <= columns


@pytest.mark.parametrize("command", NAMES)
def test_help_shows_few_flags_and_help_all_every_one(command: str) -> None:
    every = {*options_of(command), "--help"}
    shown, whole = flags_in(help_of(command, 100)), flags_in(help_of(command, 100, "--help-all"))
    assert whole == every
    assert len(every) <= MOST_IN_ALL
    named = help_of(command, 100, "--help-all").partition("Settings of a --config file:")[2]
    for flag in options_of(command, rare=True):
        assert re.search(rf"\b{flag[2:].replace('-', '_')}\b", named)
    if len(every) > MOST_FLAGS:
        assert len(shown - {"--help", "--help-all"}) <= 25
        assert "--help-all" in shown
    else:
        assert shown == every


@pytest.mark.parametrize("command", NAMES)
def test_every_command_has_examples_that_its_parser_takes(command: str) -> None:
    examples = help_of(command, 100).partition("Examples:\n")[2].strip().splitlines()
    assert 1 <= len(examples) <= 3
    for example in examples:
        program, verb, *words = example.split()
        assert (program, verb) == ("mismatch", command)
        assert {word for word in words if word.startswith("--")} <= {*options_of(command)}


def test_every_flag_of_a_check_has_a_help_text() -> None:
    parameters = get_command(app).get_command(None, "check").params  # type: ignore[attr-defined, arg-type]
    assert [each.name for each in parameters if not getattr(each, "help", "x")] == []


def test_commands_are_listed_once_and_in_groups() -> None:
    text = help_of("mismatch", 100)
    listed = re.findall(r"^  ([a-z][a-z-]+)  ", text, re.MULTILINE)
    assert sorted(listed) == sorted(NAMES)
    assert [text.index(f"{title}:") for title in GROUPS] == sorted(
        text.index(f"{title}:") for title in GROUPS
    )


@pytest.mark.parametrize("command", ["mismatch", "check", "template"])
def test_h_is_help(command: str) -> None:
    assert help_of(command, 80, "-h") == help_of(command, 80)


def test_the_shell_completes_commands_and_flags() -> None:
    for typed, wanted in (("mismatch com", "compare"), ("mismatch check --num", "--num-prompts")):
        words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
        env = {**os.environ, **words, "_MISMATCH_COMPLETE": "complete_bash"}
        command = [sys.executable, "-m", "mismatch"]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert (done.returncode, done.stdout.split()) == (0, [wanted]), done.stderr


@pytest.mark.parametrize("command", NAMES)
def test_values_have_names_that_say_what_to_give(command: str) -> None:
    shown = help_of(command, 100, "--help-all")
    assert not re.findall(r"^  --[a-z-]+ <(?:list\[)?(?:str|int|float|path)\b", shown, re.MULTILINE)
    if command == "check":
        named = dict(re.findall(r"^  (--[a-z-]+) ([A-Z=]+)", shown, re.MULTILINE))
        wanted = {"--server": "URL", "--engine-arg": "KEY=VALUE", "--python": "PATH", "--seed": "N"}
        assert {flag: named.get(flag) for flag in wanted} == wanted
