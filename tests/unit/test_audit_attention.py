"""Each planted kernel fails in its own column, and right kernels in none."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mismatch.models
from mismatch.features.kernels.attention import UNNAMED, audit_attention
from mismatch.features.kernels.candidates import NO_BACKWARD, PAGED, Candidate, names_here
from mismatch.features.kernels.findings import Options
from mismatch.features.kernels.geometry import ModelGeometry, geometry_of
from mismatch.features.kernels.results import ATTENTION_COLUMNS, Audit
from tests.unit.audit_kernels import NOT_HALF, RAGGED, RAISED

TINY = Path(mismatch.models.__file__).parent / "tiny-gpt-oss"
CONSEQUENCES = {"forward", "gradient", "sink_gradient"}
QUICK = Options(dtypes=("fp64", "bf16"))
HERE = "tests.unit.audit_kernels:"
PLANTED = {
    "no_sinks": ({"sinks"}, CONSEQUENCES, "drops the sinks"),
    "no_sink_gradient": ({"sink_gradient"}, set(), "no gradient arrives at sinks"),
    "wrong_gradient_scale": ({"gradient"}, set(), "gradient of q off by 50 %"),
    "window_off_by_one": ({"window"}, CONSEQUENCES, "sees one key more than the window"),
    "leaking_packing": ({"packing"}, CONSEQUENCES, "lets documents of one row see each other"),
    "wrong_offset": ({"offsets"}, set(), "puts the first query at the first key"),
    "wrong_groups": ({"grouped_queries"}, CONSEQUENCES, "hands key heads out in turn"),
    "wrong_scaling": ({"scaling"}, set(), "uses head_dim ** -0.5 whatever scale is given"),
    "non_deterministic": ({"repeats"}, CONSEQUENCES, "differs from run to run"),
}


@pytest.fixture(scope="module")
def geometry() -> ModelGeometry:
    from transformers import AutoConfig

    return geometry_of(AutoConfig.from_pretrained(TINY), "tiny-gpt-oss")


def audit(geometry: ModelGeometry, name: str, options: Options = QUICK) -> Audit:
    own = [name] if ":" in name else []
    candidates = {each.name: each for each in names_here(geometry, own)}
    return audit_attention(geometry, options, candidates[name])


def failed(report: Audit) -> set[str]:
    return {finding.column for finding in report.failed}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_shows_in_its_own_column(geometry: ModelGeometry, name: str) -> None:
    own, consequences, words = PLANTED[name]
    report = audit(geometry, f"tests.planted_attention:{name}")
    assert own <= failed(report) <= own | consequences
    assert (report.verdict, report.usable) == ("wrong", True)
    assert words in report.reason
    assert [finding.column for finding in report.findings] == list(ATTENTION_COLUMNS)


@pytest.mark.parametrize("name", ["eager", "sink-sdpa", "tests.planted_attention:right"])
def test_right_kernels_are_sound(geometry: ModelGeometry, name: str) -> None:
    report = audit(geometry, name)
    assert (report.verdict, report.usable, report.reason) == ("sound", True, "")
    asked = {finding.column for finding in report.findings if finding.outcome != "not_tested"}
    assert asked == set(ATTENTION_COLUMNS)
    assert report.chosen == (name == "sink-sdpa")
    exact, rough = report.errors
    assert (exact.dtype, rough.dtype) == ("fp64", "bf16")
    assert exact.forward is not None
    assert exact.forward < 1e-14
    assert set(exact.gradients) == {"q", "k", "v", "sinks"}
    assert max(exact.gradients.values()) < 1e-13
    assert rough.forward is not None
    assert rough.floor is not None
    assert 1e-4 < rough.forward < 3 * rough.floor < 0.02


def test_the_kernel_that_transformers_takes_by_default_drops_the_sinks(
    geometry: ModelGeometry,
) -> None:
    report = audit(geometry, "sdpa")
    assert (report.verdict, report.usable) == ("unusable", False)
    refused = {each.name: each.refused for each in names_here(geometry)}
    assert report.reason == refused["sdpa"] != ""
    assert failed(report) == {"sinks", *CONSEQUENCES}
    assert [error.gradients["sinks"] for error in report.errors] == [1.0, 1.0]


def test_no_gradient_to_the_sinks_is_an_error_of_100_percent(geometry: ModelGeometry) -> None:
    report = audit(geometry, "tests.planted_attention:no_sink_gradient")
    finding = report.finding("sink_gradient")
    assert finding is not None
    assert finding.value == 1.0


@pytest.mark.parametrize(
    "name", ["from_positions@none", "from_positions@flash", "adds_its_mask@eager"]
)
def test_kernels_with_other_masks_are_sound(geometry: ModelGeometry, name: str) -> None:
    report = audit(geometry, HERE + name)
    assert (report.verdict, report.reason) == ("sound", "")


# ---------------------------------------------------------------- odd behaviour


def test_a_kernel_that_raises_cannot_be_used(geometry: ModelGeometry) -> None:
    report = audit(geometry, HERE + "raises")
    assert (report.verdict, report.usable) == ("unusable", False)
    assert all(part in report.reason for part in (*QUICK.dtypes, "RuntimeError", RAISED))
    accepts = report.finding("accepts")
    assert accepts is not None
    assert accepts.outcome == "failed"
    assert {finding.outcome for finding in report.findings[1:]} == {"not_tested"}


def test_a_dtype_that_a_kernel_does_not_take_is_left_out(geometry: ModelGeometry) -> None:
    report = audit(geometry, HERE + "no_half")
    assert report.verdict == "sound"
    assert [error.dtype for error in report.errors] == ["fp64"]
    accepts = report.finding("accepts")
    assert accepts is not None
    assert accepts.detail.index("fp64") < accepts.detail.index("bf16")  # that comes with its error
    assert accepts.detail.endswith(f"TypeError: {NOT_HALF}")


def test_another_order_of_axes_is_no_output(geometry: ModelGeometry) -> None:
    report = audit(geometry, HERE + "transposed")
    assert (report.verdict, report.usable) == ("unusable", False)
    returned, wanted = re.findall(r"\((\d+), (\d+), (\d+), (\d+)\)", report.reason)
    assert returned == tuple(wanted[axis] for axis in (0, 2, 1, 3)) != wanted


def test_no_numbers_are_wrong_and_the_report_holds_no_infinity(geometry: ModelGeometry) -> None:
    report = audit(geometry, HERE + "no_numbers")
    assert report.verdict == "wrong"
    assert "forward" in failed(report)
    assert all(finding.value != float("inf") for finding in report.findings)
    assert [error.forward for error in report.errors] == [None, None]


def test_no_backward_pass_is_wrong(geometry: ModelGeometry) -> None:
    report = audit(geometry, HERE + "detached")
    assert failed(report) == {"gradient", "sink_gradient"}
    assert [error.gradients for error in report.errors] == [{}, {}]


def test_other_rounding_at_every_call_is_told_and_not_wrong(geometry: ModelGeometry) -> None:
    report = audit(geometry, HERE + "last_bit")
    repeats = report.finding("repeats")
    assert repeats is not None
    assert (repeats.outcome, repeats.critical) == ("failed", False)
    assert repeats.value is not None
    assert repeats.limit is not None
    assert 0.0 < repeats.value <= repeats.limit
    assert report.verdict == "sound"


def test_the_right_gradient_of_another_output_is_wrong(geometry: ModelGeometry) -> None:
    report = audit(geometry, HERE + "half_detached")
    assert failed(report) == {"forward"}
    assert max(report.errors[0].gradients.values()) < 1e-13


def test_a_feature_that_raises_fails_with_its_reason(geometry: ModelGeometry) -> None:
    report = audit(geometry, HERE + "no_cache")
    assert failed(report) == {"offsets"}
    assert RAGGED in report.reason


def test_a_row_that_depends_on_its_neighbours_is_wrong(geometry: ModelGeometry) -> None:
    report = audit(geometry, HERE + "neighbours")
    assert failed(report) == {"batches"}
    batches = report.finding("batches")
    assert batches is not None
    assert batches.value is not None
    assert 0.01 < batches.value < 0.2
    assert report.reason == batches.detail


def test_a_fault_without_a_name_is_found_all_the_same(geometry: ModelGeometry) -> None:
    report = audit(geometry, HERE + "halved_scale")
    assert {"scaling", "forward"} <= failed(report)
    scaling = report.finding("scaling")
    assert scaling is not None
    assert scaling.detail.startswith(UNNAMED)


def test_columns_that_a_model_has_no_use_for_are_not_tested(geometry: ModelGeometry) -> None:
    sizes = replace(geometry.sizes, window=None, kv_heads=geometry.sizes.heads)
    plain = replace(geometry, sinks=False, sizes=sizes)
    report = audit_attention(plain, QUICK, Candidate("sdpa", "transformers", "sdpa"))
    assert report.verdict == "sound"
    left_out = {finding.column for finding in report.findings if finding.outcome == "not_tested"}
    assert left_out == {"sinks", "window", "grouped_queries", "sink_gradient"}


# ---------------------------------------------------------------- names


def test_what_is_here_and_what_is_not(geometry: ModelGeometry) -> None:
    candidates = {candidate.name: candidate for candidate in names_here(geometry)}
    assert candidates["eager"].registered == "eager"
    assert [name for name, candidate in candidates.items() if candidate.chosen] == ["sink-sdpa"]
    assert "sinks" in candidates["sdpa"].refused
    assert candidates["paged|eager"].unavailable == PAGED
    if not torch.cuda.is_available():
        assert candidates["flash_attention_2"].unavailable
        assert candidates["flex_attention"].unavailable == NO_BACKWARD


def test_the_planted_kernel_of_the_trainer_is_audited_where_it_is_named(
    geometry: ModelGeometry,
) -> None:
    assert failed(audit(geometry, "no-sinks")) == {"sinks", *CONSEQUENCES}
