"""Parameters rest in bf16 where that changes no number, and in float32 everywhere else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from mismatch.specs import Pass, TrainSpec
from mismatch.training import source
from mismatch.training.distributed import World
from mismatch.training.load import load
from mismatch.training.score import score_pass
from mismatch.training.source import buffers_are_fixed, header_dtypes
from mismatch.types import Scoring
from tests.checkpoints import FAMILIES, make, make_mxfp4, rollout
from tests.conftest import grid

COMPUTING = (
    {"dtype": "bf16"},
    {"dtype": "fp32"},
    {"dtype": "fp16"},
    {"dtype": "bf16", "autocast": "bf16", "head_dtype": "fp32"},
)
TOKENS = rollout(((5, 12), (5, 30), (6, 9)))


def scored(world: World, spec: TrainSpec) -> tuple[Scoring, str]:
    loaded = load(spec, world.mesh, world.device)
    scoring = score_pass(world, loaded, TOKENS, Pass("fsdp", spec))
    assert scoring is not None
    dtypes = {parameter.dtype for parameter in loaded.scorer.parameters()}
    assert dtypes == {torch.bfloat16 if loaded.master_dtype == "bf16" else torch.float32}
    assert scoring.fingerprint["master_dtype"] == loaded.master_dtype
    return scoring, loaded.master_dtype


def assert_equal(left: Scoring, right: Scoring) -> None:
    assert np.array_equal(left.logprobs, right.logprobs)
    assert left.entropy is not None
    assert np.array_equal(left.entropy, right.entropy)  # type: ignore[arg-type]
    assert left.fingerprint["weights"] == right.fingerprint["weights"]
    if left.routing is not None and right.routing is not None:
        assert np.array_equal(left.routing.ids, right.routing.ids)


@pytest.mark.parametrize("computing", COMPUTING)
@pytest.mark.parametrize("family", grid(sorted(FAMILIES), "gpt_oss", "llama"))
def test_a_bf16_checkpoint_rests_in_bf16_bit_for_bit(
    world: World, tmp_path: Path, family: str, computing: dict[str, str]
) -> None:
    model = make(family, tmp_path / "model")
    spec = TrainSpec(model=str(model), **computing)  # type: ignore[arg-type]
    ours, dtype = scored(world, spec)
    wide, _ = scored(world, TrainSpec(**{**spec_fields(spec), "master_dtype": "fp32"}))
    assert_equal(ours, wide)
    if family in ("gpt_oss", "llama"):
        assert dtype == "bf16"


def spec_fields(spec: TrainSpec) -> dict[str, object]:
    return {name: getattr(spec, name) for name in TrainSpec.__dataclass_fields__}


@pytest.mark.parametrize("computing", COMPUTING[:2])
def test_dequantised_mxfp4_rests_in_bf16_bit_for_bit(
    world: World, tmp_path: Path, computing: dict[str, str]
) -> None:
    model = make_mxfp4(tmp_path / "released", tmp_path / "plain")
    path = model / "model.safetensors"
    tensors = load_file(path)
    stored = {
        name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items()
    }
    save_file(stored, path, {"format": "pt"})
    spec = TrainSpec(model=str(model), **computing)  # type: ignore[arg-type]
    ours, dtype = scored(world, spec)
    assert dtype == "bf16"
    wide, _ = scored(world, TrainSpec(**{**spec_fields(spec), "master_dtype": "fp32"}))
    assert_equal(ours, wide)


def test_anything_wider_rests_in_fp32(world: World, tmp_path: Path) -> None:
    model = make("llama", tmp_path / "model")
    path = model / "model.safetensors"
    assert header_dtypes(path) == {"BF16"}
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()  # one is enough
    save_file(tensors, path, {"format": "pt"})
    assert scored(world, TrainSpec(model=str(model)))[1] == "fp32"


def test_a_buffer_that_follows_the_dtype_of_loading_keeps_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("llama", tmp_path / "model")
    config = AutoConfig.from_pretrained(model)
    assert buffers_are_fixed(config, False)
    bare = source.skeleton

    def scaled(*arguments: object) -> torch.nn.Module:
        module = bare(*arguments)  # type: ignore[arg-type]
        module.register_buffer("embed_scale", torch.ones(1, dtype=arguments[2]))  # type: ignore
        return module  # type: ignore[no-any-return]

    monkeypatch.setattr(source, "skeleton", scaled)
    assert not buffers_are_fixed(config, False)


def test_a_damaged_file_is_left_to_loading(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\\xff" * 40)
    assert header_dtypes(path) == set()


@pytest.mark.parametrize("family", ["gpt_oss", "llama"])
def test_offloaded_shards_give_the_same_numbers(world: World, tmp_path: Path, family: str) -> None:
    model = make(family, tmp_path / "model")
    spec = TrainSpec(model=str(model))
    ours, _ = scored(world, TrainSpec(**{**spec_fields(spec), "offload": True}))
    assert ours.fingerprint["offload"] is True
    assert_equal(ours, scored(world, spec)[0])
