"""The table of foreign inputs names every command, and every flag that could take one."""

from __future__ import annotations

from pathlib import Path

import pytest

from mismatch.cli.main import CORE, summaries
from mismatch.plugins import find_command, load

from ..foreign import INPUTS, OWN, TESTED_BY


def flags_of_text(command: str) -> dict[str, bool]:
    """Return the flags of text or a path of a command; whether each is required."""
    found = None if command in CORE else find_command(command)
    function = load(f"mismatch.cli.{command}:{command}" if found is None else found.function)
    return {each.name: each.argument for each in function.options if each.item in (str, Path)}


def test_every_command_has_its_rows() -> None:
    assert INPUTS.keys() == summaries().keys()


@pytest.mark.parametrize("command", summaries())
def test_every_flag_of_text_has_a_row_or_takes_no_foreign_input(command: str) -> None:
    flags = flags_of_text(command)
    named = {name.partition(",")[0] for name in INPUTS.get(command, {})}
    # What `tokens` writes is its argument `file`.
    own = OWN | ({"file"} if command == "tokens" else set())
    assert flags.keys() - own == named


def test_every_kind_has_attacks_and_nothing_else_does() -> None:
    kinds = {row.kind for rows in INPUTS.values() for row in rows.values()}
    assert kinds == TESTED_BY.keys()
    for kind, file in TESTED_BY.items():
        assert f'"{kind}"' in (Path(__file__).parent / file).read_text()


def test_no_own_flag_is_gone() -> None:
    assert set().union(*map(flags_of_text, summaries())) >= OWN
