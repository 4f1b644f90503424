"""The table of fixes, as its readers see it, and as JSON."""

import json
from dataclasses import replace

import jsonschema
import pytest

from mismatch.errors import MismatchError
from mismatch.experiments.fixes.catalogue import chosen_of, labels
from mismatch.experiments.results import FixCost, FixOutcome, HeldOut
from mismatch.pipeline.document import report_from_json, report_to_json, schema
from mismatch.reports import summary
from mismatch.reports.formatting import alike
from mismatch.reports.sections import fixes, page
from mismatch.reports.sections.fixes import command_of
from mismatch.types import Answer, Estimate
from tests.fixes_fixture import K3, MEAN, make_table, make_useless_table, number, verdict
from tests.reports_fixture import make_failing_report, make_report
from tests.texts import numbers

FAILING, TOKENS = make_failing_report()
TRIED = FAILING.with_analyses(fixes=make_table())
USELESS = make_report().with_analyses(fixes=make_useless_table())


def rows(table, index):
    """Fix -> title -> cell, of what each does (0) or of every number (1)."""
    section = fixes.section(table, TRIED)
    of_all = section.parts[0]
    rest = [item.tables[0] for item in of_all.parts if item.id == "fixes-rest"]
    shown = ((section.tables[0], *rest), of_all.tables)[index]
    titles = [column.title for column in shown[0].columns]
    return {
        cells[0].value: dict(zip(titles, cells, strict=True))
        for item in shown
        for cells in item.cells()
    }


def part(report, id):
    section = fixes.section(report.result("fixes"), report)
    parts = [part for outer in section.parts for part in (outer, *outer.parts)]
    return next((part for part in parts if part.id == id), None)


def test_a_page_shows_the_best_and_folds_the_others():
    first = make_table().outcomes
    many = tuple(replace(row, id=f"{row.id}{number}") for number in range(9) for row in first)
    section = fixes.section(replace(make_table(), outcomes=(*first, *many)), TRIED)
    assert len(section.tables[0].rows) == 1 + fixes.SHOWN
    rest = section.parts[0].parts[0].tables[0]
    measured = sum(row.measured for row in (*first, *many))
    assert len(rest.rows) == measured - fixes.SHOWN
    height = section.figures[0].size[1]
    few = fixes.section(replace(make_table(), outcomes=first[: fixes.SHOWN]), TRIED)
    assert height == few.figures[0].size[1]
    assert len(fixes.section(make_useless_table(), USELESS).tables[0].rows) == 3


def test_best_single_and_best_together_are_named_with_their_effect():
    table = make_table()
    single, together, *_ = fixes.sentences(table)
    assert f": {table.best}. " in single
    assert "598×" in single
    assert "34×" in single
    assert f": {table.best_together}. " in together
    own = part(TRIED, "fixes-settings").blocks[0]
    used = [table.outcome(id) for id in (table.best, table.best_together)]
    assert own.lines == tuple(map(fixes.command_of, used))


def share(value):
    return Estimate(value, value - 0.1, value + 0.1, 5_063, 48, 24)


@pytest.mark.parametrize(
    ("again", "words"),
    [
        (HeldOut("a", "a", 24, 24, {MEAN: share(0.5)}, {MEAN: 0.01}, True),
         ["Confirmed on held-out prompts: a", "the other 24 it removes 50 % (40 % to 60 %)"]),
        (HeldOut("a", "a", 24, 24, {MEAN: share(0.02)}, {MEAN: 0.8}),
         ["Not confirmed on held-out", "removes 2.0 %"]),
        (HeldOut("a", "b", 24, 24, {MEAN: share(0.5)}, {MEAN: 0.01}),
         ["choose b instead of a", "50 %"]),
        (HeldOut("a", None, 1, 1, reason="too few prompts"), ["may look too good", "too few"]),
    ],
)  # fmt: skip
def test_the_best_is_told_with_its_effect_where_it_was_not_chosen(again, words):
    sentences = fixes.sentences(replace(make_table(), held_out=again))
    (sentence,) = [text for text in sentences if "onfirmed" in text]
    assert all(word in sentence for word in words), sentence


def test_a_change_that_is_sure_and_tiny_is_negligible_and_never_a_check_mark():
    """0.4 % of mean |delta|, p < 0.001."""
    tiny = replace(
        make_table().outcomes[2], outcome="negligible", significant=True,
        removed={MEAN: share(0.004)}, p_values={K3: 0.86, MEAN: 1e-4},
    )  # fmt: skip
    alone = replace(make_table(), outcomes=(tiny,), best=None, best_together=None)
    shown = rows(alone, 0)[tiny.id]
    assert (shown["result"].value, shown["result"].tone) == ("negligible", "dim")
    assert shown["removed"].value == tiny.removed[MEAN]


def test_a_verdict_that_correctness_leaves_open_says_so():
    first, *others = make_table().outcomes
    open_ = replace(
        verdict("inconclusive", "not measured"),
        correctness=Answer("inconclusive", "not measured"), fitness=Answer("healthy", "all within"),
    )  # fmt: skip
    table = replace(make_table(), outcomes=(replace(first, verdict_after=open_), *others))
    sentence = fixes.NOT_AGAIN.format(open_.fitness.status)
    assert any(sentence in text for text in fixes.sentences(table))
    assert not any(sentence in text for text in fixes.sentences(make_table()))


def test_what_worsens_and_what_fails_is_said():
    sentences = fixes.sentences(make_table())
    assert [text.split()[0] for text in sentences if "worse" in text] == ["fp32-router"]
    assert any("Failed" in text and "fp16" in text for text in sentences)
    others = part(TRIED, "fixes-others")
    left = make_table().outcome("batch-invariant")
    reasons = {row[0].value: row[1].value for row in others.tables[0].cells()}
    assert reasons[left.id] == left.reason != ""
    assert others.notes == make_table().left_out
    assert part(TRIED, "fixes-numbers").notes == (make_table().method,)


def test_no_help_is_said_as_such():
    section = fixes.section(make_useless_table(), USELESS)
    assert section.sentences[0].startswith("None")
    assert numbers(section.sentences[0]) == [len(USELESS.result("fixes").outcomes)]
    assert not any("To use" in text or "Best" in text for text in section.sentences)
    assert not [part for part in section.parts if part.id.startswith("fixes-settings")]


def test_too_few_prompts_for_any_significance_are_named():
    table = make_useless_table()
    # 4 tests: 4 * 2 / 2**7 = 0.0625 > 0.05 >= 4 * 2 / 2**8
    for prompts, too_few in ((7, True), (8, False)):
        few = {K3: replace(number(0.061), n_prompts=prompts)}
        outcomes = tuple(replace(row, before=few) for row in table.outcomes)
        last = fixes.sentences(replace(table, outcomes=outcomes))[-1]
        assert (numbers(last) == [7, 8]) == too_few  # the prompts that there are, and are needed


def test_the_frameworks_settings_of_the_best_are_shown_once():
    section = fixes.section(make_table(), TRIED)
    lines = [
        text
        for outer in section.parts
        for part in (outer, *outer.parts)
        for block in part.blocks
        for text in block.lines
    ]
    text = " ".join(lines)
    assert text.count("override_config.attn_implementation=eager") == 1
    assert "enable_rollout_routing_replay=True" in text


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("fp32", "mismatch check … --train-dtype fp32"),
        (
            "batch-invariant+engine-fp32",
            "VLLM_BATCH_INVARIANT=1 mismatch check … --dtype fp32",
        ),
        (
            "processed-logprobs+rollout-bf16-weights",
            "mismatch check … --weights engine=bf16, without --engine-arg logprobs_mode"
            " and --engine-arg quantization",
        ),
        (
            "router-replay=ids+weights+engine-fp32-lm-head",
            "mismatch check … --replay-routing ids+weights"
            """ --engine-arg 'hf_overrides={"head_dtype": "float32"}'""",
        ),
    ],
)
def test_advice_can_be_typed(name, command):
    flags = " ".join(str(chosen.flags) for chosen in chosen_of(name))
    assert fixes.command_of(FixOutcome(name, "train", "", flags)) == command


def test_the_flags_of_a_fix_that_is_not_here_are_shown_as_they_were_written():
    row = FixOutcome("gone", "train", "", "--other 1")
    assert fixes.command_of(row).split(" … ") == ["mismatch check", row.flags]


def test_best_first_with_values_and_changes():
    values, changes = rows(make_table(), 0), rows(make_table(), 1)
    names = [
        "attention-sinks + router-replay=ids", "attention-sinks", "engine-fp32", "fp32-router",
    ]  # fmt: skip
    assert list(values) == list(changes) == ["without", *names]
    assert [row["result"].tone for row in values.values()] == [
        "", "healthy", "healthy", "dim", "critical",
    ]  # fmt: skip
    assert [row["measured on"].value == "the same tokens" for row in changes.values()] == [
        False, True, True, False, True,
    ]  # fmt: skip
    assert [row["fix"].tone for row in values.values()] == ["", "strong", "strong", "", ""]
    first = make_table().outcomes[0]
    assert changes[names[0]]["change of k3"].value == first.paired
    assert changes["engine-fp32"]["change of k3"].value == make_table().outcomes[2].difference
    assert values["without"]["k3"].value == first.before[K3]
    assert values[names[0]]["k3"].value == first.after[K3]
    assert (changes[names[0]]["memory"].value, changes["engine-fp32"]["memory"].value) == (
        3 * 2**30, None,
    )  # fmt: skip


def test_help_that_only_the_mean_shows_is_marked():
    table = make_table()
    mean_only = replace(table.outcomes[1], p_values={K3: 0.4, "logprob_abs_diff_mean": 0.01})
    k3_only = replace(table.outcomes[0], p_values={K3: 0.01, "logprob_abs_diff_mean": 0.4})
    shown = rows(replace(table, outcomes=(mean_only, k3_only)), 0)
    assert [row["result"].value for row in shown.values()] == [None, "helps (mean)", "helps"]


def test_a_single_fix_that_beats_all_combinations_is_said():
    both, sinks, *others = make_table().outcomes
    alone = replace(make_table(), outcomes=(sinks, both, *others), best_together="attention-sinks")
    assert any("No combination" in text for text in fixes.sentences(alone))
    (own,) = [p.blocks[0] for p in fixes.section(alone, TRIED).parts if p.id == "fixes-settings"]
    assert own.title == "mismatch"
    assert len(own.lines) == 1
    assert not any("No combination" in text for text in fixes.sentences(make_table()))


def test_what_was_not_measured_is_no_number():
    bare = replace(make_table().outcomes[2], difference=None, changes={}, after={}, cost=FixCost())
    table = replace(make_table(), outcomes=(bare,), best=None, best_together=None)
    section = fixes.section(table, TRIED)
    assert section.tables == ()
    assert [row[0].value for row in section.parts[-1].tables[0].cells()] == [bare.id]


def test_the_verdict_after_fixes_says_so():
    table = make_table("after-fixes")
    before = f"{table.verdict_as_is.status.upper()} – {table.verdict_as_is.reason}"
    assert any(text.endswith(before) for text in fixes.sentences(table))
    assert not any(text.endswith(before) for text in fixes.sentences(make_table()))


def test_the_loss_rows_say_that_nothing_is_removed():
    tis, override = part(TRIED, "fixes-loss").tables[0].cells()
    assert (tis[2].value, override[2].value) == (fixes.REMOVES_NOTHING, fixes.HIDES)


def test_next_says_to_use_the_best():
    assert any(
        "Apply attention-sinks+router-replay=ids" in step for step in summary.next_steps(TRIED)
    )
    assert not any("Apply " in step for step in summary.next_steps(USELESS))


def test_a_fix_that_ends_well_leaves_nothing_else_to_do():
    report, _ = make_failing_report()
    table = make_table()
    best = table.outcome(table.best_together)
    for status, steps in (("healthy", 1), ("unfit", 2)):
        after = replace(best.verdict_after or report.verdict, status=status)
        outcomes = tuple(
            replace(each, verdict_after=after) if each.id == best.id else each
            for each in table.outcomes
        )
        tried = report.with_analyses(fixes=replace(table, outcomes=outcomes))
        assert len(summary.next_steps(tried)[:2]) == steps
        assert summary.next_steps(tried)[0].startswith(f"Apply {best.id}")


@pytest.mark.parametrize(
    "report",
    [TRIED, USELESS, FAILING.with_analyses(fixes=make_table("after-fixes"))],
    ids=["tried", "useless", "after"],
)
def test_json_is_valid_and_read_back(report):
    text = json.dumps(report_to_json(report), allow_nan=False)
    jsonschema.Draft202012Validator(schema()).validate(json.loads(text))
    assert report_from_json(json.loads(text)) == report


def test_json_has_the_fields_that_readers_rely_on():
    document = report_to_json(TRIED)
    first = document["fixes"][1]
    assert first["id"] == "attention-sinks"
    assert first["paired"]["value"] < 0
    assert first["difference"] is None
    assert first["cost"] == {"seconds": 11.5, "peak_bytes": 3 * 2**30}
    assert first["verdict_after"]["status"] == "healthy"
    assert (
        document["fixes"][2]["difference"]["low"] < 0 < document["fixes"][2]["difference"]["high"]
    )
    assert document["fix_trials"]["best"] == "attention-sinks"
    assert not {"before", "after"} & set(document["fix_trials"]["estimators"][0])


def test_one_field_without_the_other_is_no_report():
    document = report_to_json(TRIED)
    del document["fix_trials"]
    with pytest.raises(MismatchError, match="fix_trials"):
        report_from_json(document)


def test_infinite_k3_survives():
    table = make_table()
    burst = replace(number(1.0), value=float("inf"), low=None, high=None, flags=("overflow",))
    broken = replace(table.outcomes[0], after={K3: burst})
    report = TRIED.with_analyses(fixes=replace(table, outcomes=(broken,)))
    text = json.dumps(report_to_json(report), allow_nan=False)
    assert report_from_json(json.loads(text)) == report


def test_the_picture_draws_the_best_fixes_and_the_lowest():
    (figure,) = fixes.section(make_table(), TRIED).figures
    svg = figure.draw()
    measured = [row for row in make_table().outcomes if row.measured and K3 in row.after]
    assert all(" + ".join(labels(row.id)) in svg for row in measured[: fixes.SHOWN])
    lowest = min(measured, key=lambda row: row.after[K3].value)
    worst_first = replace(make_table(), outcomes=tuple(reversed(make_table().outcomes)))
    (turned,) = fixes.section(worst_first, TRIED).figures
    assert turned.title == figure.title
    assert " + ".join(labels(lowest.id)) in turned.draw()
    assert make_table().best_together in figure.title  # which is recommended


def test_the_first_answer_is_the_best_fix_with_its_flag_and_settings():
    first, *_ = page(TRIED).answers
    best = make_table().outcome(make_table().best_together)
    assert first.question == "Best fix"
    assert first.flags == command_of(best)
    values = best.before[K3].value, best.after[K3].value
    for value in values:
        assert alike(values)(value) in first.text
    assert f"→ {best.verdict_after.status.upper()}" in first.text
    assert {block.title for block in first.settings} <= {"verl", "TRL", "NeMo-RL", "prime-rl"}
    assert all(block.lines for block in first.settings)  # only what is known
    assert all(isinstance(line, str) and line for block in first.settings for line in block.lines)
    useless = page(USELESS).answers
    assert not [answer for answer in useless if answer.settings or answer.flags == best.flags]
