"""Snippets of docs/how-to/weight-sync-frameworks.md parse, are short, and name what exists."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

DOC = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "weight-sync-frameworks.md"
MOST_LINES = 10
NAMES = {  # module -> names that are defined in it, of classes also attributes
    "trl.generation.vllm_generation": ("LLM", "VLLMGeneration.sync_weights"),
    "verl.workers.engine_workers": ("ActorRolloutRefWorker.update_weights",),
    "verl.workers.rollout.vllm_rollout.utils": ("vLLMColocateWorkerExtension",),
    "verl.workers.rollout.vllm_rollout.vllm_async_server": (
        "vLLMHttpServer._get_worker_extension_cls",
    ),
    "skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap": (
        "NewInferenceWorkerWrap",
    ),
    "skyrl.backends.skyrl_train.inference_servers.utils": (
        "VLLM_NEW_INFERENCE_WORKER_EXTENSION_CLS",
    ),
    "skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker": (
        "FSDPPolicyWorkerBase.broadcast_to_inference_engines",
    ),
    "prime_rl.inference.vllm.server": ("WORKER_EXTENSION_CLS",),
    "prime_rl.inference.vllm.worker.filesystem": ("FileSystemWeightUpdateWorker",),
    "mismatch.engines.vllm.weight_sync": ("WeightSync.mismatch_held_json",),
    "mismatch.features.sync.in_framework": ("EXTENSION", "probe", "judge"),
}


def snippets() -> list[str]:
    text = DOC.read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.S)


def imported(code: str) -> set[tuple[str, str]]:
    """(module, name) of every ``from module import name``."""
    nodes = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.ImportFrom)]
    return {(str(node.module), alias.name) for node in nodes for alias in node.names}


def test_snippets_parse_and_are_short() -> None:
    assert len(snippets()) == 5
    for code in snippets():
        ast.parse(code)
        assert len([line for line in code.splitlines() if line.strip()]) <= MOST_LINES


def test_every_framework_module_of_a_snippet_is_looked_up() -> None:
    modules = {f"{module}.{name}" for code in snippets() for module, name in imported(code)}
    for path in modules:
        if path.split(".")[0] in ("trl", "verl", "skyrl", "prime_rl", "mismatch"):
            assert any(path.startswith(name) or name.startswith(path) for name in NAMES), path


@pytest.mark.parametrize("module", NAMES)
def test_names_exist_where_the_framework_is_installed(module: str) -> None:
    top = importlib.util.find_spec(module.partition(".")[0])
    if top is None or not top.submodule_search_locations:
        pytest.skip(f"client: unverified: {module.partition('.')[0]} is not installed")
    path = Path(top.submodule_search_locations[0], *module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    defined = set(names_in(ast.parse(file.read_text(encoding="utf-8"))))
    assert set(NAMES[module]) <= defined


def names_in(tree: ast.AST, prefix: str = "") -> list[str]:
    """Names that a module's text defines or imports anywhere, of classes with their attributes."""
    names = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            names += [prefix + node.name, *names_in(node, f"{prefix}{node.name}.")]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.append(prefix + node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names += [prefix + (alias.asname or alias.name) for alias in node.names]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [prefix + target.id for target in targets if isinstance(target, ast.Name)]
        else:
            names += names_in(node, prefix)
    return names
