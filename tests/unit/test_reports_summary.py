"""What every rendering says: rows, sides, noise, next steps, places, gauges."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from mismatch.analysis.levels import MORE_PROMPTS, ONE_FORM
from mismatch.reports import summary
from mismatch.reports.section import Section, cell_interval, cell_text
from mismatch.reports.sections import headline, noise, ran
from mismatch.reports.summary import metric_label, noise_label
from mismatch.types import (
    Answer,
    Check,
    Comparison,
    Estimate,
    Judgement,
    NotTested,
    Report,
    Verdict,
)
from tests.report_makers import MAKERS, sections
from tests.reports_fixture import estimate, make_failing_report, make_report, noise_pair
from tests.tables import values
from tests.texts import numbers


def row(value: float, healthy: float, unfit: float, metric: str = "k3_kl") -> summary.Row:
    judgement = Judgement(metric, "tolerable", value, healthy, unfit, "source")
    return summary.Row(metric, metric_label(metric), estimate(value), judgement)


def test_without_the_sampling_law_there_is_no_kl() -> None:
    assert metric_label("k3_kl", sampled_by_left=True).label.startswith("k3 KL")
    assert "divergence score" in metric_label("k3_kl", sampled_by_left=False).label
    assert metric_label("probs_pearson", sampled_by_left=False) == metric_label("probs_pearson")


def test_bounds_point_the_way_that_is_bad() -> None:
    high = row(0.01, 0.002, 0.013)
    assert (high.healthy(0.002), high.unfit(0.013)) == ("≤ 0.002", "> 0.013")
    low = row(0.98, 0.99, 0.97, "probs_pearson")
    assert (low.healthy(0.99), low.unfit(0.97)) == ("≥ 0.99", "< 0.97")
    share = row(0.004, 0.002, 0.01, "ratio_outside_2")
    assert (share.healthy(0.002), share.unfit(0.01)) == ("≤ 0.2 %", "> 1 %")
    assert [item.write(item.estimate.value) for item in (low, share)] == ["0.9800", "0.40 %"]


def test_the_table_has_value_interval_level_and_status() -> None:
    report = make_report()
    shown = headline.section(report, None)
    assert shown is not None
    every = shown.parts[0].tables[0]  # six of them are open
    rows = {item["metric"]: item for item in values(every)}
    for judgement in report.verdict.judgements:
        item = rows[metric_label(judgement.metric).label]
        assert item["value"] == report.comparisons[0].metrics[judgement.metric]
        assert (item["healthy"], item["unfit"]) == (judgement.healthy, judgement.unfit)
        assert item["level"] == judgement.status
    cells = shown.tables[0].cells()[1]
    assert cell_text(cells[2], shown.tables[0].columns[2]) == "≤ 0.002"
    assert " … " in cell_interval(cells[1], shown.tables[0].columns[1])


def test_a_note_that_concerns_every_metric_is_said_once() -> None:
    report = make_report()
    first = report.comparisons[0]
    flagged = {k: replace(v, flags=("few-prompts",)) for k, v in first.metrics.items()}
    shown = headline.section(replace(report, comparisons=(replace(first, metrics=flagged),)), None)
    assert shown is not None
    (note,) = shown.parts[0].notes
    assert note.startswith("all: few prompts")
    (tail,) = headline.section(report, None).parts[0].notes  # type: ignore[union-attr]
    assert tail.startswith("k3 KL: heavy-tailed")


def test_a_frameworks_names_are_a_table_that_says_where_numbers_differ() -> None:
    shown = headline.section(make_report(), "miles")
    assert shown is not None
    (names,) = [part for part in shown.parts if part.id == "names"]
    by_name = {item["name there"]: item for item in values(names.tables[0])}
    k3 = make_report().comparisons[0].metrics["k3_kl"].value
    assert by_name["train_rollout_kl"]["value"] == k3
    assert by_name["train_rollout_kl"]["same number"] == "no"
    (verl,) = headline.names_there(make_report(), "verl")
    by_name = {item["name there"]: item for item in values(verl.tables[0])}
    assert by_name["rollout_corr/k3_kl"]["same number"] == "yes"
    assert any("train_rollout_kl" in note for note in names.notes)
    assert headline.section(make_report(), None).parts[0].id == "judged"  # type: ignore[union-attr]


def test_nothing_that_is_left_out_is_worse_than_what_is_shown() -> None:
    ranks = {"healthy": 0, "tolerable": 1, "inconclusive": 1, "unfit": 2}
    for report in (make_report(), make_failing_report()[0]):
        shown = [row.judgement for row in summary.most_telling(report)]
        rest = [each for each in report.verdict.judgements if each not in shown]
        assert len(shown) == min(6, len(report.verdict.judgements))
        worst = max((ranks[each.status] for each in rest), default=0)
        assert all(each and ranks[each.status] >= worst for each in shown)


@pytest.mark.parametrize(
    ("mean", "median", "far", "parts"),
    [
        (0.0, 0.0, 0.0, ["Both sides give every token exactly the same probability."]),
        (0.125, 0.0023, 0.038, ["Median token: 0.23 % apart", "0.12 nats", "3.8 % of tokens"]),
        (0.9, 0.9, 0.0, ["Median token: 2.5× apart", "no token differs by more than 2×"]),
        (0.01, 0.0, 0.0, ["Median token: no difference", "0.010 nats"]),
    ],
)
def test_typically_is_the_median_and_not_the_mean(
    mean: float, median: float, far: float, parts: list[str]
) -> None:
    metrics = {
        "logprob_abs_diff_mean": estimate(mean),
        "logprob_abs_diff_p50": estimate(median),
        "ratio_outside_2": estimate(far),
    }
    report = replace(make_report(), comparisons=(Comparison("a", "b", True, metrics),))
    text = summary.in_plain_words(report)
    assert all(part in text for part in parts), text
    assert "13 %" not in text  # exp(0.125) - 1: the mean, which no typical token has


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
    phrases = [item.beside.partition(" the ")[0] for item in rows]
    assert phrases == ["0 % of", "25 % of", "2.0×", "1.0×"]
    assert [item.words for item in rows] == [noise_label(pair) for pair in pairs]
    assert len({item.words for item in rows}) == len(pairs)


def test_a_side_against_float32_is_no_pass_that_should_agree_with_it() -> None:
    report = make_report()
    mean = report.comparisons[0].metrics["logprob_abs_diff_mean"].value
    pairs = (
        noise_pair("fsdp", "fsdp:regrouped", mean / 4, 0.1),
        noise_pair("vllm:decode", "reference:fp32", mean / 20, 0.1),
        noise_pair("fsdp", "reference:fp32", mean, 0.1),
    )
    rows = summary.noise_rows(replace(report, noise_floor=pairs))
    assert [row.agree for row in rows] == [True, False, False]
    shown = noise.section(replace(report, noise_floor=pairs))
    assert len(shown.tables[0].rows) == len(pairs)
    assert numbers(shown.short)[0] == 25
    assert "trainer: regrouped" in shown.short
    _, conclusion = shown.sentences[0].split(": ")
    assert "trainer" in conclusion
    assert not numbers(conclusion)  # a page has one multiple, that of the square's picture
    alike = (pairs[0], noise_pair("vllm:decode", "reference:fp32", 0.98 * mean, 0.1), pairs[2])
    assert noise.float32(replace(report, noise_floor=alike))[0].endswith(f": {noise.NEITHER}.")


def test_next_steps_put_the_failed_check_first() -> None:
    report, _ = make_failing_report()
    steps = summary.next_steps(report)
    (failed,) = summary.checks(report, "failed")
    assert steps[0] == f"Fix {failed.id}: {failed.fix}"
    assert not any("--num-prompts" in step for step in steps)  # more data would not mend it


def with_verdict(report: Report, *judgements: Judgement) -> Report:
    status = "tolerable" if any(item.status == "tolerable" for item in judgements) else "healthy"
    return replace(report, checks=(), verdict=Verdict(status, "because", "bf16 MoE", judgements))


def test_next_steps_name_the_deciding_number_of_prompts() -> None:
    base = Judgement("k3_kl", "tolerable", 2e-3, 2e-3, 0.013, "x", inconclusive=True)
    other = replace(base, metric="logprob_abs_diff_mean", deciding_prompts=90)
    steps = summary.next_steps(
        with_verdict(make_report(), replace(base, deciding_prompts=180), other)
    )
    assert "--num-prompts 180" in steps[0]
    assert not any("float32" in step for step in steps)  # rounding blames no side


@pytest.mark.parametrize(("prompts", "asks"), [(8, True), (47, True), (48, False), (64, False)])
def test_few_prompts_are_to_be_more_though_a_tail_rules(prompts: int, asks: bool) -> None:
    report = make_report()
    sides = summary.headline(report)
    drawn = {name: replace(each, n_prompts=prompts) for name, each in sides.metrics.items()}
    fewer = replace(report, comparisons=(replace(sides, metrics=drawn),))
    carried = Judgement("k3_kl", "tolerable", 1e-4, 2e-3, 0.013, "x", inconclusive=True)
    steps = summary.next_steps(with_verdict(fewer, carried))
    assert any("--num-prompts" in step for step in steps) is asks


def test_a_warning_alone_sends_nobody_to_kernels() -> None:
    healthy = Judgement("k3_kl", "healthy", 1e-4, 2e-3, 0.013, "x")
    report = with_verdict(make_report(), healthy)
    warned = Check("whole-model", "warning", "few layers ran", "judge the whole model")
    verdict = replace(report.verdict, status="tolerable")
    steps = summary.next_steps(replace(report, verdict=verdict, checks=(warned,)))
    assert steps == [f"Fix {warned.id}: {warned.fix}"]


def test_a_check_that_wants_more_data_is_one_step_with_a_number() -> None:
    carried = Judgement("k3_kl", "tolerable", 1e-4, 2e-3, 0.013, "x", inconclusive=True)
    report = with_verdict(make_report(), carried)
    wide = Check("excess-trainer", "warning", "could hide a fault", MORE_PROMPTS)
    steps = summary.next_steps(replace(report, checks=(wide,)))
    (asks,) = [step for step in steps if "--num-prompts" in step]
    assert numbers(asks)
    assert not any(wide.id in step for step in steps)


def test_without_float32_passes_the_first_step_is_to_make_them() -> None:
    report = make_report().with_analyses(square=None)
    status = Answer("inconclusive", "the float32 passes were left out (--depth quick)")
    verdict = replace(report.verdict, status="inconclusive", correctness=status)
    for spec, flag in (
        ({"quick": True}, "--depth quick"),
        ({"noise_floor": False}, "--no-noise-floor"),
    ):
        asked = replace(report, verdict=verdict, run={**report.run, "spec": spec})
        assert flag in summary.next_steps(asked)[0]


def test_a_healthy_run_has_nothing_to_fix() -> None:
    healthy = Judgement("k3_kl", "healthy", 1e-4, 2e-3, 0.013, "x")
    steps = summary.next_steps(with_verdict(make_report(), healthy))
    assert len(steps) == 1
    assert steps[0].startswith("None.")


def test_a_metric_that_another_estimate_decided_says_so_and_asks_for_nothing() -> None:
    base = make_report().comparisons[0]
    value = base.metrics["k3_kl"].value
    decided = Judgement("exact_kl", "healthy", value, 2e-3, 0.013, "x", inconclusive=True)
    metrics = base.metrics | {"exact_kl": replace(base.metrics["k3_kl"], flags=())}
    report = replace(make_report(), comparisons=(replace(base, metrics=metrics),))
    (row,) = summary.judged_rows(with_verdict(report, decided))
    (note,) = row.notes
    assert "k3" in note
    warned = with_verdict(report, decided, replace(decided, metric="k3_kl", status="tolerable"))
    steps = [summary.next_steps(each)[0] for each in (with_verdict(report, decided), warned)]
    assert steps[0].startswith("None.")
    only = replace(warned.verdict, judgements=(decided,))  # tolerable by a check
    assert summary.next_steps(replace(warned, verdict=only))[0] != steps[1]


def test_untested_names_each_reason_once() -> None:
    check = Check("truncation", "not_tested", "the engine does not say")
    same = NotTested("truncation", "the engine does not say")
    reasons = (same, NotTested("weight synchronisation", "no refit"))
    report = replace(make_report(), checks=(check,), not_tested=reasons)
    assert summary.untested(report) == list(reasons)


def test_what_ran_is_what_the_fingerprints_resolved() -> None:
    resolved = {aspect: (left, right) for aspect, left, right in ran.what_ran(make_report())}
    assert resolved["attention"] == ("CPU_ATTN", "sink-sdpa, honours sinks")
    assert resolved["experts"] == ("cpu_fused_moe", "grouped_mm")
    software = ["fsdp2 × 2", "torch 2.13.0", "transformers 5.19.0"]
    assert resolved["software"][1].split(", ") == software
    assert resolved["precision"] == ("bf16", "bf16, master fp32")
    failing = {row[0]: row for row in ran.what_ran(make_failing_report()[0])}
    assert failing["attention"][2] == "no-sinks, ignores sinks"


def test_differing_settings_come_first() -> None:
    resolved = ran.section(make_report())
    for table in (resolved.tables[0], resolved.parts[0].tables[0]):
        marks = [cells[1].value for cells in table.cells()]
        assert marks == sorted(marks, reverse=True)
    for _, mark, left, right in resolved.parts[0].tables[0].cells():
        both = "–" not in (left.value, right.value)
        assert bool(mark.value) == (both and left.value != right.value)
    marked = {row[0].value for row in resolved.tables[0].cells() if row[1].value}
    assert marked <= {"software"}  # nothing else is stated by both, means the same, and differs
    apart = make_report()
    rollout = summary.headline(apart).rollout
    other = apart.fingerprints[rollout] | {"honours_sinks": True}
    train = apart.fingerprints["fsdp"] | {"honours_sinks": False}
    sides = {**apart.fingerprints, rollout: other, "fsdp": train}
    shown = ran.section(replace(apart, fingerprints=sides))
    now = {row[0].value for row in shown.tables[0].cells() if row[1].value}
    assert now - marked == {"attention"}
    assert "attention" in shown.short
    facts = dict(tuple(item.value for item in row) for row in resolved.parts[-1].tables[0].cells())
    assert facts["command"] == summary.command(make_report())


def test_local_paths_are_not_a_models_name() -> None:
    report = make_report()
    assert summary.model_name(replace(report, model="/data/models/my-model")) == "my-model"
    assert summary.model_name(replace(report, model="openai/gpt-oss-20b")) == "openai/gpt-oss-20b"


def test_failed_checks_come_first_with_their_fix() -> None:
    checked, passed, unseen = headline.checks(make_failing_report()[0])
    results = [item["result"] for item in values(checked.tables[0])]
    assert results == ["failed", "warning"]
    assert checked.tables[0].cells()[0][1].tone == "critical"
    (failed,) = summary.checks(make_failing_report()[0], "failed")
    assert values(checked.tables[0])[0]["fix"] == failed.fix != ""
    assert (checked.folded, passed.folded) == (False, True)
    assert [item["result"] for item in values(passed.tables[0])] == ["passed"] * 5
    assert unseen.sentences == tuple(map(str, summary.untested(make_failing_report()[0])))


def every(parts: Iterable[Section]) -> Iterator[Section]:
    for section in parts:
        yield section
        yield from every(section.parts)


def test_no_column_has_plain_and_scientific_numbers() -> None:
    seen = 0
    for section in every(sections(*MAKERS["example-tiny-gpt-oss"]())):
        for table in section.tables:
            for at, column in enumerate(table.columns):
                shown = [cell_text(row[at], column) for row in table.cells()
                         if isinstance(row[at].value, float | Estimate)]  # fmt: skip
                scientific = [text for text in shown if re.search(r"\de-?\d", text)]
                plain = [text for text in shown if re.fullmatch(r"−?\d*\.\d+", text)]
                assert not (scientific and plain), (section.id, column.title)
                seen += len(shown)
    assert seen > 200


def test_weights_in_two_forms_are_the_step_and_no_other_place_is_named() -> None:
    warned = Judgement("k3_kl", "tolerable", 3e-3, 2e-3, 0.013, "x")
    report = with_verdict(make_report(), warned)
    assert any(step.startswith("Look") for step in summary.next_steps(report))
    asked_for = Check("weights-as-loaded", "warning", "asked for", ONE_FORM)
    steps = summary.next_steps(replace(report, checks=(asked_for,)))
    assert steps[0] == f"Fix {asked_for.id}: {asked_for.fix}"
    assert not any(step.startswith("Look") for step in steps)
