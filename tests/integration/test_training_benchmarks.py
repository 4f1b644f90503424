"""The GPU benchmark's own code runs here too, on a model of a few thousand parameters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu_gpt_oss.py"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.grid
def test_the_gpu_benchmark_scores_every_token_of_the_tiny_model(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text((ROOT / "docs" / "evidence" / "gpu-results.md").read_text())
    done = _run("--tiny", "--json", str(tmp_path / "out.json"), "--write", str(page))
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "out.json").read_text())
    assert facts["attention"] == "sink-sdpa"
    assert [(row["name"], row["tokens"]) for row in facts["scored"]] == [
        ("4 x 256", 1024),
        ("1 x 512", 512),
    ]
    assert all(row["tokens_per_s"] > 0 for row in facts["scored"])
    written = page.read_text()
    assert "Not measured yet" not in written
    assert f"| {facts['scored'][0]['name']} |" in written


def test_the_full_shape_is_that_of_the_published_model() -> None:
    import importlib.util

    import torch

    from mismatch.training.source import skeleton
    from tests.checkpoints import configuration

    spec = importlib.util.spec_from_file_location("gpu_gpt_oss", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_gpt_oss"] = module
    spec.loader.exec_module(module)
    model = skeleton(configuration("gpt_oss", **module.SHAPE))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(20.9e9, rel=0.005)  # "21B parameters", 20.9 in the model card
    assert next(model.parameters()).device == torch.device("meta")
