"""The policy gradient under FSDP2 is the loss's derivative, as plain transformers has it.

By transitivity: in float32 it equals autograd through the model's own forward, one sequence at a
time, and finite differences of the loss; whatever the micro-batches. Worlds of two ranks are in
tests/integration/test_gradients.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from mismatch.errors import MismatchError
from mismatch.features.gradients.plan import GradientPlan, Planned, choose_batch
from mismatch.features.gradients.worker import accumulated, group_of, take
from mismatch.run import store
from mismatch.specs import Pass, Sampling, TrainSpec
from mismatch.training import backward
from mismatch.training.distributed import World
from mismatch.training.load import LoadedModel, load
from mismatch.training.routing.replay import ReplaySource
from mismatch.training.score import score_pass
from tests.checkpoints import make, rollout

TEMPERATURE = 0.7
STEP = 1e-2
ROLLOUT = rollout(
    ((5, 12), (5, 20), (6, 0), (6, 9), (4, 7), (9, 30)), sampling=Sampling(temperature=TEMPERATURE)
)
BATCH = choose_batch(ROLLOUT, 16, 0)


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


@dataclass
class Gradient:
    """What was taken, and the gradient itself."""

    sums: dict[str, tuple[float, float]]
    parts: dict[str, torch.Tensor]


def taken(
    world: World,
    loaded: LoadedModel,
    spec: TrainSpec,
    reference: Gradient | None = None,
    source: ReplaySource | None = None,
) -> Gradient:
    parts = {} if reference is None else reference.parts
    planned = Planned("reference" if reference is None else "baseline", "here", spec)
    sums = accumulated(world, loaded, ROLLOUT, planned, BATCH, source, parts)
    assert all(parameter.grad is None for parameter in loaded.scorer.parameters())
    return Gradient(sums, parts)


def loss_of(
    world: World, loaded: LoadedModel, spec: TrainSpec, source: ReplaySource | None
) -> float:
    """The loss, from the log-probabilities of a pass without gradients."""
    scored = score_pass(world, loaded, ROLLOUT, Pass("here", replace(spec, grad=False)), source)
    assert scored is not None
    return -float((BATCH.coefficients * scored.logprobs).sum())


def plain_gradient(model: str) -> dict[str, torch.Tensor]:
    """Autograd of plain transformers: whole logits, one sequence at a time."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    masks, total = np.split(ROLLOUT.action_mask, ROLLOUT.offsets[1:-1]), torch.zeros(())
    coefficients = iter(BATCH.coefficients)
    for ids, mask in zip(ROLLOUT.sequences(), masks, strict=True):
        tokens = torch.from_numpy(ids)
        logps = (loaded(tokens[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        for index in np.flatnonzero(mask):
            total = total - float(next(coefficients)) * logps[index - 1, tokens[index]]
    total.backward()
    return {n: p.grad for n, p in loaded.named_parameters() if p.grad is not None}


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
    wanted = plain_gradient(models[model])
    assert set(gradient.parts) == {f"model.{name}" for name in wanted}
    squares = dict.fromkeys(gradient.sums, 0.0)
    for name, theirs in wanted.items():
        ours = gradient.parts[f"model.{name}"].view(theirs.shape)
        assert float((ours - theirs).norm()) <= 2e-5 * float(theirs.norm()), name
        squares[group_of(name)] += float(theirs.double().square().sum())
    for group, (squared, dot) in gradient.sums.items():
        assert squared == dot == pytest.approx(squares[group], rel=1e-4), group


def slope_along(
    world: World,
    loaded: LoadedModel,
    spec: TrainSpec,
    gradient: Gradient,
    source: ReplaySource | None,
    group: str,
) -> tuple[float, float]:
    """Change of the loss along a group's gradient, of length 1; and the gradient's length there.

    Replayed routes keep experts from changing on the way: a loss that jumps has no slope.
    """
    parts = {
        name: part for name, part in gradient.parts.items() if group in ("all", group_of(name))
    }
    length = float(np.sqrt(sum(float(part.double().square().sum()) for part in parts.values())))
    losses = []
    for step in (STEP, -2 * STEP, STEP):  # there, to the other side, and back
        with torch.no_grad():
            for name, parameter in loaded.scorer.named_parameters():
                if name in parts:
                    local = parameter.to_local()  # type: ignore[attr-defined]
                    local += step / length * parts[name].view(local.shape)
        losses.append(loss_of(world, loaded, spec, source))
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
    assert {"sinks", "router", "experts", "head"} <= set(gradient.sums)
    for group in (*gradient.sums, "all"):
        slope, length = slope_along(world, loaded, spec, gradient, source, group)
        assert slope == pytest.approx(length, rel=0.01, abs=1e-3), group


def test_the_product_is_that_of_the_whole_gradients(world: World, models: dict[str, str]) -> None:
    spec = spec_of(models["gpt_oss"])
    reference = taken(world, load(spec, world.mesh, world.device), spec)
    low = replace(spec, dtype="bf16")
    loaded = load(low, world.mesh, world.device)
    alone, beside = taken(world, loaded, low), taken(world, loaded, low, reference)
    dots = dict.fromkeys(beside.sums, 0.0)
    for name, ours in alone.parts.items():
        dots[group_of(name)] += float(ours.double() @ reference.parts[name].double())
    for group, (squared, dot) in beside.sums.items():
        assert squared == pytest.approx(alone.sums[group][0])
        assert dot == pytest.approx(dots[group])


def test_without_sinks_they_get_no_gradient(world: World, models: dict[str, str]) -> None:
    right = spec_of(models["gpt_oss"])
    reference = taken(world, load(right, world.mesh, world.device), right)
    wrong = replace(right, attention="no-sinks")
    gradient = taken(world, load(wrong, world.mesh, world.device), wrong, reference)
    assert gradient.sums["sinks"] == (0.0, 0.0)
    assert reference.sums["sinks"][0] > 0.0
    squared, dot = (sum(part) for part in zip(*gradient.sums.values(), strict=True))
    assert dot / np.sqrt(squared * sum(both[0] for both in reference.sums.values())) < 0.99


@pytest.mark.slow
def test_replayed_routes_hold_in_the_backward_pass(world: World, models: dict[str, str]) -> None:
    plain = replace(spec_of(models["qwen3_moe"]), routing=True, grad=False)
    loaded = load(plain, world.mesh, world.device)
    scored = score_pass(world, loaded, ROLLOUT, Pass("vllm:decode", plain))
    assert scored is not None
    spec = spec_of(models["qwen3_moe"], replay_routing="ids")
    own_routes = ReplaySource.of(scored, "ids", ROLLOUT)
    own = taken(world, loaded, spec, source=own_routes)
    free = taken(world, loaded, spec_of(models["qwen3_moe"]))
    for name, part in free.parts.items():
        assert torch.equal(part, own.parts[name]), name
    # Other routes: the gradient is that of the loss with those routes, by finite differences.
    assert scored.routing is not None
    others = replace(scored.routing, ids=(scored.routing.ids + 3) % 8)
    source = ReplaySource.of(replace(scored, routing=others), "ids", ROLLOUT)
    gradient = taken(world, loaded, spec, source=source)
    assert (
        abs(loss_of(world, loaded, spec, source) - loss_of(world, loaded, spec, own_routes)) > 1e-3
    )
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
    gradient = taken(world, loaded, spec, reference)
    for group, (squared, dot) in gradient.sums.items():
        exact = reference.sums[group][0]
        assert squared / exact == pytest.approx(1.0, abs=0.02), group
        assert dot / np.sqrt(squared * exact) > 0.999, group


# ---------------------------------------------------------------- all passes of a plan


def plan_of(model: str, *fixes: Planned) -> GradientPlan:
    high, low = spec_of(model), spec_of(model, dtype="bf16")
    return GradientPlan(
        (Planned("reference", "", high), Planned("baseline", "", low), *fixes), 16, 0
    )


@pytest.mark.slow
def test_a_pass_that_fails_says_why_and_the_others_go_on(
    world: World, models: dict[str, str], tmp_path: Path
) -> None:
    store.save_rollout(tmp_path, ROLLOUT)
    tied = models["tied"]
    fixes = (
        Planned("blind", "", spec_of(tied, attention="no-sinks")),
        Planned("head", "", spec_of(tied, dtype="bf16", head_dtype="fp32")),
    )
    result = take(world, tmp_path, ROLLOUT, plan_of(tied, *fixes), BATCH)
    assert [*result.sums] == ["reference", "baseline", "head"]
    assert result.failed.keys() == {"blind"}
    assert "attention sinks" in result.failed["blind"]


def test_fixes_stop_where_the_budget_is_used_up(
    world: World, models: dict[str, str], tmp_path: Path
) -> None:
    fix = Planned("head", "", spec_of(models["tied"], head_dtype="fp32"))
    result = take(world, tmp_path, ROLLOUT, plan_of(models["tied"], fix), BATCH, 0.0)
    assert [*result.sums] == ["reference", "baseline"]
    assert "budget" in result.failed["head"]


def test_a_reference_that_is_not_finite_ends_it(
    world: World, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward.Backward, "finite", lambda self: False)
    with pytest.raises(MismatchError, match="not finite"):
        take(world, tmp_path, ROLLOUT, plan_of(models["tied"]), BATCH)
