"""Names of vLLM's code that mismatch reads: are they in a wheel that this machine cannot run?

A release of vLLM may have no CPU build. Its wheel's Python is read instead: every name of
``mismatch/engines/vllm/private.py`` that the installed vLLM has must be in the wheel. Names that a
module defines are looked for in that module, attributes of objects anywhere.
"""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

READER = Path(__file__).resolve().parents[1] / "mismatch" / "engines" / "vllm" / "private.py"


def missing(installed: Mapping[str, str], wheel: Mapping[str, str]) -> list[str]:
    """Return what mismatch reads, the installed sources have, and the wheel lacks."""
    modules, names = read_by_mismatch()
    lost = [module for module in modules if module in installed and module not in wheel]
    for module in sorted((modules & installed.keys()) & wheel.keys()):
        gone = defined(installed[module]) - defined(wheel[module])
        lost += [f"{module}.{name}" for name in sorted(gone & names)]
    return lost + sorted((names & words(installed)) - words(wheel))


def read_by_mismatch() -> tuple[set[str], set[str]]:
    """Return the modules of vLLM and the names that mismatch's module of private names holds."""
    tree = ast.parse(READER.read_text("utf-8"))
    modules, names = set[str](), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if re.fullmatch(r"vllm(\.\w+)+", text):
                modules.add(text)
            case ast.Constant(value=str(text)) if re.fullmatch(r"\w+(\.\w+)*", text):
                names |= set(text.split("."))
            case ast.Attribute():
                names.add(node.attr)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] == "vllm":
                modules.add(module)
                names |= {alias.name for alias in node.names}
    return modules, names


def defined(source: str) -> set[str]:
    """Return the names that a module, its classes and its functions define or import."""
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.alias():
                found.add((node.asname or node.name).rpartition(".")[2])
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.Attribute(ctx=ast.Store()):
                found.add(node.attr)
    return found


def words(sources: Mapping[str, str]) -> set[str]:
    """Return every word of some sources."""
    return set().union(*(re.findall(r"\w+", source) for source in sources.values()))


def of_package(directory: Path) -> dict[str, str]:
    """Return the source of every module of an installed package."""
    return {
        module(path.relative_to(directory.parent).as_posix()): path.read_text("utf-8")
        for path in directory.rglob("*.py")
    }


def of_wheel(path: Path) -> dict[str, str]:
    """Return the source of every module of a wheel."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
        return {module(name): archive.read(name).decode("utf-8") for name in names}


def module(path: str) -> str:
    """Return the dotted name of a source file."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
