"""What a missing sink does to the policy gradient, on the tokens that vLLM sampled; and worlds.

A finished run is asked for its gradients, so that nothing is sampled or scored again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch.codec import from_json
from mismatch.features.gradients.plan import GradientPlan, Planned
from mismatch.features.gradients.results import Taken
from mismatch.run import store
from mismatch.specs import TrainSpec
from tests.checkpoints import make, rollout

from .conftest import Run
from .test_fixes import resumed

pytestmark = pytest.mark.slow
FLAGS = ("--gradients", "4", "--fix", "attention-sinks,fp32-lm-head")


@pytest.fixture(scope="module")
def without_sinks(no_sinks_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    target = tmp_path_factory.mktemp("gradients") / "no-sinks"
    run = resumed(no_sinks_run.directory, target, *FLAGS)
    assert (run.code, run.report["verdict"]["status"]) == (1, "broken"), run.output
    return run


def groups(run: Run, id: str) -> dict[str, dict[str, Any]]:
    (row,) = [row for row in run.report["gradients"]["rows"] if row["id"] == id]
    return {group["group"]: group for group in row["groups"]}


def test_the_fix_turns_the_gradient_back(without_sinks: Run) -> None:
    assert groups(without_sinks, "baseline")["all"]["cosine"] < 0.95
    assert groups(without_sinks, "attention-sinks")["all"]["cosine"] > 0.99
    # A finer head behind the wrong kernel repairs nothing.
    assert groups(without_sinks, "fp32-lm-head")["all"]["cosine"] < 0.95


def test_sinks_that_are_ignored_get_no_gradient(without_sinks: Run) -> None:
    sinks = groups(without_sinks, "baseline")["sinks"]
    assert (sinks["norm"], sinks["norm_ratio"], sinks["cosine"]) == (0.0, 0.0, None)
    assert groups(without_sinks, "attention-sinks")["sinks"]["cosine"] > 0.95
    (check,) = [each for each in without_sinks.report["checks"] if each["id"] == "gradients"]
    assert check["status"] == "failed"


def test_the_run_says_what_the_gradients_rest_on(without_sinks: Run) -> None:
    result = without_sinks.report["gradients"]
    assert (result["prompts"], result["sequences"]) == (4, 8)
    # The scorings are those of the run that was asked.
    assert "rollout: there already" in without_sinks.output
    spec = json.loads((without_sinks.directory / "spec.json").read_text("utf-8"))
    assert spec["extras"] == [["gradients", 4], ["no_locate", True]]


# ---------------------------------------------------------------- worlds of one and two ranks

ROLLOUT = rollout(((3, 6), (3, 9), (4, 5), (4, 8), (5, 60), (6, 0), (7, 21)))


def taken(root: Path, ranks: int, *passes: TrainSpec) -> Taken:
    """Run the worker over a reference and further passes."""
    run_dir = root / f"{ranks}-{len(list(root.iterdir()))}"
    run_dir.mkdir()
    store.save_rollout(run_dir, ROLLOUT)
    ids = ("reference", "baseline", *(f"fix-{n}" for n in range(len(passes) - 2)))
    plan = GradientPlan(
        tuple(Planned(id, id, spec) for id, spec in zip(ids, passes, strict=True)), 16, 0
    )
    job = {
        "run_dir": str(run_dir),
        "plan": asdict(plan),
        "taken": str(run_dir / "taken.json"),
        "seconds": None,
    }
    store.write_json(run_dir / "job.json", job)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "mismatch.features.gradients.worker"]
    outside = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*command, str(run_dir / "job.json")],
        env=outside | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = from_json(Taken, store.read_json(run_dir / "taken.json"))
    assert result.failed == {}
    return result


@pytest.mark.grid
def test_one_rank_two_ranks_and_two_that_share_sequences_agree(tmp_path: Path) -> None:
    model = str(make("gpt_oss", tmp_path / "model"))
    low = TrainSpec(model, master_dtype="fp32", grad=True, routing=False)
    high = replace(low, dtype="fp32")
    shared = replace(high, sequence_parallel=2, micro_batch_tokens=64)
    one, two = taken(tmp_path, 1, high, low), taken(tmp_path, 2, high, low, shared)
    pairs = zip(one.sums.values(), two.sums.values(), strict=False)
    for (left, right), rounding in zip(pairs, (5e-5, 0.1), strict=True):
        # The last prompts have one sample or none: of two ranks one adds a gradient of 0.
        assert [*left] == [*right]
        assert np.array([*left.values()]) == pytest.approx(
            np.array([*right.values()]), rel=rounding
        )
    arrays = [np.array([*sums.values()]) for sums in two.sums.values()]  # [groups, 2]
    reference, baseline, parallel = (each[:, 0] for each in arrays)
    cosine = np.sum(arrays[1][:, 1]) / np.sqrt(reference.sum() * baseline.sum())
    assert 0.99 < cosine < 1.0 - 1e-6
    # By group: embedding, attention with its sinks, routers, experts, head.
    assert parallel == pytest.approx(reference, rel=1e-4)
    assert arrays[2][:, 1] == pytest.approx(reference, rel=1e-4)
