"""The audit of experts finds each planted fault in its own column, and nothing in what is right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch.errors import MismatchError
from mismatch.features.kernels import expert_layer
from mismatch.features.kernels.expert_layer import Sizes
from mismatch.features.kernels.experts import audit_experts, register_experts
from mismatch.features.kernels.findings import Options
from mismatch.features.kernels.geometry import ModelGeometry, geometry_of
from mismatch.features.kernels.results import EXPERT_COLUMNS, Audit
from tests import checkpoints, families, planted_experts
from tests.planted_experts import REFUSAL

OPTIONS = Options(dtypes=("fp64", "fp32", "bf16"))
OURS = ("eager", "grouped_mm", "batched_mm", "bounded")
# Biases and transposed weights; plain; no gate.
KINDS = ("gpt_oss", "qwen3_moe", "nemotron_h")


def _geometry(family: str) -> ModelGeometry:
    own = family in ("gpt_oss", "qwen3_moe")
    return geometry_of(checkpoints.configuration(family) if own else families.configuration(family))


@pytest.fixture(scope="module")
def geometries() -> dict[str, ModelGeometry]:
    return {family: _geometry(family) for family in KINDS}


def _planted(name: str) -> str:
    return f"{planted_experts.__name__}:{name}"


def _failed(audit: Audit) -> dict[str, bool]:
    """Column -> whether that makes it wrong."""
    return {
        finding.column: finding.critical
        for finding in audit.findings
        if finding.outcome == "failed"
    }


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("family", KINDS)
def test_real_implementations_are_right(
    geometries: dict[str, ModelGeometry], family: str, name: str
) -> None:
    audit = audit_experts(geometries[family], OPTIONS, name)
    assert audit.verdict == "sound", audit.reason
    assert audit.usable
    assert not any(_failed(audit).values())
    assert tuple(finding.column for finding in audit.findings) == EXPERT_COLUMNS
    assert audit.chosen == (name == "grouped_mm")
    assert audit.origin == ("ours" if name == "bounded" else "transformers")
    low = next(error for error in audit.errors if error.dtype == "bf16")
    assert low.forward is not None
    assert 1e-4 < low.forward < 0.02  # rounding, and no more
    up = "up" if family == "nemotron_h" else "gate_up"
    biases = {f"{up}_bias", "down_bias"} if family == "gpt_oss" else set()
    assert set(low.gradients) == {"hidden", "router", up, "down"} | biases


FORWARD = ("forward", "gradient", "router_gradient")


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("right", ()),
        ("no_router_gradient", ("router_gradient",)),
        ("wrong_router_gradient", ("router_gradient",)),
        ("no_expert_gradient", ("gradient",)),
        ("wrong_hidden_gradient", ("gradient",)),
        ("no_backward", ("gradient", "router_gradient")),
        ("dropped_bias", FORWARD),
        ("equal_weights", FORWARD),
        ("last_slot_lost", FORWARD),
        ("noisy", ("repeats", *FORWARD)),
        ("looks_at_the_batch", ("batches", *FORWARD)),
    ],
)
def test_planted_faults_are_found(
    geometries: dict[str, ModelGeometry], name: str, columns: tuple[str, ...]
) -> None:
    audit = audit_experts(geometries["gpt_oss"], OPTIONS, _planted(name))
    assert _failed(audit) == dict.fromkeys(columns, True)
    assert audit.verdict == ("wrong" if columns else "sound")
    assert (audit.origin, audit.usable) == ("yours", True)
    if columns:
        first = audit.finding(columns[0])
        assert first is not None
        assert audit.reason == first.detail


def test_what_is_lost_is_named_with_its_size(geometries: dict[str, ModelGeometry]) -> None:
    lost = audit_experts(geometries["gpt_oss"], OPTIONS, _planted("no_router_gradient"))
    finding = lost.finding("router_gradient")
    assert finding is not None
    assert (finding.value, finding.detail) == (1.0, lost.reason)
    assert all(error.gradients["router"] == 1.0 for error in lost.errors)
    twice = audit_experts(geometries["gpt_oss"], OPTIONS, _planted("wrong_router_gradient"))
    assert twice.errors[0].gradients["router"] == pytest.approx(1.0)  # (2 - 1) / 1, with two slots
    tenth = audit_experts(geometries["qwen3_moe"], OPTIONS, _planted("wrong_hidden_gradient"))
    assert tenth.errors[0].gradients["hidden"] == pytest.approx(0.1)
    assert tenth.errors[0].gradients["down"] < 1e-12


def test_a_family_without_biases_cannot_lose_them(geometries: dict[str, ModelGeometry]) -> None:
    audit = audit_experts(geometries["qwen3_moe"], OPTIONS, _planted("dropped_bias"))
    assert audit.verdict == "sound"


def test_other_bits_are_told_and_not_blamed(geometries: dict[str, ModelGeometry]) -> None:
    audit = audit_experts(geometries["gpt_oss"], OPTIONS, _planted("other_bits"))
    assert _failed(audit) == {"repeats": False, "batches": False}
    assert audit.verdict == "sound"
    repeats = audit.finding("repeats")
    assert repeats is not None


def test_what_does_not_run_is_unusable(geometries: dict[str, ModelGeometry]) -> None:
    audit = audit_experts(geometries["gpt_oss"], OPTIONS, _planted("refuses"))
    assert (audit.verdict, audit.usable) == ("unusable", False)
    assert REFUSAL in audit.reason
    outcomes = {finding.column: finding.outcome for finding in audit.findings}
    assert outcomes == {"accepts": "failed"} | dict.fromkeys(EXPERT_COLUMNS[1:], "not_tested")


def test_dtypes_that_are_not_taken_are_left_out(geometries: dict[str, ModelGeometry]) -> None:
    audit = audit_experts(geometries["gpt_oss"], OPTIONS, "grouped_mm")
    assert [error.dtype for error in audit.errors] == ["fp32", "bf16"]
    accepts = audit.finding("accepts")
    assert accepts is not None
    assert re.findall(r"\b(?:fp|bf)\d+", accepts.detail)[:3] == ["fp32", "bf16", "fp64"]


@pytest.mark.parametrize(
    ("family", "reason"), [("llama", "llama is dense"), ("dbrx", "behind no interface")]
)
def test_where_there_is_nothing_to_choose(family: str, reason: str) -> None:
    source = checkpoints if family == "llama" else families
    with pytest.raises(MismatchError, match=reason):
        audit_experts(geometry_of(source.configuration(family)), OPTIONS, "eager")


@pytest.mark.parametrize("family", KINDS)
def test_the_definition_is_the_familys_own_loop(
    geometries: dict[str, ModelGeometry], family: str
) -> None:
    sizes = Sizes(experts=6, hidden=20, width=12, top_k=3)
    module = expert_layer.build(geometries[family], sizes, "cpu", torch.float64, 0)
    given = expert_layer.random_inputs(sizes, 30, "cpu", torch.float64, 0)
    used = given.ids.unique().tolist()
    assert used == [0, 1, 2, 3, 4]  # the last expert has no token
    assert int((given.ids == 4).sum()) == 1
    with torch.no_grad():
        own = expert_layer.run(module, "eager", given)
        assert torch.allclose(expert_layer.definition(module, given), own, rtol=1e-12)


def test_gradients_of_the_definition_are_those_of_differences(
    geometries: dict[str, ModelGeometry],
) -> None:
    sizes = Sizes(experts=3, hidden=4, width=3, top_k=2)
    module = expert_layer.build(geometries["gpt_oss"], sizes, "cpu", torch.float64, 0)
    given = expert_layer.random_inputs(sizes, 5, "cpu", torch.float64, 0)
    names = [name for name, _ in module.named_parameters()]

    def of(*tensors: torch.Tensor) -> torch.Tensor:
        changed = dict(zip(names, tensors[1:], strict=True))
        inputs = given._replace(router=tensors[0])
        return torch.func.functional_call(
            _Called(module, inputs), {f"module.{k}": v for k, v in changed.items()}, ()
        )

    leaves = [given.router, *(parameter.detach() for parameter in module.parameters())]
    assert torch.autograd.gradcheck(of, [x.clone().requires_grad_() for x in leaves])


class _Called(torch.nn.Module):
    def __init__(self, module: Any, given: Any) -> None:
        super().__init__()
        self.module, self.given = module, given

    def forward(self) -> torch.Tensor:
        return expert_layer.definition(self.module, self.given)


def test_users_experts_are_found_in_their_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, geometries: dict[str, ModelGeometry]
) -> None:
    (tmp_path / "my_experts.py").write_text(
        "def mine(module, hidden, ids, weights):\n    return hidden * 0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    audit = audit_experts(geometries["gpt_oss"], OPTIONS, "my_experts:mine")
    assert audit.verdict == "wrong"
    forward = audit.finding("forward")
    assert forward is not None
    assert forward.value == pytest.approx(1.0)
    with pytest.raises(MismatchError, match=r"mine@sdpa: .*mask"):
        register_experts("my_experts:mine@sdpa")
