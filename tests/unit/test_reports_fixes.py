"""The table of fixes, as its readers see it: terminal, HTML, Markdown, JSON."""

import io
import json
import re
from dataclasses import replace
from functools import cache
from html import unescape

import jsonschema
import pytest
from rich.console import Console

from mismatch.errors import MismatchError
from mismatch.experiments.fixes.base import FixCost, FixOutcome
from mismatch.experiments.fixes.catalogue import labels
from mismatch.experiments.fixes.planning import chosen_of
from mismatch.pipeline.document import report_from_json, report_to_json, schema
from mismatch.reports import fixes, summary
from mismatch.reports.html import to_html
from mismatch.reports.markdown import to_markdown
from mismatch.reports.terminal import print_report
from tests.fixes_fixture import K3, make_table, make_useless_table, number
from tests.reports_fixture import make_failing_report, make_report

FAILING, TOKENS = make_failing_report()
TRIED = FAILING.with_analyses(fixes=make_table())
USELESS = make_report().with_analyses(fixes=make_useless_table())


def terminal(report, width=80):
    console = Console(width=width, file=io.StringIO())
    print_report(report, console)
    return console.file.getvalue()


@cache
def _html(tried):
    return to_html(TRIED if tried else USELESS, TOKENS)


def html(report):
    known = report is TRIED or report is USELESS
    return _html(report is TRIED) if known else to_html(report, TOKENS)


RENDERINGS = {"terminal": terminal, "html": html, "markdown": to_markdown}


def flat(text):
    """Without line breaks, Markdown's escapes and tags, as a reader reads it."""
    plain = re.sub(r"</?[a-z][^>]*>", " ", text.replace("\\", "").replace("\u00a0", " "))
    return " ".join(unescape(plain).split())


@pytest.fixture(scope="module", params=RENDERINGS)
def said(request):
    return flat(RENDERINGS[request.param](TRIED))


@pytest.mark.slow
def test_best_single_and_best_together_are_named_with_their_effect(said):
    assert "Best single fix: attention-sinks. k3 from 0.0610 to 1.02e-4 (598× less)" in said
    assert "mean |delta| from 0.122 to 0.00360 (34× less); the verdict with it: healthy." in said
    assert "Best together: attention-sinks+router-replay=ids. k3 from 0.0610 to 5.50e-5" in said


def test_the_command_of_the_best_is_there(said):
    assert "mismatch check … --set attention-sinks+router-replay=ids" in said


def test_what_worsens_and_what_fails_is_said(said):
    assert "fp32-router makes it worse." in said
    assert "Failed while running, and so not measured: fp16." in said
    assert "only on a GPU, and there is none" in said
    assert "over the budget of 2 minutes" in said
    assert "Holm" in said


def test_fixes_of_the_loss_remove_nothing_and_the_override_hides(said):
    assert "it reweighs the loss and removes nothing" in said
    assert "it hides the mismatch and does not remove it" in said


def test_changes_carry_their_interval_and_their_significance(said):
    assert "-0.061" in said
    assert "-0.073 … -0.049" in said
    assert "-6.0e-4" in said  # of the engine: by prompt
    assert "~ not significant" in said
    assert "< 0.001" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", RENDERINGS)
def test_a_report_without_fixes_has_no_section(name):
    assert fixes.TITLE not in RENDERINGS[name](FAILING)


@pytest.mark.slow
@pytest.mark.parametrize("name", RENDERINGS)
def test_no_help_is_said_as_such(name):
    text = flat(RENDERINGS[name](USELESS))
    expected = "None of the 2 fixes that could be measured makes an improvement that can be told"
    assert expected in text
    assert "Best single fix" not in text
    assert "How to use" not in text


def test_too_few_prompts_for_any_significance_are_named():
    table = make_useless_table()
    assert not any("however large" in text for text in fixes.sentences(USELESS))
    few = {K3: replace(number(0.061), n_prompts=7)}
    rows = tuple(replace(one, before=few) for one in table.outcomes)
    said = fixes.sentences(USELESS.with_analyses(fixes=replace(table, outcomes=rows)))
    # 4 tests: 4 * 2 / 2**7 = 0.0625 > 0.05 >= 4 * 2 / 2**8
    assert any("With 7 prompts no change could be" in text for text in said)
    assert any("at least 8 prompts" in text for text in said)
    enough = {K3: replace(number(0.061), n_prompts=8)}
    rows = tuple(replace(one, before=enough) for one in table.outcomes)
    said = fixes.sentences(USELESS.with_analyses(fixes=replace(table, outcomes=rows)))
    assert not any("however large" in text for text in said)


def test_the_terminal_stays_within_80_columns():
    text = terminal(TRIED)
    section = text[text.index(fixes.TITLE) : text.index("Error budget")].splitlines()
    assert max(map(len, section)) <= 80
    assert not [line for line in section if re.search(r"\S…", line)]  # no cell was cut
    assert "  +router-replay=ids" in section[4]


def test_the_frameworks_settings_of_the_best_are_shown():
    for text in (html(TRIED), to_markdown(TRIED)):
        assert text.count("override_config.attn_implementation=eager") == 1  # not once per advice
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
            "mismatch check … --rollout-weights bf16, without --engine-arg logprobs_mode"
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


def test_the_flags_of_another_version_are_shown_as_it_wrote_them():
    row = FixOutcome("gone", "train", "", "--other 1")
    assert fixes.command_of(row) == "mismatch check … --other 1"


def test_foreign_text_stays_text():
    assert "3 logprobs are not finite &lt;b&gt;" in html(TRIED)
    assert "3 logprobs are not finite \\<b\\>" in to_markdown(TRIED)


def test_best_first_as_the_table_has_it():
    rows = fixes.measured_rows(make_table())
    assert [row.result for row in rows] == ["helps", "helps", "not significant", "worsens"]
    assert [row.how for row in rows] == [
        "the same tokens", "the same tokens", "sampled anew, by prompt", "the same tokens",
    ]  # fmt: skip
    assert [row.best for row in rows] == [True, True, False, False]
    assert (rows[0].memory, rows[2].memory) == ("3.0 GiB", "")
    assert [row.id for row in fixes.other_rows(make_table())] == ["batch-invariant", "fp16"]


def test_help_that_only_the_mean_shows_is_marked():
    table = make_table()
    mean_only = replace(table.outcomes[1], p_values={K3: 0.4, "logprob_abs_diff_mean": 0.01})
    k3_only = replace(table.outcomes[1], p_values={K3: 0.01, "logprob_abs_diff_mean": 0.4})
    rows = fixes.measured_rows(replace(table, outcomes=(mean_only, k3_only)))
    assert [row.result for row in rows] == ["helps (mean)", "helps"]


def test_a_single_fix_that_beats_all_combinations_is_said():
    table = make_table()
    both, sinks, *others = table.outcomes
    alone = replace(table, outcomes=(sinks, both, *others), best_together="attention-sinks")
    said = fixes.sentences(TRIED.with_analyses(fixes=alone))
    assert any(
        text.startswith("No combination does clearly better. Best of them: attent") for text in said
    )
    assert len(fixes.advice(alone)) == 1
    assert not any("No combination" in text for text in fixes.sentences(TRIED))


def test_what_was_not_measured_is_no_number():
    bare = replace(make_table().outcomes[2], difference=None, changes={}, after={}, cost=FixCost())
    row = fixes.other_rows(replace(make_table(), outcomes=(bare,)))[0]
    assert {row.change, row.interval, row.k3.after, row.seconds} == {"–"}


def test_the_verdict_after_fixes_says_so():
    report = FAILING.with_analyses(fixes=make_table("after-fixes"))
    assert any(
        "that of a run with attention-sinks+router-replay=ids. As it runs now: CRITICAL" in text
        for text in fixes.sentences(report)
    )
    assert not any("As it runs now" in text for text in fixes.sentences(TRIED))


def test_the_loss_rows_take_their_numbers_from_the_preview():
    tis, override = fixes.loss_rows(TRIED)
    preview = TRIED.result("corrections").named("tis-token")
    assert tis.label == preview.label
    assert tis.bias.startswith(fixes.signed(preview.token.bias))
    assert override.remark == fixes.HIDES
    bare = fixes.loss_rows(TRIED.with_analyses(corrections=None))
    assert {one.kept for one in bare} == {"–"}


def test_next_says_to_use_the_best():
    assert any(
        "Use attention-sinks+router-replay=ids" in step for step in summary.next_steps(TRIED)
    )
    assert not any("Use " in step for step in summary.next_steps(USELESS))


def test_labels_of_a_combination():
    assert labels("router-replay=ids+weights+fp32-router") == [
        "router-replay=ids+weights", "fp32-router",
    ]  # fmt: skip
    assert labels("fp32+engine-fp32") == ["fp32", "engine-fp32"]


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


def test_older_documents_have_no_fixes():
    document = report_to_json(FAILING)
    assert not {"fixes", "fix_trials"} & set(document)
    assert report_from_json(document).result("fixes") is None


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
