"""Which gradients a check takes: those of the fixes that apply, each once, the reference first."""

from __future__ import annotations

from dataclasses import replace

from mismatch.experiments.fixes.context import Context, ModelFacts
from mismatch.experiments.gradients.planning import GradientPlan, in_order, plan_gradients
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


def test_equal_settings_are_taken_once() -> None:
    passes, same_as = in_order(planned(SPEC))
    assert same_as == {"fix:fp32": "reference:fp32"}
    names = [each.trainer.name for each in passes]
    assert names[0] == "reference:fp32"
    assert names.index("fix:fp32") < names.index("fsdp")  # its weights are the reference's


def test_a_plan_survives_its_file() -> None:
    import json

    plan = planned(SPEC)
    again = GradientPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.made_by == plan.made_by != replace(plan, prompts=3).made_by
