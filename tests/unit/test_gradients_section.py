"""The gradient check in a report: its section, its figure, its fields; and from a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mismatch.codec import to_json
from mismatch.errors import MismatchError
from mismatch.features.gradients.results import FILE, ID, SCHEMA
from mismatch.features.gradients.section import notes, section
from mismatch.pipeline.build import build_report
from mismatch.pipeline.document import report_from_json, report_to_json, schema
from mismatch.reports.section import cell_text
from mismatch.reports.sections import chapters
from mismatch.run import store
from mismatch.run.messages import write_error
from tests.gradients_fixture import make_check
from tests.made_run import make_run, spec
from tests.report_makers import sections
from tests.reports_fixture import make_report

REPORT = make_report()


def test_numbers_of_a_row() -> None:
    shown = section(make_check(), REPORT)
    (table,) = shown.tables
    titles = [column.title for column in table.columns]
    rows = {str(cells[0].value): dict(zip(titles, cells, strict=True)) for cells in table.cells()}
    assert list(rows) == [row.id for row in make_check().rows]
    assert cell_text(rows["baseline"]["off"], table.columns[titles.index("off")]) == "28°"
    (groups,) = shown.parts[0].tables
    silent = groups.cells()[0][[c.title for c in groups.columns].index("sinks")]
    assert cell_text(silent, groups.columns[1]) == "no gradient"
    (figure,) = shown.figures
    assert ">sinks<" in figure.draw()


def test_what_has_to_be_known_before_the_table_is_believed() -> None:
    check = make_check()
    usual = set(notes(check))
    assert any(note.startswith("fp32:") for note in usual)
    for changed in (
        replace(check, advantages="seeded signs: no rewards"),
        replace(check, deciding=9),
    ):
        assert set(notes(changed)) - usual


def test_the_report_holds_it_and_gives_it_back() -> None:
    document = json.loads(json.dumps(report_to_json(REPORT), allow_nan=False))
    validator: Any = jsonschema.Draft202012Validator(schema())
    validator.validate(document)
    assert report_from_json(document).result(ID) == make_check()
    document[ID]["rows"][0]["groups"][0]["cosine"] = "0.9"
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(document)
    without = REPORT.with_analyses(gradients=None)
    assert ID not in report_to_json(without)
    assert ID not in [part.id for part in sections(without)]


def test_a_run_gives_its_check(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert ID not in build_report(run, spec())[0].analyses
    document = {"schema": SCHEMA, ID: to_json(make_check())}
    store.save_document(run, FILE, document, schema=SCHEMA, made_by="plan", inputs=())
    report, _ = build_report(run, spec())
    assert report.result(ID) == make_check()
    assert [check.status for check in report.checks if check.id == ID] == ["failed"]
    assert report.verdict.status == "broken"
    assert [entry.reason for entry in report.not_tested if entry.what == ID] == list(
        make_check().not_tested
    )
    (helps,) = [chapter for chapter in chapters(report) if chapter.id == "helps"]
    assert ID in [part.id for part in helps.parts]


def test_a_run_whose_gradients_failed_says_why(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_error(run, "step-gradients", MismatchError("out of memory", "a larger host"))
    report, _ = build_report(run, spec())
    assert [entry.how for entry in report.not_tested if entry.what == ID] == ["a larger host"]
