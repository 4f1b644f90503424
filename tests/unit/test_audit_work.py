"""What the audit's process plans, refuses, and takes to the model as a whole."""

from dataclasses import replace

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mismatch.codec import to_json
from mismatch.errors import MismatchError
from mismatch.features.kernels.geometry import geometry_of
from mismatch.features.kernels.isolation import AuditSpec
from mismatch.features.kernels.worker import AuditPlan, reduced_to
from mismatch.models import EMBEDDED
from mismatch.training import source
from tests.kernels_fixture import make_audit_report
from tests.texts import numbers

TINY = str(EMBEDDED["tiny-gpt-oss"])
SPEC = AuditSpec(model=TINY)
SINKLESS = to_json(make_audit_report().audits[2])


@pytest.fixture(scope="module")
def work():
    spec = replace(
        SPEC,
        kernels=("tests.planted_attention:no_sinks",),
        expert_kernels=("tests.planted_experts:right",),
    )
    return AuditPlan.of(spec)


def names(work, kind):
    return [step["name"] for step in work.plan()["steps"] if step["kind"] == kind]


def test_the_plan_has_what_runs_here_and_says_why_others_do_not(work):
    plan = work.plan()
    assert plan["model"] == "tiny-gpt-oss"
    assert plan["geometry"]["sinks"] is True
    assert {"eager", "sdpa", "sink-sdpa"} <= set(names(work, "attention"))
    assert names(work, "attention")[-1] == "tests.planted_attention:no_sinks"
    assert "no-sinks" not in names(work, "attention")  # a planted fault is audited on request only
    assert names(work, "experts") == [
        *("eager", "grouped_mm", "batched_mm", "bounded"),
        "tests.planted_experts:right",
    ]
    origins = {step["name"]: step["origin"] for step in plan["steps"]}
    assert origins["sink-sdpa"] == origins["bounded"] == "ours"
    assert origins["grouped_mm"] == "transformers"
    assert origins["tests.planted_experts:right"] == "yours"
    assert [step["number"] for step in plan["steps"]] == list(range(len(plan["steps"])))
    assert all(entry["reason"] for entry in plan["unavailable"])


def test_names_and_only_choose(work):
    some = AuditPlan.of(replace(SPEC, names=("eager", "bounded", "no-sinks")))
    assert names(some, "attention") == ["eager", "no-sinks"]
    assert names(some, "experts") == ["eager", "bounded"]
    only = AuditPlan.of(replace(SPEC, only="experts"))
    assert names(only, "attention") == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kernels": ("nowhere.at.all:f",)}, "cannot import nowhere"),
        ({"kernels": ("mismatch.features.kernels.results:ATTENTION_COLUMNS",)}, "is no function"),
        (
            {"kernels": ("tests.planted_attention:no_sinks@wrong",)},
            "mask 'wrong'",
        ),
        (
            {"expert_kernels": ("tests.planted_experts:nothing",)},
            "has no nothing",
        ),
        ({"names": ("flash_attention_9",)}, "'flash_attention_9'"),
        ({"names": ("bounded",), "only": "attention"}, "'bounded'"),
        ({"model": "/nowhere"}, "does not exist"),
    ],
)
def test_what_is_not_there_is_refused_with_a_fix(changes, named):
    with pytest.raises(MismatchError, match=named) as caught:
        AuditPlan.of(replace(SPEC, **changes))
    assert caught.value.fix


def test_a_model_that_is_not_here_is_audited_in_the_shapes_that_ship(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(source, "read_config", lambda spec: pytest.fail("it asks the hub"))
    big = AuditPlan.of(replace(SPEC, model="openai/gpt-oss-20b"))
    shape = big.geometry
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.window) == (64, 8, 64, 128)
    assert shape.sinks
    assert (shape.experts, shape.top_k) == (32, 4)
    untested = big.plan()["not_tested"]
    assert any("openai/gpt-oss-20b" in entry for entry in untested)
    assert any(numbers(entry)[:3] == [32, 2880, 2880] for entry in untested)


def test_a_model_that_is_here_says_nothing_about_its_weights(work):
    assert not any("weights of" in entry for entry in work.plan()["not_tested"])
    dense = geometry_of(CONFIG_MAPPING["llama"](num_hidden_layers=1))
    assert list(reduced_to(dense)) == []


def test_layers_of_other_shapes_are_named():
    if "gemma4_text" not in CONFIG_MAPPING:
        pytest.skip("not applicable: this transformers has no model whose layers differ")
    small = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "head_dim": 16}
    more = {"global_head_dim": 32, "vocab_size_per_layer_input": 64, "num_hidden_layers": 6}
    shape = geometry_of(CONFIG_MAPPING["gemma4_text"](**small, **more))
    assert (shape.head_dim, shape.window, shape.layers) == (16, 512, 6)
    assert numbers(shape.unlike) == [1, 6, 32, 16]
    assert "head_dim" in shape.unlike
    assert geometry_of(CONFIG_MAPPING["llama"](num_hidden_layers=1)).unlike == ""


def test_an_architecture_that_cannot_be_built_is_refused_with_a_fix():
    if "qwen4_exp" not in CONFIG_MAPPING:
        pytest.skip("not applicable: every default configuration of this transformers can be built")
    with pytest.raises(MismatchError, match="'qwen4_exp'"):
        geometry_of(CONFIG_MAPPING["qwen4_exp"]())
