"""The optimiser's step under FSDP2 is AdamW's on the whole model; checkpoints bring it back."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mismatch.errors import MismatchError
from mismatch.features.loop.optimiser import BETAS, PolicyOptimiser, export
from mismatch.models.weight_states import Checkpoint
from mismatch.specs import Pass, Sampling, TrainSpec
from mismatch.training.backward import Backward
from mismatch.training.distributed import World
from mismatch.training.load import LoadedModel, load
from mismatch.training.validate import prepare_pass
from mismatch.types import Floats, Ints
from tests.checkpoints import make, make_mxfp4, rollout

pytestmark = pytest.mark.slow
ROLLOUT = rollout(((5, 12), (6, 9)), sampling=Sampling())
COEFFICIENTS = np.random.default_rng(0).normal(0, 0.05, ROLLOUT.n_actions)
RATE, NORM = 1e-2, 0.05


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make("gpt_oss", tmp_path_factory.mktemp("models") / "gpt_oss"))


def passes(world: World, loaded: LoadedModel, values: Floats = COEFFICIENTS) -> Backward:
    def coefficients(actions: Ints, logprobs: Floats) -> Floats:
        return values[actions]

    pass_ = Pass("here", loaded.spec)
    options, _ = prepare_pass(world, loaded, ROLLOUT, pass_.spec, None)
    return Backward(world, loaded, ROLLOUT, pass_, options, coefficients)


def fresh(
    world: World, model: Path, attention: str = "auto"
) -> tuple[LoadedModel, PolicyOptimiser]:
    spec = TrainSpec(
        str(model), dtype="fp32", master_dtype="fp32", attention=attention, grad=True, routing=False
    )
    loaded = load(spec, world.mesh, world.device)
    return loaded, PolicyOptimiser(world, loaded, RATE, NORM)


def weights(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    held = loaded.scorer.model.state_dict()
    return {name: tensor.full_tensor().clone() for name, tensor in held.items()}


def plain_steps(model: Path, count: int) -> dict[str, torch.Tensor]:
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    optimiser = torch.optim.AdamW(whole.parameters(), RATE, BETAS, weight_decay=0.0)
    masks = np.split(ROLLOUT.action_mask, ROLLOUT.offsets[1:-1])
    for _ in range(count):
        values, total = iter(COEFFICIENTS), torch.zeros(())
        for ids, mask in zip(ROLLOUT.sequences(), masks, strict=True):
            tokens = torch.from_numpy(ids)
            logps = whole(tokens[None]).logits[0].log_softmax(-1)
            for index in np.flatnonzero(mask):
                total = total - float(next(values)) * logps[index - 1, tokens[index]]
        optimiser.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), NORM)
        optimiser.step()
    return dict(whole.state_dict())


def test_a_step_is_that_of_adamw_and_a_checkpoint_brings_it_back(
    world: World, model: Path, tmp_path: Path
) -> None:
    loaded, optimiser = fresh(world, model)
    first = optimiser.step(passes(world, loaded), [0, 1])
    assert first is not None
    assert first[1] > NORM
    optimiser.save(tmp_path / "000001")
    second = optimiser.step(passes(world, loaded), [0, 1])
    held, expected = weights(loaded), plain_steps(model, 2)
    for name, tensor in expected.items():
        assert torch.allclose(held[name], tensor, atol=RATE / 50), name

    again, other = fresh(world, model)
    other.load(tmp_path / "000001")
    assert other.step(passes(world, again), [0, 1]) == second
    assert all(torch.equal(tensor, weights(again)[name]) for name, tensor in held.items())

    export(world, again, model, tmp_path / "out", torch.bfloat16)
    written = dict(Checkpoint(tmp_path / "out", 0).tensors(0))
    assert written.keys() == dict(Checkpoint(model, 0).tensors(0)).keys()
    assert all(torch.equal(t, held[name].bfloat16()) for name, t in written.items())


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gemma3"])
def test_the_export_has_the_names_and_values_of_the_base(
    world: World, tmp_path: Path, family: str
) -> None:
    """Files hold a layer's experts apart, transformers holds them fused."""
    base = make(family, tmp_path / "base")
    loaded = load(TrainSpec(str(base), routing=False), world.mesh, world.device)
    export(world, loaded, base, tmp_path / "out", torch.bfloat16)
    written, wanted = (dict(Checkpoint(p, 0).tensors(0)) for p in (tmp_path / "out", base))
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in wanted.items())


def test_packed_experts_are_exported_in_bf16(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISMATCH_CACHE", str(tmp_path / "cache"))
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    make_mxfp4(packed, plain)
    spec = TrainSpec(str(packed), routing=False, weights="bf16")
    loaded = load(spec, world.mesh, world.device)
    assert loaded.directory is not None
    export(world, loaded, loaded.directory, tmp_path / "out", torch.bfloat16)
    written, wanted = (dict(Checkpoint(p, 0).tensors(0)) for p in (tmp_path / "out", plain))
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], tensor.bfloat16()) for name, tensor in wanted.items())


def test_a_name_that_no_parameter_becomes_is_refused(
    world: World, model: Path, tmp_path: Path
) -> None:
    loaded = load(TrainSpec(str(model)), world.mesh, world.device)
    base = tmp_path / "base"
    shutil.copytree(model, base)
    tensors = load_file(base / "model.safetensors")
    tensors["model.other.weight"] = torch.ones(1)
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(MismatchError, match=r"model\.other\.weight"):
        export(world, loaded, base, tmp_path / "out", torch.bfloat16)


def test_a_checkpoint_without_moments_of_parameters_that_get_no_gradient(
    world: World, model: Path, tmp_path: Path
) -> None:
    loaded, optimiser = fresh(world, model, attention="no-sinks")
    assert optimiser.step(passes(world, loaded), [0, 1]) is not None
    optimiser.save(tmp_path / "000001")
    second = optimiser.step(passes(world, loaded), [0, 1])
    again, other = fresh(world, model, attention="no-sinks")
    other.load(tmp_path / "000001")
    assert other.step(passes(world, again), [0, 1]) == second
    held = weights(loaded)
    assert all(torch.equal(tensor, held[name]) for name, tensor in weights(again).items())


def test_what_is_not_finite_changes_nothing(world: World, model: Path) -> None:
    loaded, optimiser = fresh(world, model)
    before = weights(loaded)
    broken = np.where(np.arange(len(COEFFICIENTS)) == 3, np.nan, COEFFICIENTS)
    assert optimiser.step(passes(world, loaded, broken), [0, 1]) is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(loaded).items())
    assert optimiser.step(passes(world, loaded), [0, 1]) is not None
    assert any(not torch.equal(t, before[name]) for name, t in weights(loaded).items())
