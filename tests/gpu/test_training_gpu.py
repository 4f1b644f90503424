"""The training side on a real GPU: NCCL, the device's kernels, and its memory.

Each claim is one that the CPU tests hold too; here other kernels must hold it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch.specs import Pass, TrainSpec
from mismatch.training.attention.sink_sdpa import BlockedMask, sink_attention
from mismatch.training.distributed import World
from mismatch.training.load import load
from mismatch.training.logprobs import token_stats
from mismatch.training.score import score_pass
from mismatch.types import Scoring
from tests.checkpoints import make, make_mxfp4, rollout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU: torch sees no CUDA device here"),
]
MIB = 1 << 20
ROLLOUT = rollout()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    paths = {family: make(family, root / family) for family in ("gpt_oss", "qwen3_moe", "llama")}
    return {**paths, "mxfp4": make_mxfp4(root / "mxfp4", root / "mxfp4-plain")}


def _score(world: World, model: Path, **fields: Any) -> Scoring:
    spec = replace(TrainSpec(str(model)), **fields)
    loaded = load(spec, world.mesh, world.device)
    scoring = score_pass(world, loaded, ROLLOUT, Pass("fsdp", spec))
    assert scoring is not None
    return scoring


def _plain(model: Path) -> np.ndarray:
    """Logprobs of plain transformers in float32, a sequence at a time, eager kernels."""
    import transformers

    eager = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    eager.cuda().eval()
    out = []
    masks = np.split(ROLLOUT.action_mask, ROLLOUT.offsets[1:-1])
    for ids, mask in zip(ROLLOUT.sequences(), masks, strict=True):
        row = torch.from_numpy(ids)[None].cuda()
        with torch.no_grad():
            logps = eager(row).logits[0].float().log_softmax(-1)
        picked = logps[:-1].gather(1, row[0, 1:, None])[:, 0]
        out.append(picked.double().cpu().numpy()[mask[1:]])
    return np.concatenate(out)


def test_the_world_runs_on_nccl(world: World) -> None:
    assert world.device.type == "cuda"
    assert torch.distributed.get_backend(world.mesh.get_group()) == "nccl"


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "llama"])
def test_float32_equals_plain_transformers(
    world: World, models: dict[str, Path], family: str
) -> None:
    if family != "llama":  # grouped_mm has no float32 kernel on every GPU
        scoring = _score(world, models[family], dtype="fp32", experts="eager")
    else:
        scoring = _score(world, models[family], dtype="fp32")
    assert np.abs(scoring.logprobs - _plain(models[family])).max() <= 1e-4
    assert scoring.fingerprint["device"] == torch.cuda.get_device_name()


@pytest.mark.parametrize("fields", [{}, {"grad": True}, {"layout": "packing"}])
def test_bf16_is_near_float32(
    world: World, models: dict[str, Path], fields: dict[str, Any]
) -> None:
    low = _score(world, models["gpt_oss"], **fields)
    high = _score(world, models["gpt_oss"], dtype="fp32", experts="eager")
    assert 0 < np.abs(low.logprobs - high.logprobs).mean() < 0.2
    assert low.routing is not None
    assert low.routing.present.all()


def test_released_weights_are_dequantised_on_the_device(
    world: World, models: dict[str, Path]
) -> None:
    fields: dict[str, Any] = {"dtype": "fp32", "experts": "eager"}
    released = _score(world, models["mxfp4"], **fields)
    plain = _score(world, models["mxfp4"].with_name("mxfp4-plain"), **fields)
    assert np.array_equal(released.logprobs, plain.logprobs)


def _attention(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, 8, tokens, 64), (1, 1, tokens, 64), (1, 1, tokens, 64), (8,)]
    return [
        torch.randn(shape, generator=draw, device="cuda", dtype=torch.float32).to(dtype)
        for shape in shapes
    ]


def _by_hand(inputs: list[torch.Tensor]) -> torch.Tensor:
    query, key, value, sinks = (x.double() for x in inputs)
    tokens = query.shape[2]
    future = torch.ones(tokens, tokens, dtype=torch.bool, device="cuda").triu(1)
    scores = (query @ key.transpose(2, 3) / 8).masked_fill(future, -torch.inf)
    scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, -1, tokens, 1)], -1)
    return (scores.softmax(-1)[..., :tokens] @ value).transpose(1, 2)


def _run(inputs: list[torch.Tensor]) -> torch.Tensor:
    tokens = inputs[0].shape[2]
    mask = BlockedMask(tokens, tokens, batch_size=1, device="cuda")
    out, _ = sink_attention(torch.nn.Module(), *inputs[:3], mask, 1 / 8, s_aux=inputs[3])
    return out


@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_the_sink_kernel_and_its_gradients(dtype: torch.dtype, gap: float) -> None:
    leaves = [x.requires_grad_() for x in _attention(700, dtype)]
    ours, wanted = _run(leaves), _by_hand(leaves)
    assert (ours - wanted).abs().max() < gap
    slopes = torch.autograd.grad(ours.double().square().sum(), leaves)
    steep = torch.autograd.grad(wanted.square().sum(), leaves)
    for got, want in zip(slopes, steep, strict=True):
        assert (got.double() - want).norm() < gap * want.norm()


def test_attention_memory_grows_with_the_length() -> None:
    extra = []
    for tokens in (8192, 16384):
        inputs = _attention(tokens, torch.bfloat16)
        with torch.no_grad():
            extra.append(_peak(lambda inputs=inputs: _run(inputs))[1])
    assert extra[1] <= 2.2 * extra[0]
    assert extra[1] < 8 * 16384**2 / 2  # bytes: eager's scores alone are four times that


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logprobs_at_a_real_vocabulary(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(2880, 201_088, bias=False, dtype=dtype, device="cuda")
    hidden = torch.randn(4096, 2880, device="cuda").to(dtype)
    targets = torch.randint(201_088, (4096,), device="cuda")

    def naive() -> torch.Tensor:
        logps = head(hidden).float().log_softmax(-1)
        logps.exp().mul_(logps).sum(-1)
        return logps.gather(-1, targets[:, None])[:, 0]

    with torch.no_grad():
        wanted, much = _peak(naive)
        stats, little = _peak(lambda: token_stats(hidden, targets, head, 201_088))
    assert little <= 0.08 * much
    # The head's matmul may take another kernel for other shapes: float32 sums, bf16 roundings.
    assert (stats.logprobs - wanted).abs().max() <= (1e-4 if dtype == torch.float32 else 0.05)
    assert (stats.logprobs - wanted).abs().mean() <= (1e-5 if dtype == torch.float32 else 1e-3)


def _peak(work: Any) -> tuple[Any, int]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before
