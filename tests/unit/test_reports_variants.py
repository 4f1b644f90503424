"""What stands beside the headline is a row, and only where there is some."""

from __future__ import annotations

from dataclasses import replace

from mismatch.reports.section import Cell
from mismatch.reports.sections import passes
from mismatch.types import Comparison, Estimate, Report
from tests.reports_fixture import make_report


def _estimate(value: float) -> Estimate:
    return Estimate(value, None, None, 10, 2, 2)


def _beside(report: Report, name: str, experts: float | None, **facts: object) -> Report:
    """The report with one more comparison of the engine, with a trainer of these facts."""
    metrics = {"logprob_abs_diff_mean": _estimate(0.0123), "k3_kl": _estimate(4.56e-4)}
    routing = {} if experts is None else {"routing_disagree_layer": _estimate(experts)}
    headline = report.comparisons[0]
    more = Comparison(headline.rollout, name, True, metrics, routing=routing)
    fingerprints = {**report.fingerprints, name: {"mode": "train", **facts}}
    return replace(report, comparisons=(*report.comparisons, more), fingerprints=fingerprints)


def _rows(report: Report) -> list[list[Cell]]:
    section = passes.variants(report)
    assert section is not None
    return section.tables[0].cells()


def test_weights_in_another_form_and_replayed_experts_are_shown() -> None:
    report = _beside(make_report(), "fsdp:other-weights", 0.07, weights_form="mxfp4-rounded")
    given = {"mode": "ids", "source": "vllm:decode"}
    report = _beside(report, "fsdp:replayed", 0.0, replay=given)
    headline, form, replayed = _rows(report)
    assert str(headline[0].value).endswith(f"/ {report.comparisons[0].train}")
    assert headline[0].note == ""
    assert form[0].note == "weights mxfp4-rounded"
    assert (form[1].value, form[3].value) == (_estimate(0.0123), _estimate(0.07))
    assert replayed[0].note == f"replays the {given['mode']} of {given['source']}"
    assert replayed[3].value == "replayed"
    assert form[2].value == replayed[2].value == _estimate(4.56e-4)


def test_disagreement_in_spite_of_replay_is_a_number() -> None:
    given = {"mode": "ids", "source": "vllm:decode"}
    report = _beside(make_report(), "fsdp:replayed", 0.25, replay=given)
    assert _rows(report)[-1][3].value == _estimate(0.25)


def test_without_routes_there_is_no_number() -> None:
    assert _rows(_beside(make_report(), "mine", None))[-1][3].value is None


def test_nothing_beside_the_headline_is_no_section() -> None:
    report = make_report()
    headline = report.comparisons[0]
    prefill = replace(headline, rollout="vllm:prefill")
    report = replace(
        report,
        comparisons=(headline, prefill),
        fingerprints={**report.fingerprints, "vllm:prefill": {"mode": "prefill"}},
    )
    assert passes.variants(report) is None
