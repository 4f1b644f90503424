"""The policy gradient under FSDP2 is the loss's derivative, as plain transformers has it.

By transitivity: in float32 it equals autograd through the model's own forward, one sequence at a
time, and finite differences of the loss; whatever the micro-batches. Worlds of two ranks are in
tests/integration/test_training_world.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
import transformers

from mismatch.errors import MismatchError
from mismatch.experiments.gradients.coefficients import choose_batch, normalised
from mismatch.specs import Pass, Sampling, TrainSpec
from mismatch.training import backward, gradients
from mismatch.training.distributed import World
from mismatch.training.gradients import (
    BatchGradient,
    GradientJob,
    GradientSum,
    batch_gradient,
    group_of,
    require_memory,
)
from mismatch.training.load import LoadedModel, load
from mismatch.training.routing.replay import ReplaySource
from mismatch.training.score import score_pass
from mismatch.training.scorer import ForwardOptions
from mismatch.types import Rollout
from tests.checkpoints import make, rollout

TEMPERATURE = 0.7
STEP = 1e-2
ROLLOUT = rollout(
    ((5, 12), (5, 20), (6, 0), (6, 9), (4, 7), (9, 30)), sampling=Sampling(temperature=TEMPERATURE)
)
BATCH = choose_batch(ROLLOUT, 16, 0)
COEFFICIENTS = normalised(BATCH, ROLLOUT.sequence_of_token[ROLLOUT.actions], "token")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World.start()
    yield world
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    paths = {family: make(family, root / family) for family in ("gpt_oss", "qwen3_moe")}
    paths["tied"] = make("qwen3", root / "tied", tie_word_embeddings=True)
    return {name: str(path) for name, path in paths.items()}


def spec_of(model: str, **fields: Any) -> TrainSpec:
    return TrainSpec(
        model, **{"dtype": "fp32", "master_dtype": "fp32", "grad": True, "routing": False, **fields}
    )


def taken(
    world: World,
    loaded: LoadedModel,
    spec: TrainSpec,
    reference: GradientSum | None = None,
    source: ReplaySource | None = None,
    of: Rollout = ROLLOUT,
) -> BatchGradient:
    work = GradientJob(COEFFICIENTS, BATCH.prompts, Pass("here", spec), source)
    return batch_gradient(world, loaded, of, work, reference)


def plain_gradient(model: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Autograd of plain transformers: whole logits, one sequence at a time."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    masks, total = np.split(ROLLOUT.action_mask, ROLLOUT.offsets[1:-1]), torch.zeros(())
    coefficients = iter(COEFFICIENTS)
    for ids, mask in zip(ROLLOUT.sequences(), masks, strict=True):
        tokens = torch.from_numpy(ids)
        logps = (loaded(tokens[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        for index in np.flatnonzero(mask):
            total = total - float(next(coefficients)) * logps[index - 1, tokens[index]]
    total.backward()
    gradients = {n: p.grad for n, p in loaded.named_parameters() if p.grad is not None}
    return float(total.detach()), gradients


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("gpt_oss", {}),
        ("gpt_oss", {"micro_batch_tokens": 40}),
        ("qwen3_moe", {"layout": "packing"}),
        ("tied", {}),
    ],
)
def test_float32_equals_plain_autograd(
    world: World, models: dict[str, str], model: str, fields: dict[str, Any]
) -> None:
    spec = spec_of(models[model], **fields)
    gradient = taken(world, load(spec, world.mesh, world.device), spec)
    value, wanted = plain_gradient(models[model])
    assert gradient.loss == pytest.approx(value, rel=1e-5)
    assert set(gradient.total.parts) == {f"model.{name}" for name in wanted}
    for name, theirs in wanted.items():
        ours = gradient.total.parts[f"model.{name}"].view(theirs.shape)
        assert float((ours - theirs).norm()) <= 2e-5 * float(theirs.norm()), name
    squares = dict.fromkeys(gradient.groups, 0.0)
    for name, theirs in wanted.items():
        squares[group_of(name)] += float(theirs.double().square().sum())
    assert gradient.squared_norm == pytest.approx(list(squares.values()), rel=1e-4)


def slope_along(
    world: World,
    loaded: LoadedModel,
    spec: TrainSpec,
    gradient: BatchGradient,
    source: ReplaySource | None,
    group: str,
) -> tuple[float, float]:
    """Change of the loss along a group's gradient, of length 1; and the gradient's length there.

    Replayed routes keep experts from changing on the way: a loss that jumps has no slope.
    """
    parts = {
        name: part
        for name, part in gradient.total.parts.items()
        if group in ("all", group_of(name))
    }
    length = float(np.sqrt(sum(float(part.double().square().sum()) for part in parts.values())))
    losses = []
    for step in (STEP, -2 * STEP, STEP):  # there, to the other side, and back
        with torch.no_grad():
            for name, parameter in loaded.scorer.named_parameters():
                if name in parts:
                    local = parameter.to_local()  # type: ignore[attr-defined]
                    local += step / length * parts[name].view(local.shape)
        losses.append(taken(world, loaded, spec, source=source).loss)
    return (losses[0] - losses[1]) / (2 * STEP), length


@pytest.mark.slow
def test_finite_differences_agree_in_every_group(world: World, models: dict[str, str]) -> None:
    plain = replace(spec_of(models["gpt_oss"]), routing=True, grad=False)
    loaded = load(plain, world.mesh, world.device)
    scored = score_pass(world, loaded, ROLLOUT, Pass("vllm:decode", plain))
    assert scored is not None
    spec = spec_of(models["gpt_oss"], replay_routing="ids")
    source = ReplaySource.of(scored, "ids", ROLLOUT)
    gradient = taken(world, loaded, spec, source=source)
    assert {"sinks", "router", "experts", "head"} <= set(gradient.groups)
    for group in (*gradient.groups, "all"):
        slope, length = slope_along(world, loaded, spec, gradient, source, group)
        assert slope == pytest.approx(length, rel=0.01, abs=1e-3), group


def test_dot_and_sketches_are_those_of_the_whole_gradient(
    world: World, models: dict[str, str]
) -> None:
    spec = spec_of(models["gpt_oss"])
    reference = taken(world, load(spec, world.mesh, world.device), spec)
    assert reference.dot is None
    low = replace(spec, dtype="bf16")
    gradient = taken(world, load(low, world.mesh, world.device), low, reference.total.on_host())
    assert gradient.squared_norm_reference == pytest.approx(reference.squared_norm)
    assert gradient.dot is not None
    away, dots = 0.0, 0.0
    for name, ours in gradient.total.parts.items():
        theirs = reference.total.parts[name].double()
        dots += float(ours.double() @ theirs)
        away += float((ours.double() - theirs).square().sum())
    assert gradient.dot.sum() == pytest.approx(dots)
    exact = (
        gradient.squared_norm.sum() - 2 * gradient.dot.sum() + gradient.squared_norm_reference.sum()
    )
    assert exact == pytest.approx(away, rel=1e-6)
    # Prompt by prompt, the sketches of the difference estimate it too, better than its size.
    assert len(gradient.sketches) == len(BATCH.prompts)
    difference = (gradient.sketches - reference.sketches).sum(axis=0)
    assert (difference**2).sum() == pytest.approx(away, rel=0.15)
    assert (gradient.sketches**2).sum(axis=(1, 2)).min() > 0
    assert gradient.seconds is not None
    assert gradient.peak_bytes is not None


def test_each_sketch_is_its_own_prompts(world: World, models: dict[str, str]) -> None:
    spec = spec_of(models["gpt_oss"])
    loaded = load(spec, world.mesh, world.device)
    whole = taken(world, loaded, spec)
    selected = np.where(
        ROLLOUT.prompt_index[ROLLOUT.sequence_of_token[ROLLOUT.actions]] == BATCH.prompts[1],
        COEFFICIENTS,
        0.0,
    )
    work = GradientJob(selected, BATCH.prompts, Pass("here", spec))
    alone = batch_gradient(world, loaded, ROLLOUT, work)
    assert np.abs(alone.sketches[[0, 2]]).max() == 0.0  # no coefficient, no work
    assert alone.sketches[1] == pytest.approx(whole.sketches[1], abs=1e-9)


def test_without_sinks_they_get_no_gradient(world: World, models: dict[str, str]) -> None:
    right = spec_of(models["gpt_oss"])
    reference = taken(world, load(right, world.mesh, world.device), right)
    wrong = replace(right, attention="no-sinks")
    gradient = taken(world, load(wrong, world.mesh, world.device), wrong, reference.total)
    sinks = gradient.groups.index("sinks")
    assert gradient.squared_norm_reference is not None
    assert gradient.dot is not None
    assert gradient.squared_norm[sinks] == 0.0 < gradient.squared_norm_reference[sinks]
    cosine = gradient.dot.sum() / np.sqrt(
        gradient.squared_norm.sum() * gradient.squared_norm_reference.sum()
    )
    assert cosine < 0.99


@pytest.mark.slow
def test_replayed_routes_hold_in_the_backward_pass(world: World, models: dict[str, str]) -> None:
    plain = replace(spec_of(models["qwen3_moe"]), routing=True, grad=False)
    loaded = load(plain, world.mesh, world.device)
    scored = score_pass(world, loaded, ROLLOUT, Pass("vllm:decode", plain))
    assert scored is not None
    spec = spec_of(models["qwen3_moe"], replay_routing="ids")
    own = taken(world, loaded, spec, source=ReplaySource.of(scored, "ids", ROLLOUT))
    free = taken(world, loaded, spec_of(models["qwen3_moe"]))
    for name, part in free.total.parts.items():
        assert torch.equal(part, own.total.parts[name]), name
    # Other routes: the gradient is that of the loss with those routes, by finite differences.
    assert scored.routing is not None
    others = replace(scored.routing, ids=(scored.routing.ids + 3) % 8)
    source = ReplaySource.of(replace(scored, routing=others), "ids", ROLLOUT)
    gradient = taken(world, loaded, spec, source=source)
    assert abs(gradient.loss - own.loss) > 1e-3
    slope, length = slope_along(world, loaded, spec, gradient, source, "all")
    assert slope == pytest.approx(length, rel=0.01)


@pytest.mark.slow
def test_fp16_backs_off_from_a_scale_that_overflows(
    world: World, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = spec_of(models["gpt_oss"])
    reference = taken(world, load(right, world.mesh, world.device), right)
    spec = replace(right, dtype="fp16")
    loaded = load(spec, world.mesh, world.device)
    monkeypatch.setattr(backward, "LOSS_SCALE", 2.0**40)
    gradient = taken(world, loaded, spec, reference.total)
    assert 1.0 <= gradient.loss_scale < 2.0**40
    assert gradient.dot is not None
    assert gradient.squared_norm_reference is not None
    ratio = gradient.squared_norm.sum() / gradient.squared_norm_reference.sum()
    assert ratio == pytest.approx(1.0, abs=0.01)
    assert gradient.loss == pytest.approx(reference.loss, rel=1e-2)


def test_a_gradient_that_is_not_finite_is_refused(
    world: World, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(models["tied"])
    loaded = load(spec, world.mesh, world.device)
    named = loaded.scorer.named_parameters()
    parameter = next(weight for name, weight in named if name.endswith("o_proj.weight"))
    with torch.no_grad():
        parameter.to_local().fill_(float("nan"))  # type: ignore[attr-defined]
    monkeypatch.setattr(
        gradients,
        "prepare_pass",
        lambda *given: (ForwardOptions(Sampling(TEMPERATURE)), ""),
    )
    with pytest.raises(MismatchError, match="gradient of prompt"):
        taken(world, loaded, spec)
    assert all(p.grad is None for p in loaded.scorer.parameters())


def test_what_does_not_fit_is_refused_with_its_size(
    world: World, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(spec_of(models["tied"]), world.mesh, world.device)
    require_memory(world, loaded)
    total = sum(parameter.numel() for parameter in loaded.scorer.parameters())
    memory = type("Memory", (), {"available": 3 * 4 * total - 1})()  # the reference's, two at work
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    with pytest.raises(MismatchError, match=f"gradients of {total:,} parameters need"):
        require_memory(world, loaded)
