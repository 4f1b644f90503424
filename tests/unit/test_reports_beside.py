"""What stands beside the headline is shown in every rendering, and only where there is some."""

from __future__ import annotations

import io
from dataclasses import replace

import pandas as pd
import pytest
from rich.console import Console

from mismatch.reports import beside
from mismatch.reports.html import to_html
from mismatch.reports.markdown import to_markdown
from mismatch.reports.terminal import print_report
from mismatch.types import Comparison, Estimate, Report
from tests.reports_fixture import make_report, make_tokens


def _estimate(value: float) -> Estimate:
    return Estimate(value, None, None, 10, 2, 2)


def _beside(report: Report, name: str, experts: float | None, **facts: object) -> Report:
    """The report with one more comparison of the engine, with a trainer of these facts."""
    metrics = {"logprob_abs_diff_mean": _estimate(0.0123), "k3_kl": _estimate(4.56e-4)}
    routing = {} if experts is None else {"routing_disagree_layer": _estimate(experts)}
    headline = report.comparisons[0]
    more = Comparison(headline.rollout, name, True, metrics, routing=routing)
    told = {**report.fingerprints, name: {"mode": "train", **facts}}
    return replace(report, comparisons=(*report.comparisons, more), fingerprints=told)


def _renderings(report: Report, tokens: pd.DataFrame) -> list[str]:
    out = io.StringIO()
    print_report(report, Console(file=out, width=80))
    html = to_html(report, tokens)
    return [out.getvalue(), to_markdown(report), html.split('id="everything"')[0]]


@pytest.mark.slow
def test_weights_in_another_form_and_replayed_experts_are_shown() -> None:
    report, tokens = make_report(), make_tokens()
    report = _beside(report, "fsdp:other-weights", 0.07, weights_form="mxfp4-rounded")
    given = {"mode": "ids", "source": "vllm:decode"}
    report = _beside(report, "fsdp:replayed", 0.0, replay=given)
    headline, form, replayed = beside.rows(report)
    assert headline.pair.endswith(f"/ {report.comparisons[0].train}")
    assert headline.meaning == ""
    assert (form.meaning, form.mean, form.experts) == ("experts mxfp4-rounded", "0.0123", "7.0 %")
    assert (replayed.meaning, replayed.experts) == ("replays the ids of vllm:decode", "replayed")
    assert form.k3 == replayed.k3 == "4.56e-4"
    for text in _renderings(report, tokens):
        assert beside.TITLE in text
        assert "other-weights" in text
        assert "7.0" in text
        assert "replayed" in text


def test_disagreement_in_spite_of_replay_is_a_number() -> None:
    given = {"mode": "ids", "source": "vllm:decode"}
    report = _beside(make_report(), "fsdp:replayed", 0.25, replay=given)
    assert beside.rows(report)[-1].experts == "25 %"


def test_without_routes_there_is_no_number() -> None:
    assert beside.rows(_beside(make_report(), "mine", None))[-1].experts == "–"


@pytest.mark.slow
def test_nothing_beside_the_headline_is_no_section() -> None:
    report, tokens = make_report(), make_tokens()
    headline = report.comparisons[0]
    prefill = replace(headline, rollout="vllm:prefill")
    report = replace(
        report,
        comparisons=(headline, prefill),
        fingerprints={**report.fingerprints, "vllm:prefill": {"mode": "prefill"}},
    )
    assert beside.rows(report) == []
    for text in _renderings(report, tokens):
        assert beside.TITLE not in text
