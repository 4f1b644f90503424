"""The base package, which holds no torch, beside an environment that runs both sides."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.environments import Environment, base_python
from tests.integration.conftest import TINY_SAMPLING

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Run `mismatch` from an environment that holds the base package alone."""
    folder = tmp_path_factory.mktemp("base")
    python = base_python(folder / "environment")
    here = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    have = "import importlib.util as u; print([n for n in ('torch', 'vllm') if u.find_spec(n)])"
    held = subprocess.run([python, "-c", have], env=here, capture_output=True, text=True)
    assert held.stdout.strip() == "[]", held.stderr

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [python, "-m", "mismatch", *map(str, arguments)]
        return subprocess.run(
            command, cwd=folder, env=here, capture_output=True, text=True, timeout=600
        )

    return run


def entries(run: Path) -> dict[str, Any]:
    """What the run's manifest says of its scorings."""
    artefacts = json.loads((run / "manifest.json").read_text())["artefacts"]
    return {name: entry for name, entry in artefacts.items() if name.startswith("scores/")}


@pytest.mark.grid
def test_a_run_goes_on_in_the_users_environment_until_that_changes(
    base: Command, tmp_path: Path
) -> None:
    run, user = tmp_path / "run", Environment(tmp_path / "user")
    flags = (*TINY_SAMPLING, "--python", user.python, "--nproc-per-node", "1", "--no-locate")
    done = base("check", *flags, "--fix", "fp32-lm-head", "--out", run)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report = json.loads((run / "report.json").read_text())
    (row,) = report["fixes"]
    assert row["id"] == "fp32-lm-head"
    assert row["outcome"] != "failed"
    scored = entries(run)
    assert all("torch" in entry["made_with"] for entry in scored.values())

    for more in ((), ("--fix", "fp32-lm-head"), ("--explain",)):
        again = base("check", "--resume", run, "--trust-run", "--no-locate", *more)
        assert again.returncode == done.returncode, again.stdout + again.stderr
        now = entries(run)
        assert {name: now[name] for name in scored} == scored  # nothing was made again
    scores = ("score", run, "--python", f"train={user.python}", "--nproc-per-node", "1")
    for _ in range(2):
        again = base(*scores)
        assert again.returncode == 0, again.stdout + again.stderr
    assert {name: entries(run)[name] for name in scored} == scored

    user.install("torch", "99.1")
    for verb in (("check", "--resume", run, "--trust-run"), scores):
        refused = base(*verb)
        assert refused.returncode == 2
        assert "'99.1' here" in refused.stderr
    assert entries(run) == {**entries(run), **scored}
    assert base("compare", run).returncode == done.returncode


def test_a_chat_template_is_examined_without_transformers(base: Command) -> None:
    done = base("template", "--model", "tiny-gpt-oss", "--format", "json")
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)["templates"]
    assert report["checks"]
