"""Experts under FSDP2, in a world of two ranks: the same logprobs, one layer gathered at a time.

The model is nearly nothing but experts, and its layers together are far larger than what a rank may
hold at once, so that a second copy of a layer's experts, or a second layer, would show.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch.doctor.memory import forward_bytes
from mismatch.models.config import FoundConfig
from mismatch.models.sizes import sized
from mismatch.processes.tasks import TrainerSession, write_session
from mismatch.run.store import load_scoring, save_rollout
from mismatch.specs import Pass, TrainSpec
from mismatch.types import Scoring
from tests.checkpoints import make, rollout

pytestmark = pytest.mark.grid

WORLD = 2
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "moe_intermediate_size": 384,
    "num_experts": 16,
    "num_hidden_layers": 6,
}
LAYER = 16 * 3 * 256 * 384 * 4  # bytes of a layer's experts in float32: 18 MiB of 20
TOKENS = 128
ROLLOUT = rollout(((8, 56), (8, 56)))
NAMES = ("eager", "grouped_mm", "batched_mm", "bounded")
# Gloo gathers through one more buffer: the layer, the gathered result, and that.
GATHERED = 3 * LAYER
SLACK = 14 << 20  # attention, norms, threads
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Freed tensors leave the process at once: what a pass left behind would hide the next one.
    "MALLOC_MMAP_THRESHOLD_": "65536",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3_moe", tmp_path_factory.mktemp("model"), **SIZES)


def torchrun(*arguments: str) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
    done = subprocess.run(
        [sys.executable, *command, *arguments],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def run_dir(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    save_rollout(root, ROLLOUT)
    passes = [
        Pass(name, TrainSpec(str(model), dtype="fp32", experts=name))  # type: ignore[arg-type]
        for name in NAMES
    ]
    passes.append(
        Pass("bounded:grad", TrainSpec(str(model), dtype="fp32", experts="bounded", grad=True))
    )
    session = write_session(TrainerSession(root, tuple(passes)))
    torchrun("-m", "mismatch.processes.workers.session", str(session))
    return root


def scoring(run_dir: Path, name: str) -> Scoring:
    return load_scoring(run_dir, name)


def peak(run_dir: Path, name: str) -> int:
    return int(max(scoring(run_dir, name).fingerprint["peak_bytes"]))


def test_bounded_logprobs_are_eagers(run_dir: Path) -> None:
    eager, bounded, grad = (scoring(run_dir, n) for n in ("eager", "bounded", "bounded:grad"))
    assert [s.fingerprint["experts"] for s in (eager, bounded)] == ["eager", "bounded"]
    assert np.array_equal(eager.logprobs, bounded.logprobs)
    assert np.array_equal(eager.logprobs, grad.logprobs)
    assert eager.routing is not None
    assert bounded.routing is not None
    assert np.array_equal(eager.routing.ids, bounded.routing.ids)
    for name in ("grouped_mm", "batched_mm"):
        other = scoring(run_dir, name).logprobs
        assert np.abs(other - eager.logprobs).max() < 1e-4


@pytest.mark.parametrize("name", ["bounded", "bounded:grad"])
def test_one_layer_is_gathered_at_a_time(run_dir: Path, name: str) -> None:
    peak_bytes = peak(run_dir, name)
    assert LAYER < peak_bytes < GATHERED + SLACK
    assert SIZES["num_hidden_layers"] * LAYER > 1.5 * (GATHERED + SLACK)  # all at once would show


def test_batched_mm_copies_the_weights_of_every_token(run_dir: Path) -> None:
    config = json.loads((Path(_model(run_dir)) / "config.json").read_text())
    copies = forward_bytes(sized(FoundConfig(config, "", None)), "batched_mm", TOKENS // WORLD, 4)
    assert copies > 6 * LAYER
    assert peak(run_dir, "batched_mm") > copies
    assert peak(run_dir, "batched_mm") - peak(run_dir, "bounded") > 0.8 * copies


def _model(run_dir: Path) -> str:
    return str(scoring(run_dir, "bounded").fingerprint["model"])


def test_every_pass_says_what_it_cost(run_dir: Path) -> None:
    for name in NAMES:
        facts = scoring(run_dir, name).fingerprint
        assert len(facts["peak_bytes"]) == WORLD
        assert all(isinstance(size, int) and size > 0 for size in facts["peak_bytes"])
        assert 0 < facts["seconds"] < 300


# ---------------------------------------------------------------- with a backward pass

BACKWARD = """
import json, sys
import torch
from torch.distributed.tensor import DTensor
from mismatch.specs import TrainSpec
from mismatch.training.load import load
from mismatch.training.packing import collate
from mismatch.training.distributed import World

model, out, whole = sys.argv[1:]
world = World.start()
found = {}
for name in ("eager", "bounded"):
    scorer = load(
        TrainSpec(model, dtype="fp32", master_dtype="fp32", experts=name), world.mesh, world.device
    ).scorer
    scorer.train()
    tokens = (torch.arange(64) * (7 + world.rank) % 320).numpy()
    batch = collate([tokens], "padding", world.device)
    with torch.profiler.profile(profile_memory=True) as profile:
        scorer(scorer.hidden, batch).square().sum().backward()
    profile.export_chrome_trace(f"{out}.{world.rank}")
    events = json.load(open(f"{out}.{world.rank}"))["traceEvents"]
    sizes = [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]
    held = [p.grad.to_local() for p in scorer.parameters() if p.grad is not None]
    digest = [float(g.double().abs().sum()) for g in held]
    bits = [g.clone() for g in held]
    found[name] = {"whole": sum(size >= int(whole) for size in sizes), "sums": digest}
    found[name]["same"] = name == "eager" or all(map(torch.equal, bits, before))
    before = bits
    del scorer, held, bits
gathered = world.gather(found)
if world.rank == 0:
    open(out, "w").write(json.dumps(gathered))
world.close()
"""


@pytest.mark.grid
def test_a_backward_pass_under_fsdp2(model: Path, tmp_path: Path) -> None:
    """Gradients of eager, bit for bit; fewer allocations of the size of all experts."""
    (tmp_path / "backward.py").write_text(BACKWARD)
    out = tmp_path / "out.json"
    torchrun(str(tmp_path / "backward.py"), str(model), str(out), str(LAYER // 3))
    ranks = json.loads(out.read_text())
    assert len(ranks) == WORLD
    for rank in ranks:
        assert rank["bounded"]["same"]
        assert all(total > 0 for total in rank["bounded"]["sums"])
        # Counted, not sampled: how far gathers and gradients overlap depends on the machine.
        assert 0 < rank["bounded"]["whole"] < rank["eager"]["whole"] / 2
