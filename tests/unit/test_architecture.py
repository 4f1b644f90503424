"""The rooms of the house: no two files import each other in a circle, whatever the import is for.

``make lint`` holds the layers (import-linter, see pyproject.toml).
"""

from __future__ import annotations

import ast
from pathlib import Path

import grimp
import pytest

import mismatch

ROOT = Path(mismatch.__file__).parent
SPINE = {"__init__", "__main__", "captures", "codec", "errors", "specs", "types"}


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Module -> modules that it imports anywhere, also for types alone."""
    graph = grimp.build_graph("mismatch", cache_dir=None)
    return {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules that can all reach each other (Tarjan 1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[set[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in imports[module]:
            if other not in number:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], number[other])
        if lowest[module] == number[module]:
            start = stack.index(module)
            components.append(set(stack[start:]))
            del stack[start:]

    for module in imports:
        if module not in number:
            visit(module)
    return [component for component in components if len(component) > 1]


def test_no_files_import_each_other_in_a_circle(imports: dict[str, set[str]]) -> None:
    assert circles(imports) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


def test_the_root_of_the_package_holds_the_spine_alone() -> None:
    assert {path.stem for path in ROOT.glob("*.py")} <= SPINE


@pytest.mark.parametrize("room", ["metrics", "analysis", "experiments"])
def test_the_core_neither_prints_nor_reads_the_environment(room: str) -> None:
    calls = {"print", "input"}
    for path in sorted((ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in calls, f"{path}:{node.lineno}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("os", "environ"), f"{path}:{node.lineno}"
