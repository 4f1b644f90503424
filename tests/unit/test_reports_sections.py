"""What holds for every section: a toy analysis is found in every rendering, its text disarmed."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from rich.console import Console

from mismatch.analysis import plugins
from mismatch.pipeline.build import build_report
from mismatch.pipeline.document import report_from_json, report_to_json, schema
from mismatch.plugins import Feature, features
from mismatch.reports.formatting import number, percent, text
from mismatch.reports.html import to_html
from mismatch.reports.markdown import show_table, to_markdown
from mismatch.reports.section import Cell, Column, Section, Table
from mismatch.reports.sections import page
from mismatch.reports.terminal import print_page, print_table
from mismatch.types import Estimate, Report
from tests.made_run import make_run, spec
from tests.report_makers import rendered, report_of, sections
from tests.reports_fixture import make_report, make_tokens
from tests.toy_analysis import ANALYSIS, UNLUCKY, Toy

RESULT = Toy(Estimate(0.5, 0.25, 0.75, 8, 4, 2))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Report]:
    of_toy = Feature("toy", analyses=(ANALYSIS,))
    monkeypatch.setattr(plugins, "features", lambda: (*features(), of_toy))
    plugins.analyses.cache_clear()
    yield make_report().with_analyses(toy=RESULT)
    plugins.analyses.cache_clear()


def printed(report: Report, details: bool, width: int = 80) -> str:
    buffer = io.StringIO()
    print_page(page(report), Console(file=buffer, width=width), None, details=details)
    return buffer.getvalue()


def test_an_analysis_from_outside_is_measured_and_shown(toy: Report, tmp_path: Path) -> None:
    report, _ = build_report(make_run(tmp_path / "run"), spec())
    assert isinstance(report.result("toy"), Toy)
    unlucky, _ = build_report(make_run(tmp_path / "other"), replace(spec(), seed=13))
    assert unlucky.result("toy") is None
    assert UNLUCKY in unlucky.not_tested


def test_it_is_in_json_and_its_schema(toy: Report) -> None:
    document = json.loads(json.dumps(report_to_json(toy), allow_nan=False))
    assert document["toy"]["positive"]["value"] == 0.5
    jsonschema.validate(document, schema())
    assert report_from_json(document).result("toy") == RESULT
    del document["toy"]["positive"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema())


def test_it_is_in_every_rendering(toy: Report) -> None:
    full = printed(toy, details=True)
    for rendering in (full, to_markdown(toy, details=True), to_html(toy, make_tokens())):
        words = " ".join(rendering.replace("\u00a0", " ").split())
        for wanted in ("Toy ", "Word.", "50 %", "25 % … 75 %", "0.123", "✓ healthy", "Inside."):
            assert wanted in words
    short = printed(toy, details=False)
    assert "Word." not in short


def test_hostile_text_stays_text(toy: Report) -> None:
    page, comment = to_html(toy, make_tokens()), to_markdown(toy, details=True)
    for rendering in (page, comment, printed(toy, details=True), printed(toy, details=False)):
        assert "\x1b" not in rendering
        assert "\u202e" not in rendering
    assert page.count("<script") == 2  # the explorer's data and its script
    assert "&lt;script" in page
    assert not re.search(r"(?<![\\`])<script", comment)  # escaped, or code
    assert not re.search(r"(?<!`)@team", comment.replace("*b* @team", "`@team"))
    assert "[bold]x[/bold]" in printed(toy, details=True)  # no markup of ours


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_terminal_drops_columns_until_they_fit(toy: Report, width: int) -> None:
    columns = tuple(Column(f"number {n}", number, priority=n, interval=10 + n) for n in range(6))
    table = Table(
        (Column("name", text), *columns), (("row", *[Estimate(0.5, 0.1, 0.9, 8, 4, 2)] * 6),)
    )
    buffer = io.StringIO()
    print_table(table, Console(file=buffer, width=width))
    lines = buffer.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "number 0" in lines[0]
    assert "…" not in lines[1].replace(" … ", "")
    assert lines[0].count("number") >= 4
    assert show_table(table).splitlines()[0].count("number") == 6


def test_a_row_has_a_cell_for_every_column() -> None:
    with pytest.raises(ValueError, match=r"\b1 cells.*\b2"):
        Table((Column("a"), Column("b")), ((Cell(1.0),),)).cells()


def test_what_is_empty_is_not_shown() -> None:
    bare = Section(
        "a", "A", "lead", ("",), ("", "Word."), (Table((Column("x"),), ()),), notes=("",),
        parts=(Section("b", "B", "lead", sentences=("",)),),
    )  # fmt: skip
    assert (bare.warnings, bare.sentences, bare.tables) == ((), ("Word.",), ())
    assert (bare.notes, bare.parts) == ((), ())
    assert bare.holds
    assert not Section("c", "C", "lead").holds


@pytest.mark.parametrize(
    ("name", "section", "metric"),
    [
        ("example-tiny-gpt-oss", "routing", "routing_disagree_layer"),
        ("example-tiny-gpt-oss-no-sinks", "routing", "routing_disagree_layer"),
        ("gradients", "routing", "routing_disagree_layer"),
        ("gradients", "gradients", ""),
    ],
)
def test_routing_and_gradients_are_read_first_everywhere(
    name: str, section: str, metric: str
) -> None:
    """On the terminal, in report.md and above the page's chapters."""
    report, _ = report_of(name)
    (found,) = [part for part in sections(report) if part.id == section]
    answer = next(each for each in page(report).answers if each.question == found.title)
    if metric:
        share = percent(report.comparisons[0].routing[metric].value)
        assert answer.text.startswith(share)
    for suffix in ("terminal.txt", "md", "html.txt"):
        text = " ".join(rendered(name)[suffix].split())
        said = text.find(answer.text.rstrip("."))
        assert said > 0, suffix
        if suffix == "html.txt":
            assert said < text.find("Is this normal?")


def test_a_dense_model_has_no_answer_about_experts() -> None:
    report = make_report()
    report = replace(report, comparisons=(replace(report.comparisons[0], routing={}),))
    assert "Experts chosen" not in {answer.question for answer in page(report).answers}


@pytest.mark.parametrize("name", ["healthy", "example-tiny-gpt-oss"])
def test_a_healthy_run_takes_at_most_24_lines_of_a_terminal(name: str) -> None:
    report, _ = report_of(name)
    buffer = io.StringIO()
    run = "runs/20261123-171228-tiny-gpt-oss"
    print_page(page(report), Console(file=buffer, width=80), run, details=False)
    assert len(buffer.getvalue().splitlines()) <= 24
    assert buffer.getvalue().count(run) == 2  # where it is, and what to compare the next one with
