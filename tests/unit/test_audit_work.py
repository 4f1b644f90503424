"""What the audit's process plans, refuses, and takes to the model as a whole."""

from dataclasses import replace

import pytest

from mismatch.audit.supervise import AuditSpec
from mismatch.audit.types import Finding
from mismatch.audit.work import Work
from mismatch.errors import MismatchError
from mismatch.models import EMBEDDED
from mismatch.reports.kernels_json import audit_to_json
from tests.kernels_fixture import make_audit_report

TINY = str(EMBEDDED["tiny-gpt-oss"])
SPEC = AuditSpec(model=TINY)


@pytest.fixture(scope="module")
def work():
    spec = replace(
        SPEC,
        kernels=("mismatch.audit.planted:no_sinks",),
        expert_kernels=("mismatch.audit.planted_experts:right",),
    )
    return Work.of(spec)


def names(work, kind):
    return [step["name"] for step in work.plan()["steps"] if step["kind"] == kind]


def test_the_plan_has_what_runs_here_and_says_why_others_do_not(work):
    plan = work.plan()
    assert plan["model"] == "tiny-gpt-oss"
    assert plan["geometry"]["sinks"] is True
    assert {"eager", "sdpa", "sink-sdpa"} <= set(names(work, "attention"))
    assert names(work, "attention")[-1] == "mismatch.audit.planted:no_sinks"
    assert "no-sinks" not in names(work, "attention")  # a planted fault is audited on request only
    assert names(work, "experts") == [
        *("eager", "grouped_mm", "batched_mm", "bounded"),
        "mismatch.audit.planted_experts:right",
    ]
    origins = {step["name"]: step["origin"] for step in plan["steps"]}
    assert origins["sink-sdpa"] == origins["bounded"] == "ours"
    assert origins["grouped_mm"] == "transformers"
    assert origins["mismatch.audit.planted_experts:right"] == "yours"
    assert [step["number"] for step in plan["steps"]] == list(range(len(plan["steps"])))
    assert all(one["reason"] for one in plan["unavailable"])


def test_names_and_only_choose(work):
    some = Work.of(replace(SPEC, names=("eager", "bounded", "no-sinks")))
    assert names(some, "attention") == ["eager", "no-sinks"]
    assert names(some, "experts") == ["eager", "bounded"]
    only = Work.of(replace(SPEC, only="experts"))
    assert names(only, "attention") == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kernels": ("nowhere.at.all:f",)}, "cannot import nowhere"),
        ({"kernels": ("mismatch.audit.types:ATTENTION_COLUMNS",)}, "is no function"),
        ({"kernels": ("mismatch.audit.planted:no_sinks@wrong",)}, "there is no mask 'wrong'"),
        ({"expert_kernels": ("mismatch.audit.planted_experts:nothing",)}, "has no nothing"),
        ({"names": ("flash_attention_9",)}, "there is no implementation 'flash_attention_9'"),
        ({"names": ("bounded",), "only": "attention"}, "there is no implementation 'bounded'"),
        ({"model": "/nowhere"}, "does not exist"),
    ],
)
def test_what_is_not_there_is_refused_with_a_fix(changes, said):
    with pytest.raises(MismatchError, match=said) as caught:
        Work.of(replace(SPEC, **changes))
    assert caught.value.fix


def test_only_attention_with_a_fault_goes_to_the_model(work):
    made = [audit_to_json(one) for one in make_audit_report().audits]
    asked = [work.harmful(one) for one in made]
    assert asked == [False, False, True, False, True, False, False]
    assert not work.harmful({"failed": "crashed: signal 11"})
    refused = replace(
        make_audit_report().audits[2], findings=(Finding("accepts", "failed", "needs CUDA"),)
    )
    assert not work.harmful(audit_to_json(refused))
    quiet = Work(replace(SPEC, harm=False), work.geometry, work.options, [], [])
    assert not any(quiet.harmful(one) for one in made)
