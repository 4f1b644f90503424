"""The script that gets a browser tries every way, in order, until one of them gives a Chromium."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "get_browser.py"


@pytest.fixture
def tool() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))["main"].__globals__


@pytest.mark.parametrize("works", [0, 1, None])
def test_ways_are_tried_until_one_gives_a_browser(
    tool: dict[str, Any], monkeypatch: pytest.MonkeyPatch, works: int | None
) -> None:
    ways = [["playwright"], ["apt-get"]]
    tried: list[list[str]] = []

    def succeeds(command: list[str]) -> bool:
        tried.append(command)
        return True  # a command may end well and leave no browser, as Ubuntu's package does

    def find() -> str | None:
        return "/usr/bin/chromium" if works is not None and len(tried) > works else None

    monkeypatch.setitem(tool, "ways", lambda: ways)
    monkeypatch.setitem(tool, "succeeds", succeeds)
    monkeypatch.setitem(tool, "find_chromium", find)
    assert tool["main"]() == 0
    assert tried == (ways if works is None else ways[: works + 1])


def test_the_package_manager_is_for_root_alone(
    tool: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    for user, count in ((0, 2), (1000, 1)):
        monkeypatch.setattr("os.geteuid", lambda user=user: user)
        assert len(tool["ways"]()) == count


def test_a_command_that_is_not_there_is_no_crash(tool: dict[str, Any], tmp_path: Path) -> None:
    assert not tool["succeeds"]([str(tmp_path / "nothing")])
