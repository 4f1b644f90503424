"""What a check's gradients are of: the batch with its coefficients, and the passes, each once."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest

from mismatch.codec import from_json
from mismatch.errors import EmptyComparison, MismatchError
from mismatch.experiments.fixes.context import Context, ModelFacts
from mismatch.features.gradients.plan import REWARDS, GradientPlan, choose_batch, plan_gradients
from mismatch.features.gradients.worker import GROUPS, group_of
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, TrainSpec
from mismatch.types import Rollout
from tests.checkpoints import rollout

# Two samples of 2 and 4 action tokens, then two of 3 and 1.
LENGTHS = (2, 4, 3, 1)
SIGN = 1.0 / (np.sqrt(0.5) + 1e-6) / 2.0  # rewards 1 and 0: (1 - 1/2) / (std + 1e-6)


def rollout_of(rewards: list[float] | None = None) -> Rollout:
    base = rollout(((2, 2), (2, 4), (3, 3), (3, 1)))
    return replace(base, rewards=None if rewards is None else np.array(rewards))


def test_prompts_that_decide_come_first_and_normalise_alone() -> None:
    decided = choose_batch(rollout_of([1.0, 0.0, 0.0, 1.0]), 16, 0)
    signs = np.repeat([SIGN, -SIGN, -SIGN, SIGN], LENGTHS)
    assert decided.coefficients == pytest.approx(signs / 10)
    assert (decided.advantages, decided.deciding, decided.sequences) == (REWARDS, 2, 4)
    half = rollout_of([1.0, 1.0, 0.0, 1.0])  # only the second prompt decides
    for seed in range(4):
        batch = choose_batch(half, 1, seed)
        assert (batch.prompts.tolist(), batch.deciding, batch.tokens) == ([1], 1, 4)
        assert batch.coefficients == pytest.approx(np.repeat([0, 0, -SIGN, SIGN], LENGTHS) / 4)
    both = choose_batch(half, 16, 0)
    assert (both.prompts.tolist(), both.deciding) == ([1, 0], 1)
    assert both.coefficients == pytest.approx(np.repeat([0, 0, -SIGN, SIGN], LENGTHS) / 10)


def test_the_seed_chooses_the_prompts() -> None:
    many = replace(rollout(((2, 2),) * 40), rewards=np.tile([0.0, 1.0], 20))
    chosen = [choose_batch(many, 5, seed).prompts.tolist() for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert all(len(set(prompts)) == 5 for prompts in chosen)


@pytest.mark.parametrize("rewards", [None, [1.0, 1.0, 0.0, 0.0], [np.nan] * 4])
def test_without_deciding_rewards_advantages_are_centred_signs(rewards: list[float] | None) -> None:
    batch = choose_batch(rollout_of(rewards), 16, 0)
    assert batch.advantages != REWARDS
    assert batch.deciding == 2
    ends = np.cumsum(LENGTHS) - 1
    signs = 10 * batch.coefficients[ends]
    assert sorted(signs[:2]) == sorted(signs[2:]) == pytest.approx([-1.0, 1.0])
    odd = replace(rollout(((2, 2),) * 3), prompt_index=np.zeros(3, np.int64))
    coefficients = choose_batch(odd, 16, 0).coefficients
    assert coefficients.sum() == pytest.approx(0.0)
    assert 6 * np.abs(coefficients).max() == pytest.approx(4 / 3)


def test_nothing_to_take_a_gradient_of_is_refused() -> None:
    with pytest.raises(EmptyComparison):
        choose_batch(rollout(((5, 0),)), 16, 0)


# ---------------------------------------------------------------- passes

SPEC = CheckSpec(rollout=RolloutSpec(engine=EngineSpec(model="m")), train=TrainSpec("m"))
GPT_OSS = ModelFacts(sinks=True, experts=8)
DENSE = ModelFacts()


def planned(spec: CheckSpec, model: ModelFacts = GPT_OSS) -> GradientPlan:
    return plan_gradients(spec, 16, Context(spec, model))


def ids(plan: GradientPlan) -> list[str]:
    return [each.id for each in plan.passes]


def test_alone_it_takes_the_natural_fixes_that_change_something_each_once() -> None:
    plan = planned(SPEC)
    assert ids(plan) == ["reference", "baseline", "router-replay=ids", "fp32-lm-head", "fp16"]
    assert plan.same == {"fp32": "reference"}
    assert all(each.spec.grad and not each.spec.routing for each in plan.passes)
    reference = plan.passes[0].spec
    assert (reference.dtype, reference.master_dtype) == ("fp32", "fp32")
    assert reference.attention == "auto"
    blind = replace(SPEC, train=replace(SPEC.train, attention="no-sinks"))
    assert "attention-sinks" in ids(planned(blind))
    assert ids(planned(SPEC, DENSE)) == ["reference", "baseline", "fp32-lm-head", "fp16"]


def test_with_fixes_it_takes_theirs_and_says_which_sample_their_own_tokens() -> None:
    plan = planned(replace(SPEC, fixes=("fp32-router", "fp16+engine-fp16", "tis")))
    assert ids(plan) == ["reference", "baseline", "fp32-router"]
    assert "fp16+engine-fp16:" in plan.not_tested[0]


def test_a_trainer_whose_gradient_says_nothing_is_refused() -> None:
    with pytest.raises(MismatchError, match="verl"):
        planned(replace(SPEC, train=replace(SPEC.train, scorer="verl")))
    exact = TrainSpec(
        "m", dtype="fp32", micro_batch_tokens=planned(SPEC).passes[0].spec.micro_batch_tokens
    )
    with pytest.raises(MismatchError, match="itself"):
        planned(replace(SPEC, train=exact))


def test_a_plan_survives_its_file() -> None:
    plan = planned(SPEC)
    again = from_json(GradientPlan, asdict(plan))
    assert again == plan
    assert again.made_by == plan.made_by != replace(plan, prompts=3).made_by


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.model.layers.0.self_attn.q_proj.weight", "attention"),
        ("model.model.layers.0.self_attn.gate.weight", "attention"),
        ("model.model.layers.0.self_attn.q_norm.weight", "norms"),
        ("model.model.layers.0.self_attn.sinks", "sinks"),
        ("model.model.layers.0.mlp.router.bias", "router"),
        ("model.model.layers.0.mlp.gate.weight", "router"),
        ("model.model.layers.0.mlp.experts.gate_up_proj", "experts"),
        ("model.model.layers.0.mlp.shared_experts.up_proj.weight", "experts"),
        ("model.model.layers.0.mlp.gate_proj.weight", "mlp"),
        ("model.model.embed_tokens.weight", "embeddings"),
        ("model.lm_head.weight", "head"),
        ("model.model.norm.weight", "norms"),
        ("model.model.layers.0.mixer.q_proj.weight", "attention"),
        ("model.model.layers.0.mamba.A_log", "other"),
    ],
)
def test_parameters_have_groups(name: str, group: str) -> None:
    assert group_of(name) == group
    assert group in GROUPS
