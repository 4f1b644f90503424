"""SECURITY.md names a test for each row; every file and test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text("utf-8")
# A file and the tests of it that follow: tests/x.py: `test_a`, `test_b`
NAMED = re.compile(r"(tests/[\w/]+\.py)((?::? (?:and )?`test_\w+`,?)*)")


@pytest.mark.parametrize("file", sorted({found[1] for found in NAMED.finditer(PAGE)}))
def test_what_the_page_names_exists(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found = [each for each in NAMED.finditer(PAGE) if each[1] == file]
    named = {name for each in found for name in re.findall(r"`(test_\w+)`", each[2])}
    assert named <= there


def test_every_test_is_named_with_its_file() -> None:
    with_file = {name for each in NAMED.finditer(PAGE) for name in re.findall(r"test_\w+", each[2])}
    assert set(re.findall(r"`(test_\w+)`", PAGE)) == with_file


def test_every_row_of_what_a_yaml_can_name_has_a_test() -> None:
    section = PAGE.partition("can name, and which test")[2].partition("\n\nA plan")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"][2:]
    assert len(rows) >= 4
    assert all(NAMED.search(row[-1]) or row[-1] == "the same" for row in rows)
