"""Experts in MXFP4 on the rollout side: real vLLM serves them, the trainer holds the original.

The argument: in float32 nothing but the weights can differ. So the trainer *with the same rounded
weights* has to agree with the engine to 1e-4, and what is left against the original weights is what
the quantisation does, no more and no less.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.gpu_gpt_oss import offline_hub
from mismatch.models import derived, resolve_model
from tests.checkpoints import make, make_mxfp4
from tests.sameness import FLIPS

from .conftest import Run, check_command, run_check

pytestmark = pytest.mark.slow
FLOAT32 = ("--dtype", "fp32", "--train-dtype", "fp32", "--no-noise-floor")
NARROW = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4}
NARROW |= {"num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 8}
FEW = ("--num-prompts", "8", "--samples-per-prompt", "2", "--max-tokens", "24")


@pytest.fixture(scope="module")
def quantised_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    forms = ("--weights", "engine=mxfp4-rounded", "--weights", "effect=mxfp4-rounded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MISMATCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        run = run_check(tmp_path_factory.mktemp("quantised") / "run", *FLOAT32, *FEW, *forms)
    run.require_judged()
    return run


def _comparison(run: Run, left: str, right: str) -> dict[str, float]:
    for comparison in run.report["comparisons"]:
        if (comparison["rollout"], comparison["train"]) == (left, right):
            return {name: metric["value"] for name, metric in comparison["metrics"].items()}
    raise AssertionError(f"no comparison of {left} with {right}")


@pytest.mark.grid
def test_the_trainer_with_the_engines_weights_agrees_with_it(quantised_run: Run) -> None:
    same = _comparison(quantised_run, "vllm:decode", "fsdp:other-weights")
    assert same["logprob_abs_diff_max"] <= 1e-4


@pytest.mark.grid
def test_the_rest_is_the_effect_of_the_weights_seen_from_both_sides(quantised_run: Run) -> None:
    seen = _comparison(quantised_run, "vllm:decode", "fsdp")
    alone = _comparison(quantised_run, "fsdp", "fsdp:other-weights")
    assert seen["logprob_abs_diff_mean"] > 3e-3
    assert alone["logprob_abs_diff_mean"] == pytest.approx(seen["logprob_abs_diff_mean"], rel=1e-2)


@pytest.mark.grid
def test_the_report_says_what_was_asked_for(quantised_run: Run) -> None:
    report = quantised_run.report
    assert quantised_run.checks["weights-as-loaded"] == "warning"
    detail = next(c["detail"] for c in report["checks"] if c["id"] == "weights-as-loaded")
    assert "mxfp4-rounded" in detail
    assert quantised_run.checks["source-files"] == "passed"  # both came from one checkpoint
    assert report["verdict"]["levels"] == "quantised"
    forms = {name: side["weights_form"] for name, side in report["fingerprints"].items()}
    assert forms["vllm:decode"] == forms["fsdp:other-weights"] == "mxfp4-rounded"
    assert forms["fsdp"] == "as-stored"


@pytest.mark.grid
def test_published_experts_are_served_in_bf16_and_equal_the_trainers(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MISMATCH_CACHE", str(tmp_path / "cache"))
        released = derived.derive(Path(resolve_model("tiny-gpt-oss")), "mxfp4")
        (released / derived.RECORD).unlink()  # as if it had been published so
        run = run_check(
            tmp_path / "run",
            *("--model", str(released), "--weights", "engine=bf16"),
            *(*FLOAT32, *FEW, "--no-prefill"),
        )
    run.require_judged()
    assert run.value("logprob_abs_diff_max") <= 1e-4
    assert run.headline["routing"]["routing_disagree_layer"]["value"] <= FLIPS
    assert run.checks["weights-as-loaded"] == "passed"


@pytest.mark.grid
def test_gpt_oss_by_name_is_checked_and_trained_from_a_hub_without_network(tmp_path: Path) -> None:
    """All of the command but its kernels: the id, files in parts, MXFP4, float32 on both sides."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MISMATCH_CACHE", str(tmp_path / "cache"))
        patch.setenv("HF_HOME", str(tmp_path / "hub"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        offline_hub(tmp_path / "hub", NARROW)
        by_name = ("--model", "gpt-oss-20b", "--weights", "engine=bf16")
        run = run_check(tmp_path / "run", *by_name, *FEW)
        run.require_judged()
        square = run.report["square"]
        assert {gap["left"] for gap in square["gaps"]} == {"vllm:fp32", "fsdp:fp32"}
        assert all(gap["size"]["value"] < 1e-5 for gap in square["gaps"])
        assert "routing_disagree_layer" in run.headline["routing"]
        assert run.checks["weights-as-loaded"] == "passed"
        assert not (tmp_path / "cache").exists()  # no engine needed a copy; a loop's trainer does
        steps = ("--steps", "1", "--prompts-per-step", "1", "--no-perfectible")
        loop = ["loop", "--like", str(run.directory), "--out", str(tmp_path / "loop"), *steps]
        command = [sys.executable, "-m", "mismatch", *loop]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = (tmp_path / "loop").glob("**/rows/*.json")
    assert json.loads(row.read_text())["parameters_verified"] > 0


def test_a_cpu_engine_refuses_mxfp4_before_anything_starts(tmp_path: Path) -> None:
    released = make_mxfp4(tmp_path / "released", tmp_path / "plain")
    for flags in (
        ["--model", str(released)],
        ["--model", "tiny-gpt-oss", "--weights", "engine=mxfp4"],
    ):
        command = check_command(tmp_path / "run", *flags)
        done = subprocess.run(command, capture_output=True, text=True, timeout=540)
        assert done.returncode == 2
        assert "MXFP4" in done.stderr
        assert "--weights engine=bf16" in done.stderr
        assert not (tmp_path / "run" / "logs").exists()


@pytest.mark.grid
def test_what_fp8_matrices_cost_is_measured_apart(tmp_path: Path) -> None:
    """The engine serves the values of an FP8 checkpoint, the trainer has the original."""
    original, fp8 = make("qwen3", tmp_path / "original", head_dim=32), tmp_path / "fp8"
    write_fp8(original, fp8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MISMATCH_CACHE", str(tmp_path / "cache"))
        models = ("--model", str(fp8), "--train-model", str(original))
        forms = ("--weights", "engine=bf16", "--weights", "effect=bf16")
        run = run_check(tmp_path / "run", *models, *FLOAT32, *FEW, *forms)
    run.require_judged()
    whole = _comparison(run, "vllm:decode", "fsdp")["logprob_abs_diff_mean"]
    form = _comparison(run, "fsdp", "fsdp:other-weights")["logprob_abs_diff_mean"]
    rest = _comparison(run, "vllm:decode", "fsdp:other-weights")["logprob_abs_diff_max"]
    assert whole > 1e-3
    assert form == pytest.approx(whole, rel=1e-2)
    assert rest <= 1e-4
    assert run.report["verdict"]["levels"] == "quantised"
    assert run.checks["weights-as-loaded"] == "warning"


def write_fp8(source: Path, target: Path) -> None:
    """Store the matrices of the layers in FP8 with scales of 128 x 128 blocks, as DeepSeek-V3."""
    shutil.copytree(source, target)
    (file,) = target.glob("*.safetensors")
    state: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        if not name.endswith("_proj.weight"):
            state[name] = tensor
            continue
        scale = tensor.float().abs().max().reshape(1, 1) / 448
        assert max(tensor.shape) <= 128  # one block
        state[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
        state[f"{name}_scale_inv"] = scale
    save_file(state, file, {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (target / "config.json").write_text(json.dumps(config))
