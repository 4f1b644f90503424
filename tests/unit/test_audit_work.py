"""What the audit's process plans, refuses, and takes to the model as a whole."""

from dataclasses import replace

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mismatch.errors import MismatchError
from mismatch.features.kernels.geometry import geometry_of
from mismatch.features.kernels.isolation import AuditSpec
from mismatch.features.kernels.worker import NO_WEIGHTS, REDUCED, UNEVEN, AuditPlan
from mismatch.models import EMBEDDED
from mismatch.training import source

TINY = str(EMBEDDED["tiny-gpt-oss"])
SPEC = AuditSpec(model=TINY)


@pytest.fixture(scope="module")
def work():
    spec = replace(
        SPEC,
        kernels=("tests.planted_attention:no_sinks",),
        expert_kernels=("tests.planted_experts:right",),
    )
    return AuditPlan.of(spec)


def names(work, kind):
    return [a.name for a in work.report().audits if a.kind == kind and not a.reason]


def test_the_plan_has_what_runs_here_and_says_why_others_do_not(work):
    report = work.report()
    assert report.model == "tiny-gpt-oss"
    assert report.geometry["sinks"] is True
    assert {"eager", "sdpa", "sink-sdpa"} <= set(names(work, "attention"))
    assert names(work, "attention")[-1] == "tests.planted_attention:no_sinks"
    assert "no-sinks" not in names(work, "attention")  # a planted fault is audited on request only
    assert names(work, "experts") == [
        *("eager", "grouped_mm", "batched_mm", "bounded"),
        "tests.planted_experts:right",
    ]
    origins = {audit.name: audit.origin for audit in report.audits}
    assert origins["sink-sdpa"] == origins["bounded"] == "ours"
    assert origins["grouped_mm"] == "transformers"
    assert origins["tests.planted_experts:right"] == "yours"
    assert any(audit.reason for audit in report.audits)


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
        ({"kernels": ("tests.planted_attention:no_sinks@wrong",)}, "mask 'wrong'"),
        ({"expert_kernels": ("tests.planted_experts:nothing",)}, "has no nothing"),
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
    shape, sizes = big.geometry, big.geometry.sizes
    assert (sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.window) == (64, 8, 64, 128)
    assert shape.sinks
    assert (sizes.experts, sizes.top_k) == (32, 4)
    untested = big.report().not_tested
    assert any("openai/gpt-oss-20b" in entry and NO_WEIGHTS in entry for entry in untested)
    assert REDUCED in untested


def test_a_model_that_is_here_says_nothing_about_its_weights(work):
    assert not any(NO_WEIGHTS in entry for entry in work.report().not_tested)


def test_layers_of_other_shapes_are_named(work):
    if "gemma4_text" not in CONFIG_MAPPING:
        pytest.skip("not applicable: this transformers has no model whose layers differ")
    small = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "head_dim": 16}
    more = {"global_head_dim": 32, "vocab_size_per_layer_input": 64, "num_hidden_layers": 6}
    shape = geometry_of(CONFIG_MAPPING["gemma4_text"](**small, **more))
    assert (shape.sizes.head_dim, shape.sizes.window, shape.sizes.layers) == (16, 512, 6)
    assert UNEVEN in replace(work, geometry=shape).report().not_tested
    assert not geometry_of(CONFIG_MAPPING["llama"](num_hidden_layers=1)).uneven


def test_an_architecture_that_cannot_be_built_is_refused_with_a_fix():
    if "qwen4_exp" not in CONFIG_MAPPING:
        pytest.skip("not applicable: every default configuration of this transformers can be built")
    with pytest.raises(MismatchError, match="'qwen4_exp'"):
        geometry_of(CONFIG_MAPPING["qwen4_exp"]())
