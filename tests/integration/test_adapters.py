"""``--adapter`` through real vLLM: by its own LoRA and merged, and another adapter in the trainer.

vLLM's CPU build applies adapters to dense models alone, so its own LoRA is run on one of those.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mismatch.models import resolve_model
from mismatch.models.weight_states import A, B, write_adapter
from tests.checkpoints import make
from tests.unit.test_lora_adapters import tensors

from .conftest import Run, check_command, run_check

pytestmark = pytest.mark.slow
RANK, ALPHA = 8, 16
FEW = ("--num-prompts", "16", "--samples-per-prompt", "2", "--max-tokens", "64")
ALONE = ("--nproc-per-node", "1", "--no-locate", "--no-explain")
ATTENTION = tuple(f"{name}_proj.weight" for name in "qkvo")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISMATCH_CACHE", str(tmp_path / "cache"))


def adapter_for(
    base: Path,
    target: Path,
    size: float,
    alpha: int = ALPHA,
    ends: tuple[str, ...] = ATTENTION,
) -> Path:
    """Random A and B of the weights with these ends; at ALPHA a change is ``size`` x the weight."""
    generator, weights = torch.Generator().manual_seed(1), {}
    for name, weight in sorted(tensors(base).items()):
        if name.endswith(ends):
            module, (rows, columns) = name.removesuffix(".weight"), weight.shape
            rms = float(weight.float().square().mean().sqrt())
            weights[f"{module}.{A}"] = torch.randn(RANK, columns, generator=generator)
            b = torch.randn(rows, RANK, generator=generator)
            weights[f"{module}.{B}"] = b * size * rms * RANK**0.5 / ALPHA
    return write_adapter(weights, target, r=RANK, lora_alpha=alpha)


def sides(run: Run) -> tuple[str, str]:
    """How each side has its adapter."""
    prints = run.report["fingerprints"]
    return prints["vllm:decode"]["adapter"]["as"], prints["fsdp"]["adapter"]["as"]


def agree(run: Run) -> None:
    """In float32 both sides compute one function, and no check sees different weights."""
    run.require_judged()
    assert run.report["verdict"]["status"] != "broken", run.report["verdict"]["reason"]
    assert run.checks["source-files"] == run.checks["weights-as-loaded"] == "passed"
    assert run.checks.get("implementation-gap", "passed") == "passed"


@pytest.mark.grid
@pytest.mark.parametrize("way", ["own", pytest.param("merged", marks=pytest.mark.grid)])
def test_a_dense_model_agrees_with_its_trainer_either_way(tmp_path: Path, way: str) -> None:
    """An engine that does not merge rounds its adapter's part and the sum: so does its yardstick.

    The head is among the targets, where one more rounding of the logits weighs most.
    """
    base = make("llama", tmp_path / "llama", head_dim=32)
    ends = (*ATTENTION, "lm_head.weight")
    adapter = adapter_for(base, tmp_path / "adapter", 0.5, ends=ends)
    given = ("--model", str(base), "--adapter", str(adapter))
    run = run_check(
        tmp_path / "run", *given, *(() if way == "own" else ("--adapter-as", way)), *FEW, *ALONE
    )
    agree(run)
    assert sides(run) == (way, "merged")
    legs = {leg["side"]: leg for leg in run.report["square"]["legs"]}
    apart = "plain:adapter-apart:bf16" if way == "own" else "plain:bf16"
    assert [legs[side]["plain"] for side in ("engine", "trainer")] == [apart, "plain:bf16"]
    assert run.checks["excess-engine"] == "passed"


@pytest.mark.grid
def test_experts_below_an_adapted_attention_are_served_merged(tmp_path: Path) -> None:
    base = Path(resolve_model("tiny-gpt-oss"))
    adapter = adapter_for(base, tmp_path / "adapter", 1.0)
    run = run_check(tmp_path / "run", "--adapter", str(adapter), *FEW, *ALONE)
    agree(run)
    assert sides(run) == ("merged", "merged")


@pytest.mark.grid
@pytest.mark.parametrize("family", ["llama", "tiny-gpt-oss"])
def test_a_trainer_with_twice_the_alpha_is_broken_by_its_weights(
    tmp_path: Path, family: str
) -> None:
    dense = family == "llama"
    base = make(family, tmp_path / family, head_dim=32) if dense else Path(resolve_model(family))
    one = adapter_for(base, tmp_path / "one", 1.0)
    two = adapter_for(base, tmp_path / "two", 1.0, alpha=2 * ALPHA)
    both = ("--adapter", str(one), "--train-adapter", str(two))
    run = run_check(tmp_path / "run", "--model", str(base), *both, *FEW, *ALONE)
    assert run.report["verdict"]["status"] == "broken"
    assert run.checks["source-files"] == run.checks["weights-as-loaded"] == "failed"
    details = {check["id"]: check["detail"] for check in run.report["checks"]}
    assert "adapter/adapter_config.json" in details["source-files"]
    assert "q_proj.weight" in details["weights-as-loaded"]
    digests = {name: side["adapter"]["digest"] for name, side in run.report["fingerprints"].items()}
    assert digests["vllm:decode"] != digests["fsdp"]


def test_what_an_engine_cannot_is_refused_with_the_flag_that_can(tmp_path: Path) -> None:
    import subprocess

    adapter = adapter_for(Path(resolve_model("tiny-gpt-oss")), tmp_path / "adapter", 1.0)
    flags = ("--adapter", str(adapter), "--adapter-as", "own")
    done = subprocess.run(
        check_command(tmp_path / "run", *flags), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no LoRA kernels" in done.stderr
    assert "--adapter-as merged" in done.stderr
    assert not (tmp_path / "run").exists()
