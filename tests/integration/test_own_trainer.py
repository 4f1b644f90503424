"""A user's function and class as docs/how-to/your-trainer.md has them, from the page to a verdict.

The page's trainer loads the checkpoint as transformers does, so what it must return is known: in
float32 what our own float32 reference returns, and in bf16 that within bf16's rounding. A share
that went to another sequence would be off by nats.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch.keys import REFERENCE
from mismatch.models import resolve_model
from mismatch.run import store
from tests.command import mismatch
from tests.shared import once

from .conftest import TINY_SAMPLING

pytestmark = pytest.mark.slow
PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "your-trainer.md").read_text("utf-8")


def run(folder: Path, *command: str) -> dict[str, Any]:
    """Run a command where the page's module is; its report."""
    done = mismatch(*command, cwd=folder, timeout=500)
    path = folder / "run" / "report.json"
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return json.loads(path.read_text()) if path.exists() else {}


def error_of(scoring: str, folder: Path) -> float:
    """Mean distance of a scoring from our own float32 reference, nats."""
    passes = (store.load_scoring(folder / "run", name) for name in (scoring, REFERENCE))
    found, exact = (scoring.logprobs for scoring in passes)
    return float(np.abs(found - exact).mean())


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's module, and a check by its function on two ranks."""

    def make(folder: Path) -> None:
        blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
        code = "\n\n".join(blocks).replace('"MODEL"', repr(str(resolve_model("tiny-gpt-oss"))))
        (folder / "my_trainer.py").write_text(code)
        flags = (
            "--scorer",
            "my_trainer:score",
            "--nproc-per-node",
            "2",
            "--no-locate",
            "--no-explain",
        )
        run(folder, "check", *TINY_SAMPLING, *flags, "--out", "run")

    return once(tmp_path_factory, "own-trainer", make)


@pytest.fixture
def unscored(checked: Path, tmp_path: Path) -> Path:
    """The same folder without what the trainer scored; our reference and plain forward stay."""
    theirs = shutil.ignore_patterns("fsdp*", "report*", "comparison*", "tokens*", "errors")
    shutil.copytree(checked, tmp_path, ignore=theirs, dirs_exist_ok=True)
    return tmp_path


def test_a_function_gets_a_verdict_without_its_float32(checked: Path) -> None:
    report = json.loads((checked / "run" / "report.json").read_text())
    assert report["verdict"]["status"] in ("tolerable", "inconclusive")
    assert report["verdict"]["levels"] == "bf16 MoE"
    facts = report["fingerprints"]["fsdp"]
    assert (facts["code"], facts["dtype"]) == ("the function my_trainer:score", "bf16")
    assert facts["world_size"] == 2
    assert 0 < error_of("fsdp", checked) < 0.05
    assert {"fsdp:alone", "fsdp:regrouped", "fsdp:repeated"} <= report["fingerprints"].keys()
    (why,) = (each["reason"] for each in report["not_tested"] if each["what"] == "fsdp:fp32")
    assert "my_trainer:score" in why
    log = (checked / "run" / "logs" / "trainer.log").read_text()
    assert "fp32" not in log  # no rank was asked for it


@pytest.mark.grid
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.grid)])
def test_score_and_compare_with_a_function(unscored: Path, ranks: int) -> None:
    flags = ("--scorer", "my_trainer:score", "--nproc-per-node", str(ranks))
    run(unscored, "score", "run", *flags)
    report = run(unscored, "compare", "run")
    assert report["fingerprints"]["fsdp"]["world_size"] == ranks
    assert report["verdict"]["status"] in ("tolerable", "inconclusive")
    assert 0 < error_of("fsdp", unscored) < 0.05


@pytest.mark.grid
def test_score_and_compare_with_a_class_which_scores_in_float32_too(unscored: Path) -> None:
    run(unscored, "score", "run", "--scorer", "my_trainer:Trainer", "--nproc-per-node", "2")
    report = run(unscored, "compare", "run")
    assert report["fingerprints"]["fsdp"]["code"] == "my_trainer.Trainer"
    assert 0 < error_of("fsdp", unscored) < 0.05
    assert error_of("fsdp:fp32", unscored) < 1e-5
    gaps = {gap["side"]: gap["size"]["value"] for gap in report["square"]["gaps"]}
    assert gaps["trainer"] < 1e-5
    assert "fsdp:fp32" not in {each["what"] for each in report["not_tested"]}
