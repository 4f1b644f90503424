"""The released format of gpt-oss in a world of two ranks: same numbers, and memory in step.

A rank needs its shard, and while it loads one more tensor; never the model, and never two copies.
Both are measured on a checkpoint of 51 million parameters, where they are far apart.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from mismatch.processes.tasks import TrainerSession, write_session
from mismatch.run.store import load_scoring, save_rollout
from mismatch.specs import Pass, TrainSpec
from mismatch.types import Scoring
from tests.checkpoints import make_mxfp4, rollout

pytestmark = pytest.mark.grid

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_local_experts": 16,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 131072,
}
WORLD = 2
SLACK = 6 << 20  # what loading takes besides tensors: threads, parsed headers
BYTES = {"bf16": 2, "fp32": 4}
PASSES = {
    "released:fp32": ("released", "fp32"),
    "released:bf16": ("released", "bf16"),
    "plain:fp32": ("plain", "fp32"),
    "plain:bf16": ("plain", "bf16"),
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mxfp4")
    make_mxfp4(root / "released", root / "plain", **SIZES)
    save_rollout(root, rollout())
    passes = [
        Pass(name, TrainSpec(str(root / model), dtype=dtype, master_dtype=dtype))  # type: ignore[arg-type]
        for name, (model, dtype) in PASSES.items()
    ]
    jobs = tuple(passes)
    session = write_session(TrainerSession(root, jobs, resident_report=True))
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD), "-m"]
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, "mismatch.processes.workers.session", str(session)],
        # Freed tensors leave the process at once: what a pass left behind would hide the next one.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return root


def _scoring(run_dir: Path, name: str) -> Scoring:
    return load_scoring(run_dir, name)


def _elements(run_dir: Path) -> list[int]:
    with safe_open(run_dir / "plain" / "model.safetensors", "pt") as file:
        names = file.keys()
        return [int(np.prod(file.get_slice(name).get_shape())) for name in names]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_released_format_scores_like_its_dequantised_values(run_dir: Path, dtype: str) -> None:
    released, plain = (_scoring(run_dir, f"{name}:{dtype}") for name in ("released", "plain"))
    assert np.abs(released.logprobs - plain.logprobs).max() <= 1e-5
    assert released.fingerprint["dtype"] == dtype
    assert released.fingerprint["weights"] == plain.fingerprint["weights"]


@pytest.mark.parametrize("name", PASSES)
def test_loading_takes_a_shard_and_at_most_one_tensor(run_dir: Path, name: str) -> None:
    elements, size = _elements(run_dir), BYTES[PASSES[name][1]]
    shard, largest = sum(elements) * size / WORLD, max(elements) * size / WORLD
    facts = _scoring(run_dir, name).fingerprint
    for share, peak in zip(facts["resident_fraction"], facts["load_peak_bytes"], strict=True):
        assert share == pytest.approx(1 / WORLD, abs=0.01)
        assert peak <= shard + largest + SLACK
        if name != "plain:fp32":  # there the shard is the file's own pages, which are not counted
            assert peak > 0.9 * shard
