"""The gradient check, as its readers see it: terminal, HTML, Markdown, JSON; and from a run."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.console import Console

from mismatch.experiments.gradients.files import check_of_run, save_batch, save_gradients
from mismatch.experiments.gradients.types import GradientCheck
from mismatch.pipeline.document import report_from_json, report_to_json, schema
from mismatch.reports import gradients, gradients_figures
from mismatch.reports.analyses import in_short
from mismatch.reports.gradients_terminal import print_gradients
from mismatch.reports.html import template
from mismatch.reports.markdown import _gradients as markdown_of
from mismatch.reports.markdown import to_markdown
from tests.gradients_fixture import make_check, planted
from tests.reports_fixture import make_report

HOSTILE = "<img src=x onerror=alert(1)>"
REPORT = make_report()


def terminal(made: GradientCheck) -> str:
    console = Console(width=80, file=io.StringIO())
    print_gradients(made, console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def html(made: GradientCheck) -> str:
    return template("gradients.html").render(gradients=gradients.view(made))


def markdown(made: GradientCheck) -> str:
    return markdown_of(REPORT.with_analyses(gradients=made))


RENDERINGS = {"terminal": terminal, "html": html, "markdown": markdown}


def flat(text: str) -> str:
    """Without line breaks, Markdown's escapes and tags, as a reader reads it."""
    plain = re.sub(r"</?[a-z][^>]*>", " ", text.replace("\\", "").replace("\u00a0", " "))
    return " ".join(unescape(plain).split())


@pytest.fixture(scope="module", params=RENDERINGS)
def said(request: pytest.FixtureRequest) -> str:
    return flat(RENDERINGS[request.param](make_check()))


def test_every_sentence_is_there(said: str) -> None:
    for sentence in make_check().summary:
        assert sentence in said
    assert "16 prompts, 64 samples, 3,200 action tokens; advantages: rewards" in said
    assert "not adjusted for how many there are" in said
    assert "A correction aims at another gradient" in said


def test_every_gradient_has_its_row_or_is_named_with_its_equal(said: str) -> None:
    for row in make_check().rows:
        assert row.id in said
    assert "fp32: the reference's gradient" in said
    assert "veto and ppo-override: the gradient of baseline" in said
    for mark in ("✓ nearer", "✕ further off"):
        assert mark in said


def test_the_terminal_is_80_columns_wide() -> None:
    assert max(map(len, terminal(make_check()).splitlines())) <= 80


def test_numbers_of_a_line() -> None:
    first = gradients.parts(make_check())[0].lines[0]
    assert (first.off, first.off_interval, first.cosine) == ("28°", "27° … 29°", "0.886")
    assert (first.error, first.length, first.times) == ("51 %", "1.09", "–")
    cells = dict(zip(gradients.parts(make_check())[0].groups, _cells("baseline"), strict=True))
    assert cells["sinks"] == ("100 %", "no gradient")
    assert cells["all"] == ("51 %", "28° off")


def _cells(id: str) -> list[tuple[str, str]]:
    return dict(gradients.parts(make_check())[0].by_group)[id]


def test_no_claim_without_an_interval() -> None:
    lines = gradients.parts(make_check(prompts=1))[0].lines
    assert {line.verdict for line in lines} <= {"", "no clear change"}
    assert {line.off_interval for line in lines} == {"–"}
    assert "One prompt only" in " ".join(gradients.notes(make_check(prompts=1)))
    assert "Few prompts" in " ".join(gradients.notes(make_check(prompts=4)))


def test_signs_that_stand_in_for_rewards_are_said(said: str) -> None:
    made = replace(make_check(), advantages="seeded signs: no rewards")
    assert "No task steered this gradient" in " ".join(gradients.notes(made))
    assert "No task steered" not in said
    idle = replace(make_check(), deciding=9)
    assert "9 of 16 prompts have samples of different reward" in " ".join(gradients.notes(idle))


def test_foreign_text_stays_text() -> None:
    made = make_check()
    row = replace(made.rows[1], label=HOSTILE)
    hostile = replace(made, rows=(made.rows[0], row), summary=(HOSTILE,), not_tested=(HOSTILE,))
    assert HOSTILE not in html(hostile)
    assert "&lt;img" in html(hostile)
    assert "<img" not in markdown(hostile).replace("\\<", "")


def test_pictures_show_what_can_be_told_apart() -> None:
    rows = [row for row in make_check().rows if row.loss == "token" and not row.same_as]
    shown = gradients_figures.chosen(rows)
    assert [row.id for row in shown] == ["baseline", "attention-sinks", "fp16", "tis-token"]
    without = [row for row in rows if row.kind != "correction"]
    assert gradients_figures.chosen(without)[-1].id == "ppo-ratio"
    made = gradients_figures.pictures(make_check())
    assert [picture.name for picture in made] == ["gradient-directions", "gradient-lengths"]
    assert ">sinks<" in made[0].svg
    assert ">tis-token<" in made[1].svg
    assert gradients_figures.pictures(make_check(prompts=1))  # points without intervals


@pytest.mark.parametrize("prompts", [1, 4, 16])
def test_the_report_holds_it_and_gives_it_back(prompts: int) -> None:
    report = REPORT.with_analyses(gradients=make_check(prompts))
    document = json.loads(json.dumps(report_to_json(report), allow_nan=False))
    jsonschema.Draft202012Validator(schema()).validate(document)
    assert report_from_json(document) == report


def test_a_report_without_gradients_has_no_field_and_no_section() -> None:
    report = REPORT.with_analyses(gradients=None)
    assert "gradients" not in report_to_json(report)
    assert report_from_json(report_to_json(report)).result("gradients") is None
    assert gradients.view(None) is None
    assert gradients.in_short(None) == ""
    assert "Gradients" not in to_markdown(report)
    assert "<summary>Gradients</summary>" in to_markdown(REPORT)


def test_the_short_terminal_has_one_sentence() -> None:
    assert make_check().summary[0] in in_short(REPORT)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["rows", 0, "groups", 0, "cosine", "value"], "0.9"),
        (["rows", 0, "kind"], 1),
        (["rows", 0, "surprise"], 1),
        (["clipped"], "1.5"),
    ],
)
def test_broken_documents_do_not_validate(path: list[Any], value: object) -> None:
    document = json.loads(json.dumps(report_to_json(REPORT)))
    inner = document["gradients"]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema()).validate(document)


def saved(run_dir: Path, *, without: str = "") -> None:
    """A run directory with the planted gradients; those of one pass may be missing."""
    found, batch = planted(4)
    work = []
    for one in found:
        entry = {"name": one.name, "coefficients": one.coefficients, "made_by": "test"}
        if one.same_as:
            name, _, coefficients = one.same_as.partition(" ")
            entry |= {"same_as": name, "same_coefficients": coefficients}
        elif one.name != without:
            save_gradients(run_dir, one, "test", (), {})
        work.append(entry)
    save_batch(run_dir, batch, work, "test", (), finished=True)


def test_a_run_gives_its_check(tmp_path: Path) -> None:
    saved(tmp_path)
    made, unseen = check_of_run(tmp_path)
    assert made == make_check(prompts=4)
    assert unseen == ["gradient of vllm-fp32: it samples tokens of its own"]


def test_a_run_without_gradients_has_none_and_says_nothing(tmp_path: Path) -> None:
    assert check_of_run(tmp_path) == (None, [])
    made, unseen = check_of_run(tmp_path, asked=True)
    assert made is None
    assert "none were taken" in unseen[0]


def test_a_run_whose_reference_failed_says_why(tmp_path: Path) -> None:
    saved(tmp_path, without="reference:fp32")
    made, unseen = check_of_run(tmp_path)
    assert made is None
    assert len(unseen) == 1
    assert unseen[0].startswith("gradients: nothing to compare")
