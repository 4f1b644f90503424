"""What every rendering says: rows, sides, noise, next steps, places, gauges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mismatch.analysis.published_values import Reference
from mismatch.metrics import METRICS as DECLARED
from mismatch.reports import normal, sides, summary, words
from mismatch.reports.gauge import CRITICAL_AT, HEALTHY_AT, gauge_of, place
from mismatch.types import Check, Comparison, Judgement, Report, Verdict
from tests.reports_fixture import (
    estimate,
    make_failing_report,
    make_report,
    noise_pair,
)


def row(value: float, healthy: float, critical: float, metric: str = "k3_kl") -> summary.Row:
    judgement = Judgement(metric, "warn", value, healthy, critical, "source")
    return summary.Row(metric, words.words_for(metric), estimate(value), judgement)


def test_every_declared_metric_has_words_that_fit_the_table() -> None:
    known = [words.words_for(name) for name in DECLARED]
    assert all(item.meaning and len(item.label) <= 24 for item in known)
    assert set(words.ROUTING) <= set(DECLARED)


def test_without_the_sampling_law_there_is_no_kl() -> None:
    assert words.words_for("k3_kl", sampled_by_left=True).label.startswith("k3 KL")
    assert "divergence score" in words.words_for("k3_kl", sampled_by_left=False).label
    assert words.words_for("probs_pearson", sampled_by_left=False) == words.words_for(
        "probs_pearson"
    )


def test_bounds_point_the_way_that_is_bad() -> None:
    high = row(0.01, 0.002, 0.013)
    assert (high.healthy, high.critical) == ("≤ 0.002", "> 0.013")
    low = row(0.98, 0.99, 0.97, "probs_pearson")
    assert (low.healthy, low.critical, low.value) == ("≥ 0.99", "< 0.97", "0.9800")
    share = row(0.004, 0.002, 0.01, "ratio_outside_2")
    assert (share.value, share.healthy, share.critical) == ("0.40 %", "≤ 0.2 %", "> 1 %")


def test_an_inconclusive_metric_says_how_many_prompts_decide() -> None:
    item = row(0.01, 0.002, 0.013)
    assert item.judgement is not None
    unsure = replace(
        item, judgement=replace(item.judgement, inconclusive=True, deciding_prompts=180)
    )
    assert unsure.notes == ("the interval spans a level; about 180 prompts would decide",)
    assert item.notes == ()


def test_judged_first_then_context_and_nothing_twice() -> None:
    report = make_report()
    judged = [item.metric for item in summary.judged_rows(report)]
    assert judged == [item.metric for item in report.verdict.judgements]
    others = [item.metric for item in summary.other_rows(report)]
    assert others
    assert not set(judged) & set(others)


@pytest.mark.parametrize(
    ("mean", "far", "sentence"),
    [
        (0.0, 0.0, "Both sides give every token exactly the same probability."),
        (0.0111, 0.0, "typically differ by 1.1 %; no token by more than a factor of 2."),
        (0.9, 0.3, "typically differ by a factor of 2.5; 30 % of the tokens by more than"),
    ],
)
def test_the_size_in_plain_words(mean: float, far: float, sentence: str) -> None:
    metrics = {"logprob_abs_diff_mean": estimate(mean), "ratio_outside_2": estimate(far)}
    report = replace(make_report(), comparisons=(Comparison("a", "b", True, metrics),))
    assert sentence in summary.in_plain_words(report)


def test_noise_is_named_and_set_against_the_headline() -> None:
    report = make_report()
    mean = report.comparisons[0].metrics["logprob_abs_diff_mean"].value
    pairs = (
        noise_pair("vllm:decode", "vllm:prefill", 0.0, 0.0),
        noise_pair("fsdp", "fsdp:regrouped", mean / 4, 0.1),
        noise_pair("vllm:decode", "reference:fp32", 2 * mean, 0.1),
        noise_pair("fsdp", "reference:fp32", mean, 0.1),
    )
    rows = summary.noise_rows(replace(report, noise_floor=pairs))
    assert [(item.words.label, item.share) for item in rows] == [
        ("engine: prefill / decode", "0 %"),
        ("trainer: regrouped", "25 %"),
        ("engine vs float32", "2.0×"),
        ("trainer vs float32", "1.0×"),
    ]


def test_next_steps_put_the_failed_check_first() -> None:
    report, _ = make_failing_report()
    steps = summary.next_steps(report)
    assert steps[0] == "Fix attention-sinks: mismatch check --attention auto"
    assert not any("--num-prompts" in step for step in steps)  # more data would not mend it


def with_verdict(report: Report, *judgements: Judgement) -> Report:
    status = "warn" if any(item.status == "warn" for item in judgements) else "healthy"
    return replace(report, checks=(), verdict=Verdict(status, "because", "bf16 MoE", judgements))


def test_next_steps_name_the_deciding_number_of_prompts() -> None:
    base = Judgement("k3_kl", "warn", 2e-3, 2e-3, 0.013, "x", inconclusive=True)
    other = replace(base, metric="logprob_abs_diff_mean", deciding_prompts=90)
    steps = summary.next_steps(
        with_verdict(make_report(), replace(base, deciding_prompts=180), other)
    )
    assert steps[0].startswith("Measure more: --num-prompts 180")
    assert "trainer vs float32" in steps[1]


def test_a_healthy_run_has_nothing_to_mend() -> None:
    healthy = Judgement("k3_kl", "healthy", 1e-4, 2e-3, 0.013, "x")
    steps = summary.next_steps(with_verdict(make_report(), healthy))
    assert len(steps) == 1
    assert steps[0].startswith("Nothing to mend.")


def test_untested_names_each_reason_once() -> None:
    check = Check("truncation", "not_tested", "the engine does not say")
    reasons = ("truncation: the engine does not say", "weight synchronisation: no refit")
    report = replace(make_report(), checks=(check,), not_tested=reasons)
    assert summary.untested(report) == list(reasons)


def test_what_ran_is_what_the_fingerprints_resolved() -> None:
    ran = {aspect: (left, right) for aspect, left, right in sides.what_ran(make_report())}
    assert ran["attention"] == ("CPU_ATTN", "sink-sdpa, honours sinks")
    assert ran["experts"] == ("cpu_fused_moe", "grouped_mm")
    assert ran["software"][1] == "fsdp2 × 2, torch 2.13.0, transformers 5.19.0"
    assert ran["precision"] == ("bf16", "bf16, master fp32")
    failing = {row[0]: row for row in sides.what_ran(make_failing_report()[0])}
    assert failing["attention"][2] == "no-sinks, ignores sinks"


def test_local_paths_are_not_a_models_name() -> None:
    report = make_report()
    assert summary.model_name(replace(report, model="/data/models/my-model")) == "my-model"
    assert summary.model_name(replace(report, model="openai/gpt-oss-20b")) == "openai/gpt-oss-20b"


def test_gauge_zones_are_the_levels() -> None:
    item = row(2e-3, 2e-3, 0.013)
    assert place(item, 2e-3) == pytest.approx(HEALTHY_AT)
    assert place(item, 0.013) == pytest.approx(CRITICAL_AT)
    assert place(item, 0.0) == 0.01
    assert place(item, 1e9) == 0.99
    assert place(item, 2e-4) == pytest.approx(HEALTHY_AT / 2)  # one of two decades
    assert place(item, 1e-4) < place(item, 1e-3) < HEALTHY_AT < place(item, 5e-3) < CRITICAL_AT


def test_gauge_of_a_correlation_runs_the_other_way() -> None:
    item = row(0.98, 0.99, 0.97, "probs_pearson")
    assert place(item, 0.999) < HEALTHY_AT < place(item, 0.98) < CRITICAL_AT < place(item, 0.5)


def test_gauge_without_room_for_a_logarithm() -> None:
    item = row(1e-4, 0.0, 5e-4, "ratio_outside_2")
    assert HEALTHY_AT < place(item, 1e-4) < CRITICAL_AT < place(item, 1e-2)


def test_gauge_carries_interval_and_marks() -> None:
    drawn = gauge_of(row(5e-3, 2e-3, 0.013), [(2e-3, "elsewhere")])
    assert drawn is not None
    assert drawn.low < drawn.value < drawn.high
    assert drawn.marks == ((pytest.approx(HEALTHY_AT), "elsewhere"),)


def test_this_run_stands_in_the_ladder_by_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    values = (1.0, 1e-9)
    known = tuple(Reference("m", "s", summary.HEADLINE, v, "bf16 MoE", "src") for v in values)
    monkeypatch.setattr("mismatch.analysis.published_values.REFERENCES", known)
    (ladder,) = normal.ladders(make_report())
    assert [rung.ours for rung in ladder.rungs] == [False, True, False]


def test_a_class_of_stack_without_references_says_so() -> None:
    report = make_report()
    other = replace(report, verdict=replace(report.verdict, levels="fp64"))
    assert normal.ladders(other) == []
    assert "No published mean |delta|" in normal.sentences(other)[0]


def test_weights_in_two_forms_are_the_step_and_no_other_place_is_named() -> None:
    warned = Judgement("k3_kl", "warn", 3e-3, 2e-3, 0.013, "x")
    report = with_verdict(make_report(), warned)
    assert any(step.startswith("Look") for step in summary.next_steps(report))
    asked_for = Check("weights-as-loaded", "warning", "asked for", "train in one form")
    steps = summary.next_steps(replace(report, checks=(asked_for,)))
    assert steps[0] == "Fix weights-as-loaded: train in one form"
    assert not any(step.startswith("Look") for step in steps)
