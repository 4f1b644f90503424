"""Attention with sinks on a real GPU: every fast kernel that is here, against float64.

A kernel that is not installed is skipped visibly, with the reason. What ``auto`` takes, and why the
others were passed over, is printed (``pytest -rA``) and must be right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch.errors import MismatchError
from mismatch.specs import Pass, TrainSpec
from mismatch.training.attention.resolve import (
    OUR_KERNELS,
    has_sinks,
    register_kernels,
    resolve_for,
)
from mismatch.training.attention.sink_sdpa import BlockedMask, sink_attention
from mismatch.training.attention.trial import Geometry, geometry_of, try_kernel
from mismatch.training.distributed import World
from mismatch.training.load import load
from mismatch.training.score import score_pass
from mismatch.training.source import skeleton
from tests.checkpoints import configuration, make, rollout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU: torch sees no CUDA device here"),
]
GPU = torch.device("cuda")
FLASH = "kernels-community/vllm-flash-attn3"
GPT_OSS = Geometry(64, 8, 64, 64, True, True, 0.125)  # gpt-oss-20b's heads
ODD = Geometry(6, 2, 24, 16, True, True, 0.3)
MIB = 1 << 20


@pytest.fixture(scope="module")
def model() -> Any:
    register_kernels()
    return skeleton(configuration("gpt_oss", head_dim=64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("geometry", [GPT_OSS, ODD])
def test_sink_sdpa_is_right(model: Any, geometry: Geometry, dtype: torch.dtype) -> None:
    trial = try_kernel(OUR_KERNELS["sink-sdpa"], geometry, GPU, dtype)
    assert trial.passed, trial
    assert set(trial.gradients) == {"q", "k", "v", "sinks"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_attention_is_right(model: Any, dtype: torch.dtype) -> None:
    trial = try_kernel("flex_attention", GPT_OSS, GPU, dtype)
    if trial.fault.startswith("it does not run"):
        pytest.skip(f"not applicable: {trial.fault}")
    assert trial.passed, trial


def test_flash_attention_3_is_right_forward(model: Any) -> None:
    try:
        chosen = resolve_for(FLASH, model)
    except MismatchError as error:
        pytest.skip(f"not applicable: {error.message}")
    trial = try_kernel(chosen.implementation, GPT_OSS, GPU, torch.bfloat16)
    if trial.fault.startswith("it does not run"):
        pytest.skip(f"not applicable: {trial.fault}")
    print(f"{FLASH}: {trial}")  # its backward pass may be wrong
    assert not trial.fault


def test_transformers_sdpa_drops_the_sinks(model: Any) -> None:
    trial = try_kernel("sdpa", GPT_OSS, GPU, torch.bfloat16)
    assert "output off by" in trial.fault


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_takes_a_right_kernel(model: Any, dtype: torch.dtype) -> None:
    choice = resolve_for("auto", model, GPU, dtype)
    print(f"{dtype}: {choice.label}; {'; '.join(choice.tried)}")
    assert choice.honours_sinks
    assert choice.tried
    assert try_kernel(choice.implementation, geometry_of(model, True), GPU, dtype).passed
    assert choice.implementation == OUR_KERNELS["sink-sdpa"]


def test_the_choice_is_recorded(world: World, tmp_path: Path) -> None:
    spec = TrainSpec(str(make("gpt_oss", tmp_path / "model")))
    loaded = load(spec, world.mesh, world.device)
    assert has_sinks(loaded.scorer.model)
    scoring = score_pass(world, loaded, rollout(), Pass("fsdp", spec))
    assert scoring is not None
    assert scoring.fingerprint["attention"] == loaded.attention.label
    assert scoring.fingerprint["attention_candidates"] == list(loaded.attention.tried)
    assert len(loaded.attention.tried) >= 1


def test_long_rows_train_in_linear_memory() -> None:
    peaks = []
    for tokens in (8192, 16384):
        draw = torch.Generator(GPU).manual_seed(0)
        shapes = [(1, 16, tokens, 64), (1, 2, tokens, 64), (1, 2, tokens, 64), (16,)]
        leaves = [
            torch.randn(shape, generator=draw, device=GPU).bfloat16().requires_grad_()
            for shape in shapes
        ]
        mask = BlockedMask(tokens, tokens, batch_size=1, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out, _ = sink_attention(torch.nn.Module(), *leaves[:3], mask, 0.125, s_aux=leaves[3])
        out.square().sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        assert all(leaf.grad is not None for leaf in leaves)
        del out, leaves, mask
    assert peaks[1] < 2.2 * peaks[0]
    assert peaks[1] < 600 * MIB  # scores alone would be 8 GiB
