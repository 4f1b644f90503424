"""Which fixes are tried: each changes a spec and nothing else, and shares what can be shared."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mismatch.codec import from_json
from mismatch.errors import MismatchError
from mismatch.experiments.fixes.applies import NEEDS
from mismatch.experiments.fixes.catalogue import FIXES, chosen_of
from mismatch.experiments.fixes.context import Context, MachineFacts, ModelFacts, context_of
from mismatch.experiments.fixes.planning import FixPlan, pairs_of, parse_requests, plan_fixes
from mismatch.pipeline.preflight import require_form
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, TrainSpec, to_dict
from mismatch.types import Sampling
from tests.texts import numbers

MOE = ModelFacts(sinks=True, experts=8)
CPU, H100 = MachineFacts(0, True), MachineFacts(8, False, (9, 0))


def check(
    *fixes: str, engine: EngineSpec | None = None, sampling: Sampling | None = None, **train: object
) -> CheckSpec:
    rollout = RolloutSpec(
        engine=engine or EngineSpec(model="somewhere"), sampling=sampling or Sampling()
    )
    return CheckSpec(rollout, TrainSpec(model="somewhere", **train), fixes=fixes)  # type: ignore[arg-type]


def planned(spec: CheckSpec, model: ModelFacts = MOE, machine: MachineFacts = CPU) -> FixPlan:
    return plan_fixes(spec, Context(spec, model, machine))


def ids(plan: FixPlan) -> list[str]:
    return [variant.id for variant in plan.variants]


def reasons(plan: FixPlan) -> dict[str, str]:
    return {row.id: row.reason for row in plan.refused}


# ---------------------------------------------------------------- requests


def test_requests_are_split_at_commas_and_kept_once() -> None:
    assert parse_requests(["fp32, tis", "fp32", "all"]) == ("fp32", "tis", "all")


def test_a_plus_sign_inside_a_value_does_not_split() -> None:
    assert [fix.label for fix in chosen_of("router-replay=ids+weights+fp32-router")] == [
        "router-replay=ids+weights",
        "fp32-router",
    ]
    assert chosen_of("router-replay+fp32")[0].label == "router-replay=ids"  # the first by default


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fp23", "no fix 'fp23'"),
        ("fp32=1", "takes no value"),
        ("fp32+tis", "changes no log-probability"),
        ("fp32+nothing", "no fix 'nothing'"),
    ],
)
def test_requests_that_mean_nothing_are_refused(text: str, words: str) -> None:
    with pytest.raises(MismatchError, match=words):
        parse_requests([text])


@pytest.mark.parametrize("request_", ["micro-batch=none", "micro-batch=²", "router-replay=all"])
def test_a_value_that_means_nothing_is_refused(request_: str) -> None:
    with pytest.raises(MismatchError, match=request_):
        planned(check(request_))
    with pytest.raises(MismatchError, match=request_):  # before a run directory is made
        parse_requests([request_])


def test_fixes_come_back_from_spec_json() -> None:
    spec = replace(check("fp32", engine=EngineSpec(env=(("A", "1"),))), budget_minutes=2.0)
    assert from_json(CheckSpec, to_dict(spec)) == spec


# ---------------------------------------------------------------- the catalogue


@pytest.mark.parametrize("fix", [f for f in FIXES if f.side != "estimator"], ids=lambda f: f.id)
def test_a_fix_changes_its_own_side_alone_and_twice_is_once(fix: object) -> None:
    faulty = check(
        engine=EngineSpec(
            model="somewhere",
            weights="mxfp4",
            args=(
                *(("logprobs_mode", "raw_logprobs"), ("kv-cache-dtype", "fp8")),
                *(("generation_config", "auto"), ("disable_cascade_attn", False)),
            ),
        ),
        sampling=Sampling(temperature=0.7, top_p=0.9),
        attention="no-sinks",
        autocast="bf16",
        layout="packing",
        temperature_in="logits",
    )
    chosen = fix.taking()  # type: ignore[attr-defined]
    once = chosen.apply(faulty)
    assert once != faulty
    assert chosen.apply(once) == once
    side, other = ("train", "rollout") if chosen.side == "train" else ("rollout", "train")
    assert getattr(once, side) != getattr(faulty, side)
    assert replace(once, **{side: getattr(faulty, side)}) == faulty, f"{other} changed too"


def test_estimators_change_nothing() -> None:
    spec = check()
    for fix in FIXES:
        if fix.side == "estimator":
            assert fix.apply(spec) == spec
            assert fix.corrects
    assert [fix.id for fix in FIXES if fix.hides] == ["on-policy-ratio"]


def test_every_correction_named_by_a_fix_exists() -> None:
    from mismatch.metrics.importance_weights import BY_ID

    assert {fix.corrects for fix in FIXES if fix.corrects} <= BY_ID.keys()


def test_other_overrides_of_the_configuration_survive() -> None:
    engine = EngineSpec(args=(("hf_overrides", {"rope_theta": 1.0}), ("swap_space", 1)))
    spec = chosen_of("engine-fp32-lm-head")[0].apply(check(engine=engine))
    assert dict(spec.rollout.engine.args) == {
        "hf_overrides": {"rope_theta": 1.0, "head_dtype": "float32"},
        "swap_space": 1,
    }


# ---------------------------------------------------------------- what applies


@pytest.mark.parametrize(
    ("fix", "model", "machine", "words"),
    [
        ("attention-sinks", ModelFacts(), CPU, "no attention sinks"),
        ("router-replay=ids", ModelFacts(), CPU, "dense"),
        ("fp32-router", ModelFacts(), CPU, "dense"),
        ("expert-memory", ModelFacts(described=False), CPU, "not known without the model's config"),
        (
            "attention-sinks",
            ModelFacts(described=False),
            CPU,
            "not known without the model's config",
        ),
        ("rollout-bf16-weights", ModelFacts(stored_dtype="fp8"), CPU, "stored in fp8"),
        ("router-replay=ids+weights", MOE, CPU, "not their weights"),
        ("no-packing", MOE, CPU, "not packed"),
        ("no-autocast", MOE, CPU, "no autocast"),
        ("temperature", MOE, CPU, "temperature is 1"),
        ("attention-sinks", MOE, CPU, "already"),
        ("micro-batch=4096", MOE, CPU, "already"),
        ("batch-invariant", MOE, CPU, "only on a GPU"),
        ("batch-invariant", MOE, MachineFacts(1, False, (7, 5)), "8.0"),
        ("batch-invariant", ModelFacts(stored_dtype="mxfp4"), H100, "MXFP4"),
        ("engine-fp16", ModelFacts(stored_dtype="mxfp4"), H100, "bf16 alone"),
        ("engine-fp32", ModelFacts(stored_dtype="mxfp4"), H100, "bf16 alone"),
        ("enforce-eager", MOE, CPU, "only on a GPU"),
        ("no-prefix-cache", MOE, CPU, "off already"),
        ("no-cascade-attention", MOE, MachineFacts(1, vllm=(0, 32)), "no cascade attention"),
        ("bf16-kv-cache", MOE, CPU, "not quantised"),
        ("rollout-bf16-weights", MOE, CPU, "not quantised"),
        ("processed-logprobs", MOE, CPU, "processed logprobs"),
        ("sampling-mask", MOE, CPU, "nothing is cut"),
        ("explicit-generation-config", MOE, CPU, "explicitly already"),
        ("fp32+batch-invariant", MOE, CPU, "batch-invariant: .*only on a GPU"),
    ],
)
def test_what_does_not_apply_is_listed_with_the_reason(
    fix: str, model: ModelFacts, machine: MachineFacts, words: str
) -> None:
    plan = planned(check(fix), model, machine)
    assert not plan.variants
    (row,) = plan.refused
    assert not row.applies
    assert row.id == fix
    assert re.search(words, row.reason), row.reason


def test_settings_of_a_gpu_apply_on_one() -> None:
    plan = planned(check("batch-invariant,".strip(","), "enforce-eager"), machine=H100)
    assert ids(plan) == ["batch-invariant", "enforce-eager"]
    assert plan.variants[0].spec.rollout.engine.env == (("VLLM_BATCH_INVARIANT", "1"),)


def test_an_older_vllm_may_have_cascade_attention() -> None:
    plan = planned(check("no-cascade-attention"), machine=MachineFacts(1, vllm=(0, 11)))
    assert plan.variants[0].spec.rollout.engine.args == (("disable_cascade_attn", True),)


def test_settings_of_vllm_need_vllm() -> None:
    engine = EngineSpec(engine="transformers", args=(("kv_cache_dtype", "fp8"),))
    plan = planned(check("engine-fp32-lm-head", "engine-fp32", engine=engine))
    assert ids(plan) == ["engine-fp32"]
    assert "transformers" in reasons(plan)["engine-fp32-lm-head"]


def test_an_mxfp4_checkpoint_is_a_quantised_rollout() -> None:
    plan = planned(check("rollout-bf16-weights"), replace(MOE, stored_dtype="mxfp4"))
    assert plan.variants[0].spec.rollout.engine.weights == "bf16"


def test_how_weights_are_stored_is_asked_of_the_engines_checkpoint(tmp_path: Path) -> None:
    for name, more in (
        ("engine", {"quantization_config": {"quant_method": "mxfp4"}}),
        ("train", {}),
    ):
        (tmp_path / name).mkdir()
        config = {"model_type": "gpt_oss", "num_local_experts": 8, "dtype": "bfloat16"} | more
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    spec = check("rollout-bf16-weights", engine=EngineSpec(model=str(tmp_path / "engine")))
    spec = replace(spec, train=replace(spec.train, model=str(tmp_path / "train")))
    assert context_of(spec).model.stored_dtype == "mxfp4"
    assert ids(plan_fixes(spec, context_of(spec))) == ["rollout-bf16-weights"]


def test_the_stored_form_can_always_be_asked_for(tmp_path: Path) -> None:
    """What rollout-bf16-weights recommends for a dense checkpoint served with quantization=fp8."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    require_form(EngineSpec(model=str(tmp_path), weights="bf16"))
    with pytest.raises(MismatchError):
        require_form(EngineSpec(model=str(tmp_path), weights="mxfp4"))


def test_a_configuration_that_is_elsewhere_is_not_dense() -> None:
    spec = check()
    facts = context_of(replace(spec, train=replace(spec.train, model="nobody/nothing"))).model
    assert not facts.described


def test_facts_of_the_embedded_model() -> None:
    from mismatch.models import resolve_model

    spec = check()
    spec = replace(spec, train=replace(spec.train, model=resolve_model("tiny-gpt-oss")))
    facts = context_of(spec).model
    assert (facts.sinks, facts.experts > 1) == (True, True)


# ---------------------------------------------------------------- sharing


def test_fixes_of_the_trainer_need_no_engine() -> None:
    plan = planned(check("fp32", "router-replay"))
    assert {variant.folder for variant in plan.variants} == {""}
    assert all(variant.spec.rollout == check().rollout for variant in plan.variants)
    assert [variant.key for variant in plan.variants] == [
        "fix:fp32",
        "fix:router-replay=ids",
    ]


def test_variants_with_one_engine_share_its_tokens() -> None:
    plan = planned(check("fp32+engine-fp32", "engine-fp32", "router-replay+engine-fp32"))
    assert len(plan.variants) == 3
    assert {variant.folder for variant in plan.variants} == {"fixes/engine-fp32"}
    assert [variant.outcome().side for variant in plan.variants] == ["both", "engine", "both"]


def test_the_order_of_engine_fixes_makes_no_second_rollout() -> None:
    order, other = "engine-fp16+no-prefix-cache", "no-prefix-cache+engine-fp16+fp32"
    plan = planned(check(order, other), ModelFacts())
    assert ids(plan) == [order, other]
    assert len({variant.folder for variant in plan.variants}) == 1


def test_variants_carry_no_fixes_of_their_own() -> None:
    spec = replace(check("fp32"), budget_minutes=1.0, verdict="after-fixes")
    assert planned(spec).variants[0].spec.fixes == ()


def test_all_is_every_fix_alone_then_the_natural_pairs() -> None:
    plan = planned(check("all", attention="no-sinks"))
    assert plan.pairs
    assert ids(plan)[0] == "attention-sinks"
    assert {"fp32+engine-fp32", "fp16+engine-fp16", "fp32", "engine-fp32"} <= set(ids(plan))
    named = {name.partition("=")[0] for name in [*ids(plan), *reasons(plan)] if "fp32+" not in name}
    assert {fix.id for fix in FIXES if fix.side != "estimator"} <= named
    assert [fix.id for fix in plan.estimators] == [f.id for f in FIXES if f.side == "estimator"]


def test_a_side_names_its_fixes() -> None:
    plan = planned(check("train"))
    assert not plan.pairs
    assert {fix.side for variant in plan.variants for fix in [variant.chosen[0]]} == {"train"}


def test_the_same_spec_is_measured_once() -> None:
    engine = EngineSpec(model="somewhere", args=(("kv_cache_dtype", "fp8"),))
    plan = planned(check("expert-memory", "experts-implementation=bounded", engine=engine))
    assert ids(plan) == ["expert-memory"]
    assert "expert-memory" in reasons(plan)["experts-implementation=bounded"]


def test_fixes_that_set_the_same_thing_are_not_combined() -> None:
    plan = planned(check("fp16+fp32"))
    assert (ids(plan), list(reasons(plan))) == ([], ["fp16+fp32"])


def test_pairs_are_made_of_the_best_that_fit_together() -> None:
    spec = check("fp16", "fp32", "fp32-router", "router-replay", "micro-batch=64")
    plan = planned(spec)
    best = ["fp32", "fp16", "router-replay=ids", "fp32-router", "micro-batch=64"]
    asked = replace(spec, fixes=pairs_of(best))
    pairs = plan_fixes(asked, Context(spec, MOE, CPU), plan.variants).variants
    # fp16 and fp32 exclude each other; a fifth fix is not paired
    assert [variant.id for variant in pairs] == [
        "fp32+router-replay=ids",
        "fp32+fp32-router",
        "fp16+router-replay=ids",
        "fp16+fp32-router",
        "router-replay=ids+fp32-router",
    ]


def test_the_plan_says_what_it_will_start() -> None:
    spec = replace(check("fp32", "engine-fp16", "no-packing"), budget_minutes=3)
    lines = planned(spec).lines(spec)
    variants, passes, exact, *_, starts = numbers(lines[0])
    assert (variants, passes, exact, starts) == (2, 2, 0, 1)
    spec = check("experts-implementation=eager")
    assert numbers(planned(spec).lines(spec)[0])[:3] == [1, 1, 1]
    assert any(f"no-packing: {NEEDS['packing'][1]}" in line for line in lines)
    assert "3 minutes" in lines[-1]
