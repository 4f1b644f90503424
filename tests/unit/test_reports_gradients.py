"""The gradient check, as its readers see it: terminal, HTML, Markdown, JSON; and from a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mismatch.experiments.gradients.files import check_of_run, save_batch, save_gradients
from mismatch.experiments.gradients.types import GradientCheck
from mismatch.pipeline.document import report_from_json, report_to_json, schema
from mismatch.reports.section import Cell, cell_interval, cell_text
from mismatch.reports.sections import gradients, sections
from tests.gradients_fixture import make_check, planted
from tests.reports_fixture import make_report

REPORT = make_report()


def rows(check: GradientCheck) -> dict[str, dict[str, Cell]]:
    """Name -> column -> cell."""
    (table,) = gradients.section(check, REPORT).tables
    titles = [column.title for column in table.columns]
    return {str(cells[0].value): dict(zip(titles, cells, strict=True)) for cells in table.cells()}


def test_every_gradient_has_its_row_or_is_named_with_its_equal() -> None:
    check = make_check()
    section = gradients.section(check, REPORT)
    named = " ".join([*(str(row[0].value) for row in section.tables[0].cells()), *section.notes])
    assert all(row.id in named for row in check.rows)


def test_numbers_of_a_row() -> None:
    section = gradients.section(make_check(), REPORT)
    (table,) = section.tables
    column = next(column for column in table.columns if column.title == "off")
    off = rows(make_check())["baseline"]["off"]
    assert (cell_text(off, column), cell_interval(off, column)) == ("28°", "27° … 29°")
    (groups,) = section.parts[0].tables
    silent = groups.cells()[0][[c.title for c in groups.columns].index("sinks")]
    assert cell_text(silent, groups.columns[1]) == "no gradient"


def test_no_claim_without_an_interval() -> None:
    for row in rows(make_check(prompts=1)).values():
        assert row["off"].value.low is None  # type: ignore[union-attr]


def test_what_has_to_be_known_before_the_table_is_believed() -> None:
    check = make_check()
    usual = set(gradients.notes(check))
    for changed in (
        make_check(prompts=1),
        make_check(prompts=4),
        replace(check, advantages="seeded signs: no rewards"),
        replace(check, deciding=9),
    ):
        assert set(gradients.notes(changed)) - usual


def test_the_picture_marks_groups_without_a_gradient() -> None:
    (directions,) = gradients.section(make_check(), REPORT).figures
    assert ">sinks<" in directions.draw()
    for figure in gradients.section(make_check(prompts=1), REPORT).figures:
        assert "<svg" in figure.draw()  # points without intervals


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
    assert "gradients" not in [section.id for section in sections(report)]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["rows", 0, "groups", 0, "cosine", "value"], "0.9"),
        (["rows", 0, "kind"], 1),
        (["tokens"], "1"),
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
    gradients, batch = planted(4)
    work = []
    for gradient in gradients:
        entry = {"name": gradient.name, "made_by": "test"}
        if gradient.same_as:
            entry |= {"same_as": gradient.same_as}
        elif gradient.name != without:
            save_gradients(run_dir, gradient, "test", (), {})
        work.append(entry)
    save_batch(run_dir, batch, work, "test", (), finished=True)


def test_a_run_gives_its_check(tmp_path: Path) -> None:
    saved(tmp_path)
    check, unseen = check_of_run(tmp_path)
    assert check == make_check(prompts=4)
    assert [entry.reason for entry in unseen] == list(check.not_tested)
    assert [entry.reason.partition(":")[0] for entry in unseen] == ["gradient of vllm-fp32"]


def test_a_run_without_gradients_has_none_and_says_nothing(tmp_path: Path) -> None:
    assert check_of_run(tmp_path) == (None, [])
    check, unseen = check_of_run(tmp_path, asked=True)
    assert check is None
    assert "--gradients --resume" in unseen[0].how


def test_a_run_whose_reference_failed_says_why(tmp_path: Path) -> None:
    saved(tmp_path, without="reference:fp32")
    check, unseen = check_of_run(tmp_path)
    assert check is None
    assert len(unseen) == 1
    assert unseen[0].how == "mismatch check --gradients"
