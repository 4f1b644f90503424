"""Which gradients a check takes: those of the fixes that apply, each once, the reference first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mismatch.experiments.fixes.base import Context, ModelFacts
from mismatch.experiments.gradients.coefficients import Vectors
from mismatch.experiments.gradients.planning import GradientPlan, plan_gradients, scheduled
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, TrainSpec

SPEC = CheckSpec(
    rollout=RolloutSpec(engine=EngineSpec(model="m")), train=TrainSpec("m"), gradients=True
)
GPT_OSS = ModelFacts(sinks=True, experts=8)
DENSE = ModelFacts()


def planned(spec: CheckSpec, model: ModelFacts = GPT_OSS) -> GradientPlan:
    return plan_gradients(spec, Context(spec, model))


def ids(plan: GradientPlan) -> list[str]:
    return [pass_.trainer.id for pass_ in plan.passes]


def test_alone_it_takes_the_natural_fixes_that_change_something() -> None:
    assert ids(planned(SPEC)) == [
        *("reference", "baseline", "router-replay=ids", "fp32-lm-head", "fp16", "fp32")
    ]
    blind = replace(SPEC, train=replace(SPEC.train, attention="no-sinks"))
    assert "attention-sinks" in ids(planned(blind))
    assert ids(planned(SPEC, DENSE)) == ["reference", "baseline", "fp32-lm-head", "fp16", "fp32"]


def test_with_fixes_it_takes_theirs_and_says_what_samples_anew() -> None:
    plan = planned(replace(SPEC, fixes=("fp32-router", "fp16+engine-fp16", "tis")))
    assert ids(plan) == ["reference", "baseline", "fp32-router"]
    assert "fp16+engine-fp16:" in plan.not_tested[0]


def test_every_pass_runs_with_gradients_and_records_nothing() -> None:
    plan = planned(replace(SPEC, train=replace(SPEC.train, attention="no-sinks")))
    assert all(pass_.spec.grad and not pass_.spec.routing for pass_ in plan.passes)
    reference = plan.passes[0].spec
    assert (reference.dtype, reference.master_dtype, reference.attention) == ("fp32",) * 2 + (
        "auto",
    )


def test_ppo_needs_two_passes_and_takes_the_noisy_one() -> None:
    assert planned(SPEC).new == "fsdp:regrouped"
    assert "PPO's ratio" in planned(SPEC).lines()[1]
    bare = planned(replace(SPEC, noise_floor=False))
    assert bare.new is None
    assert "PPO's ratio" not in bare.lines()[1]
    assert "--two-passes" in bare.not_tested[0]
    assert bare.lines()[1].endswith("each correction")
    noisy = planned(replace(SPEC, inject=(("router-noise", 0.1),)))
    assert noisy.new == "fsdp:new"
    assert noisy.passes[-1].trainer.kind == "ratio"
    assert noisy.passes[-1].spec.inject == (("router-noise", 0.1),)
    coefficients = {
        (item.planned.trainer.name, item.coefficients) for item in scheduled(noisy, Vectors())
    }
    assert ("fsdp:new", "token:ppo-ratio") in coefficients
    assert ("fsdp:new", "token") not in coefficients
    assert ("fsdp", "token:ppo-ratio") not in coefficients


def test_equal_settings_and_equal_coefficients_are_taken_once() -> None:
    vectors = Vectors(same_as={"token:icepop": "token:tis-token"})
    items = {
        (item.planned.trainer.name, item.coefficients): item.same_as
        for item in scheduled(planned(SPEC), vectors)
    }
    assert items["fix:fp32", "token"] == ("reference:fp32", "token")
    assert items["fsdp", "token:icepop"] == ("fsdp", "token:tis-token")
    assert items["fsdp", "token:tis-token"] is None
    assert items["fix:fp16", "token"] is None
    first = [item.planned.trainer.name for item in scheduled(planned(SPEC), vectors)]
    assert first[0] == "reference:fp32"
    assert first.index("fix:fp32") < first.index("fsdp")  # its weights are the reference's


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, inject=(("router-noise", 0.1),))])
def test_a_plan_survives_its_file(spec: CheckSpec) -> None:
    import json

    plan = planned(spec)
    again = GradientPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.made_by == plan.made_by != replace(plan, prompts=3).made_by
