"""Megatron-Core's own code as the trainer, on two CPU ranks under gloo: layouts, and their faults.

One rollout of a tiny model is scored in one layout after another. In float32 a right layout is at
the floor of the reference; a fault that a layout makes is BROKEN on the trainer's side.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch.keys import REFERENCE
from mismatch.run import store
from tests.checkpoints import make
from tests.command import mismatch
from tests.megatron_cpu.stack import environment
from tests.shared import once

pytestmark = pytest.mark.slow
FEW = ("--num-prompts", "24", "--samples-per-prompt", "2", "--max-tokens", "24")
ALONE = ("--no-explain", "--no-locate")
# Four of eight experts: with two, a flip moves a random model's tokens by more than bf16 does.
SHAPES: dict[str, Any] = {
    "qwen3_moe": {"hidden_size": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 64},
    "gpt_oss": {"num_hidden_layers": 4},
}
FLOOR = 1e-5  # nats: float32 against float32 of other code, of these models


def checked(folder: Path, family: str, layout: str, *flags: str, **variables: str) -> None:
    """Make a model and check it with Megatron-Core on two ranks."""
    model = make(family, folder / "model", head_dim=32, **SHAPES.get(family, {}))
    own = ("--scorer", "megatron", "--scorer-config", layout, "--nproc-per-node", "2")
    asked = ("check", "--model", model, *FEW, *ALONE, *own, *flags, "--out", folder / "run")
    done = mismatch(*asked, timeout=900, **environment() | variables)
    assert (folder / "run" / "report.json").exists(), done.stdout + done.stderr


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE-shaped model, sampled by vLLM, scored under expert parallelism 2."""
    environment()
    return once(tmp_path_factory, "megatron-moe", lambda f: checked(f, "qwen3_moe", "ep=2"))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model under tensor parallelism 2; the engine is transformers', which starts fast."""
    environment()
    own = ("--engine", "transformers")
    return once(tmp_path_factory, "megatron-dense", lambda f: checked(f, "qwen3", "tp=2", *own))


def again(folder: Path, target: Path, layout: str, ranks: int = 2, fault: str = "") -> Any:
    """Return the report of the same tokens in another layout, or with a fault."""
    theirs = shutil.ignore_patterns("fsdp*", "report*", "comparison*", "tokens*", "errors")
    shutil.copytree(folder / "run", target, ignore=theirs)
    own = ("--scorer", "megatron", "--scorer-config", layout)
    variables = environment() | ({"MEGATRON_FAULT": fault} if fault else {})
    done = mismatch("score", target, *own, "--nproc-per-node", ranks, timeout=600, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    done = mismatch("compare", target, timeout=300, **environment())
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return json.loads((target / "report.json").read_text())


def gap(report: Any) -> float:
    """Return the trainer's distance from the reference in float32, nats."""
    sizes = {each["side"]: each["size"]["value"] for each in report["square"]["gaps"]}
    return float(sizes["trainer"])


def require_clean(report: Any, run: Path) -> None:
    """Assert that no check failed, and float32 at its floor in every token.

    A few prompts of a random model may leave a level undecided; they never reach beyond it.
    """
    assert report["verdict"]["status"] in ("healthy", "tolerable", "inconclusive")
    assert [check for check in report["checks"] if check["status"] == "failed"] == []
    assert report["causes"]["ranked"] == []
    assert gap(report) < FLOOR
    passes = [store.load_scoring(run, name).logprobs for name in ("fsdp:fp32", REFERENCE)]
    assert np.abs(passes[0] - passes[1]).max() < 10 * FLOOR


def require_fault(report: Any) -> None:
    """Assert a broken trainer that computes another function."""
    assert report["verdict"]["status"] == "broken", report["verdict"]
    failed = {check["id"] for check in report["checks"] if check["status"] == "failed"}
    assert "implementation-gap-trainer" in failed
    assert "implementation-gap" not in failed  # the engine's
    assert {cause["side"] for cause in report["causes"]["ranked"]} <= {"trainer"}


def test_experts_over_two_ranks_against_vllm(experts: Path) -> None:
    report = json.loads((experts / "run" / "report.json").read_text())
    require_clean(report, experts / "run")
    facts = report["fingerprints"]["fsdp"]
    assert facts["code"].startswith("Megatron-Core 0.16")
    assert (facts["world_size"], facts["dtype"]) == (2, "bf16")
    assert "EP 2" in facts["strategy"]
    assert "alltoall" in facts["strategy"]


@pytest.mark.grid
def test_a_dense_model_with_its_tensors_over_two_ranks(dense: Path) -> None:
    report = json.loads((dense / "run" / "report.json").read_text())
    require_clean(report, dense / "run")
    assert "TP 2" in report["fingerprints"]["fsdp"]["strategy"]


@pytest.mark.grid
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("tp=1", 1), ("tp=2", 2), ("tp=2,ep=2,etp=1", 2), ("tp=2,ep=2", 4), ("pp=2", 2),
        ("ep=2,dispatcher=allgather", 2), ("ep=2,router=fp32", 2), ("ep=2,tp=2,etp=1", 4),
    ],
)  # fmt: skip
def test_every_layout_is_at_the_floor_of_float32(
    experts: Path, layout: str, ranks: int, tmp_path: Path
) -> None:
    report = again(experts, tmp_path / "run", layout, ranks)
    require_clean(report, tmp_path / "run")


OF_EXPERTS = ("dropped", "permuted", "biased")
OF_TENSORS = ("unreduced_rows", "stale")


def test_a_fault_of_one_rank_is_broken_and_on_the_trainers_side(
    dense: Path, tmp_path: Path
) -> None:
    require_fault(again(dense, tmp_path / "run", "tp=2", fault="unreduced_rows"))


@pytest.mark.grid
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", OF_EXPERTS)
def test_faults_under_expert_parallelism(experts: Path, fault: str, tmp_path: Path) -> None:
    require_fault(again(experts, tmp_path / "run", "ep=2", fault=fault))


@pytest.mark.grid
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", OF_TENSORS)
def test_faults_under_tensor_parallelism(dense: Path, fault: str, tmp_path: Path) -> None:
    require_fault(again(dense, tmp_path / "run", "tp=2", fault=fault))


@pytest.mark.grid
@pytest.mark.timeout(1200)
def test_a_check_says_that_a_fault_is_of_the_layout(tmp_path: Path) -> None:
    """One command: the trainer is broken, and right with the whole model on one rank."""
    fault = {"MEGATRON_FAULT": "dropped"}
    checked(tmp_path, "qwen3_moe", "ep=2", "--engine", "transformers", **fault)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    require_fault(report)
    (cause, *_) = report["causes"]["ranked"]
    assert (cause["id"], cause["status"], cause["side"]) == ("tp-layout", "confirmed", "trainer")
    effect = report["layout"]
    assert effect["alone"] < FLOOR < 1000 * FLOOR < effect["spread"]


@pytest.mark.grid
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_another_family_by_the_same_table(family: str, tmp_path: Path) -> None:
    """gpt-oss: sinks, sliding windows, YaRN and biased experts in Megatron-Core's own layers."""
    layout = {"llama": "tp=2", "gpt_oss": "tp=2,ep=2,etp=1"}[family]
    checked(tmp_path, family, layout, "--engine", "transformers")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    require_clean(report, tmp_path / "run")


def test_what_cannot_run_is_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    """A layout that does not fit, and a rank that dies, each with a sentence."""
    environment()
    model = make("qwen3_moe", tmp_path / "model", head_dim=32)
    own = ("check", "--model", model, *FEW, "--engine", "transformers", "--scorer", "megatron")
    misfit = ("--scorer-config", "ep=3", "--nproc-per-node", "3", "--out", tmp_path / "a")
    done = mismatch(*own, *misfit, **environment())
    assert done.returncode == 2
    assert "ep = 3" in done.stderr
    assert not (tmp_path / "a" / "rollout.parquet").exists()


@pytest.mark.grid
@pytest.mark.parametrize(
    ("fault", "said"), [("dies", "error: "), ("unreduced_head", "as a log-probability")]
)
def test_a_rank_that_dies_and_a_probability_above_1_end_the_scoring(
    dense: Path, fault: str, said: str, tmp_path: Path
) -> None:
    """A head without its reduction has sums over a part of the vocabulary alone."""
    theirs = shutil.ignore_patterns("fsdp*", "report*", "comparison*", "tokens*", "errors")
    shutil.copytree(dense / "run", tmp_path / "run", ignore=theirs)
    own = ("--scorer", "megatron", "--scorer-config", "tp=2", "--nproc-per-node", "2")
    variables = environment() | {"MEGATRON_FAULT": fault}
    done = mismatch("score", tmp_path / "run", *own, timeout=300, **variables)
    assert done.returncode == 2
    assert said in done.stderr


def test_an_environment_without_megatron_core_is_refused_before_anything_is_sampled(
    tmp_path: Path,
) -> None:
    model = make("qwen3_moe", tmp_path / "model", head_dim=32)
    own = ("check", "--model", model, *FEW, "--engine", "transformers", "--scorer", "megatron")
    done = mismatch(*own, "--out", tmp_path / "run")
    assert done.returncode == 2
    assert "megatron.core" in done.stderr
    assert not (tmp_path / "run" / "rollout.parquet").exists()
