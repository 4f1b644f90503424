"""Commands that the pages show are commands that the tool reads."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mismatch.cli.main import Group
from tests.pages import ROOT, shell_lines

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def commands(page: Path) -> list[str]:
    """Lines of its shell blocks that call the tool."""
    lines = [re.split(r"\s+#|;  |&&|\||>", line.text)[0].strip() for line in shell_lines(page)]
    return [
        line
        for line in lines
        if re.match(r"mismatch [a-z]", line) and not re.search("…|--help", line)
    ]


SHOWN = [(page, line) for page in PAGES for line in commands(page)]


def test_the_pages_show_commands() -> None:
    assert len(SHOWN) > 50


@pytest.mark.parametrize(("page", "line"), SHOWN, ids=[line for _, line in SHOWN])
def test_a_command_of_a_page_is_read(
    page: Path, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run.toml", "check.toml"):  # files of flags are read with the command line
        (tmp_path / name).write_text('attention = "eager"')
    verb, *words = shlex.split(line)[1:]
    command = Group().get_command(None, verb)
    command.make_context(verb, words, resilient_parsing=False)
