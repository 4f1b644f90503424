"""Private names of vLLM and SGLang stand in one module per engine, each with a fallback."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import mismatch
from mismatch.engines.sglang import private as sglang
from mismatch.engines.vllm import private as vllm
from mismatch.errors import MismatchError

ROOT = Path(mismatch.__file__).parent
HOMES = {ROOT / "engines" / name / "private.py" for name in ("vllm", "sglang")}
PUBLIC = {"vllm", "vllm.lora.request", "sglang"}  # modules that the engines document
IMPORTERS = {"import_module", "__import__", "found"}
# Folders that hold an engine's objects, and underscores there that are not an engine's.
HOLDERS = ("engines", "features/sync", "features/locate", "features/loop", "processes/workers")
OTHERS = {
    *("os._exit", "engine._call", "self.engine._call"),  # of mismatch's own engines, and these:
    *("self.engine._run", "self.engine._server"),
    *("_inheriting", "config._experts_implementation"),  # of multiprocessing, and transformers
}


def modules_of(node: ast.AST) -> list[str]:
    """Modules that a statement or call imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [] if node.level else [str(node.module)]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return [str(node.args[0].value)] if name in IMPORTERS else []
    return []


def internal_imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for module in modules_of(node):
            if module.partition(".")[0] in ("vllm", "sglang") and module not in PUBLIC:
                yield module


def underscores(tree: ast.AST) -> Iterator[str]:
    """Underscore attributes of what is neither ``self`` nor a module's own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            name, shown = node.attr, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            name = shown = str(getattr(node.args[1], "value", ""))
        else:
            continue
        if name.startswith("_") and not name.startswith("__") and shown not in OTHERS:
            yield shown


def trees(*folders: str) -> Iterator[tuple[str, ast.AST]]:
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        if path not in HOMES:
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text("utf-8"))


def test_no_other_module_imports_what_an_engine_does_not_document() -> None:
    assert [(path, name) for path, tree in trees("") for name in internal_imports(tree)] == []


def test_no_other_module_touches_an_underscore_of_an_engine() -> None:
    assert [(path, name) for path, tree in trees(*HOLDERS) for name in underscores(tree)] == []


@pytest.mark.parametrize(
    "code",
    [
        "from vllm.logprobs import FlatLogprobs",
        "def f():\n    import sglang.srt.utils",
        "import_module('vllm.v1.worker')",
        "private.found('sglang.srt.managers', 'x')",
        "llm.llm_engine._private",
        "getattr(runner, '_model')",
        "self.engine._loop",
    ],
)
def test_private_names_elsewhere_are_found(code: str) -> None:
    tree = ast.parse(code)
    assert len([*internal_imports(tree), *underscores(tree)]) == 1


@pytest.mark.parametrize(
    "code", ["from vllm import LLM", "import sglang", "self._own", "os._exit(1)", "x.__dict__"]
)
def test_public_names_are_not(code: str) -> None:
    tree = ast.parse(code)
    assert [*internal_imports(tree), *underscores(tree)] == []


# ---------------------------------------------------------------- names that a version lacks


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Versions of both engines that hold no name at all."""
    names = ("vllm", "vllm.distributed", "sglang", "sglang.srt")
    names += tuple(f"sglang.srt.{name}" for name in ("utils", "server_args", "distributed"))
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


def test_a_group_that_a_version_lacks_costs_the_weights(bare: dict[str, ModuleType]) -> None:
    for gathered in (vllm.gathered, sglang.gathered):
        with pytest.raises(MismatchError) as caught:
            gathered(torch.zeros(2), 0)
        assert "get_tp_group" in caught.value.message


def test_groups_gather_along_the_axis(bare: dict[str, ModuleType]) -> None:
    class Group:
        def all_gather(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
            return torch.cat([tensor, tensor], axis)

    for name, gathered in (("vllm", vllm.gathered), ("sglang.srt", sglang.gathered)):
        vars(bare[f"{name}.distributed"])["get_tp_group"] = Group
        assert gathered(torch.zeros(2, 3), 1).shape == (2, 6)


def test_what_sglang_cannot_run_without_is_named(bare: dict[str, ModuleType]) -> None:
    for needed in (sglang.scheduler, sglang.detokenizer, sglang.engine_class):
        with pytest.raises(MismatchError) as caught:
            needed()
        assert "sglang.srt." in caught.value.message
        assert caught.value.fix


def test_facts_that_cannot_be_read_say_why() -> None:
    facts = sglang.first_facts(SimpleNamespace(), "mismatch")
    assert facts["lacking"] == dict.fromkeys(("weights", "routes"), sglang.SILENT)
    assert facts["moe_layers"] == []
    infos = [{"mismatch": {"device": "cuda:0"}}]
    engine = SimpleNamespace(_scheduler_init_result=SimpleNamespace(scheduler_infos=infos))
    assert sglang.first_facts(engine, "mismatch") == {"device": "cuda:0"}


def test_arguments_are_read_from_either_kind_of_class(bare: dict[str, ModuleType]) -> None:
    arguments: Any = type("ServerArgs", (), {"__struct_fields__": ("tp_size", "dtype")})
    vars(bare["sglang.srt.server_args"])["ServerArgs"] = arguments
    assert sglang.server_arguments() == {"tp_size", "dtype"}
    arguments = type("ServerArgs", (), {"__dataclass_fields__": {"port": None}})
    vars(bare["sglang.srt.server_args"])["ServerArgs"] = arguments
    assert sglang.server_arguments() == {"port"}


def test_children_end_though_sglang_has_no_function_for_it(
    bare: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[object] = []

    class Child:
        def kill(self) -> None:
            ended.append(self)

    class Process:
        def children(self, recursive: bool) -> list[Child]:
            return [Child(), Child()]

    monkeypatch.setattr(psutil, "Process", Process)
    monkeypatch.setattr("os._exit", ended.append)
    sglang.end_with_children()
    assert len(ended) == 3
    assert ended[-1] == 1
