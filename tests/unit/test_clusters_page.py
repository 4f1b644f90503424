"""Examples of docs/how-to/clusters.md: the shell parses, flags exist, the Python runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_help import help_of

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "clusters.md").read_text("utf-8")
SHELL = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def commands() -> list[list[str]]:
    """Every mismatch command of the shell examples, from the verb on."""
    lines = [line for block in SHELL for line in block.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line, comments=True) for line in lines if "mismatch" in line]
    return [line[line.index("mismatch") + 1 :] for line in words]


@pytest.mark.parametrize("block", SHELL)
def test_the_shell_parses(block: str) -> None:
    done = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_every_flag_exists() -> None:
    used = commands()
    assert {words[0] for words in used} == {"check", "rollout", "score", "compare"}
    for verb, *words in used:
        text = help_of(verb, 80, "--help-all")
        for flag in [word for word in words if word.startswith("--")]:
            assert re.search(rf"{flag}\b", text), (verb, flag)


def test_the_ray_example_starts_torchrun_on_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = PYTHON
    started: list[list[str]] = []

    class Remote:
        def __init__(self, function: Any) -> None:
            self.function = function

        def options(self, **given: Any) -> Remote:
            assert given["scheduling_strategy"] in (("group", 0), ("group", 1))
            return self

        def remote(self, *args: Any) -> Any:
            return self.function(*args)

    ray: Any = types.ModuleType("ray")
    ray.remote, ray.init = Remote, lambda address: None
    ray.get = lambda value: value
    ray.util = types.SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    groups: Any = types.ModuleType("ray.util.placement_group")
    group = types.SimpleNamespace(ready=lambda: None)
    groups.placement_group = lambda bundles, strategy: group
    strategies: Any = types.ModuleType("ray.util.scheduling_strategies")
    strategies.PlacementGroupSchedulingStrategy = lambda group, placement_group_bundle_index: (
        "group",
        placement_group_bundle_index,
    )
    for name, module in {
        "ray": ray,
        "ray.util": types.ModuleType("ray.util"),
        "ray.util.placement_group": groups,
        "ray.util.scheduling_strategies": strategies,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)

    def run(command: list[str]) -> Any:
        started.append(command)
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    exec(compile(code, "docs/how-to/clusters.md", "exec"), {})
    assert [words[words.index("--node-rank") + 1] for words in started] == ["0", "1"]
    for words in started:
        assert words[-4:] == ["-m", "mismatch", "score", "/shared/run"]
        assert words[words.index("--master-addr") + 1] == "10.0.0.1"
