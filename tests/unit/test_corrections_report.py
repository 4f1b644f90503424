"""The section that every report has."""

import io
import json
import re
from functools import cache

import pytest
from rich.console import Console

from mismatch.pipeline.build import build_report
from mismatch.pipeline.document import report_from_json, report_to_json
from mismatch.reports.html import to_html
from mismatch.reports.markdown import to_markdown
from mismatch.reports.terminal import print_report
from mismatch.run.directory import load_spec
from tests.made_run import make_run
from tests.reports_fixture import make_failing_report, make_report, make_tokens

FAVOURED, TOKENS = make_failing_report()
NEEDLESS = make_report()
TITLE = "Corrections, previewed"


def terminal(report):
    console = Console(width=80, file=io.StringIO())
    print_report(report, console)
    return console.file.getvalue()


@cache
def _html(favoured):
    return to_html(FAVOURED if favoured else NEEDLESS, TOKENS)


def html(report):
    known = report is FAVOURED or report is NEEDLESS
    return _html(report is FAVOURED) if known else to_html(report, TOKENS)


RENDERINGS = {
    "terminal": terminal,
    "html": html,
    "markdown": to_markdown,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RENDERINGS)
def test_every_rendering_has_the_section_with_its_sentence(name):
    said = " ".join(re.sub(r"\\", "", RENDERINGS[name](FAVOURED)).split())
    assert TITLE in said
    assert "TIS, token: the mismatch can shift a batch by up to 0.18" in said
    assert "None needed: " in " ".join(RENDERINGS[name](NEEDLESS).split())


@pytest.mark.slow
@pytest.mark.parametrize("name", RENDERINGS)
def test_a_report_without_a_preview_has_no_section(name):
    assert TITLE not in RENDERINGS[name](FAVOURED.with_analyses(corrections=None))


def test_the_terminal_shows_few_rows_and_no_correction_among_them():
    text = terminal(FAVOURED)
    section = text[text.index(TITLE) : text.index("What ran")]
    rows = [line for line in section.splitlines() if re.search(r" \d+ \d\.\d+ +\d", line)]
    assert 2 <= len(rows) <= 4
    assert sum("no correction" in row for row in rows) == 1
    assert max(map(len, section.splitlines())) <= 80


def test_html_and_markdown_show_how_to_switch_it_on():
    for text in (html(FAVOURED), to_markdown(FAVOURED)):
        assert "rollout_is_threshold: 2" in text
        assert "vllm_importance_sampling_mode" in text
        assert "hides the mismatch, does not remove it" in text


def test_the_preview_touches_neither_metrics_nor_verdict():
    document = report_to_json(FAVOURED)
    bare = report_to_json(FAVOURED.with_analyses(corrections=None))
    made = document.pop("corrections")
    assert document == bare
    assert not {"k3_kl", "verdict", "status"} & set(made["previews"][0])


def test_older_documents_have_no_preview():
    document = json.loads(json.dumps(report_to_json(NEEDLESS)))
    assert report_from_json(document).result("corrections") == NEEDLESS.result("corrections")
    del document["corrections"]
    assert report_from_json(document).result("corrections") is None


def test_a_run_is_previewed_and_says_what_it_could_not(tmp_path):
    run = make_run(tmp_path / "run")
    report, _ = build_report(run, load_spec(run))
    made = report.result("corrections")
    assert (made.rollout, made.train, made.batch) == ("transformers:decode", "fsdp", 16)
    assert made.named("tis-token").weight_mean == pytest.approx(1.01005, abs=1e-5)
    assert "corrections: gradient cosine: the rollout has no rewards" in report.not_tested


def test_the_same_tokens_give_the_same_preview():
    assert make_report(make_tokens()).result("corrections") == NEEDLESS.result("corrections")
