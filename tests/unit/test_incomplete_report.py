"""A part of a report that raises costs that part alone: numbers are written, exit code 2."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mismatch.analysis.diagnosis import detector, semantics
from mismatch.analysis.diagnosis.detector import Detector
from mismatch.analysis.levels import INCOMPLETE
from mismatch.cli.main import app
from mismatch.errors import MismatchError
from mismatch.pipeline import build, commands, explain, fix_trials
from mismatch.plugins import Feature
from mismatch.processes.stages import Stages
from mismatch.reports import files, sections
from mismatch.reports.files import write_report
from mismatch.run import store
from mismatch.specs import to_dict
from tests.made_run import make_run, spec


def raising(*_: Any, **__: Any) -> Any:
    raise ValueError("planted")


def refusing(*_: Any, **__: Any) -> Any:
    raise MismatchError("planted", "a fix")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of the same run where nothing raises."""
    run = make_run(tmp_path_factory.mktemp("sound") / "run", shift=0.0)
    assert app(["compare", str(run)], standalone_mode=False) == 1
    return document(run)


def document(run: Path) -> dict[str, Any]:
    """The run's report.json."""
    found: dict[str, Any] = json.loads((run / "report.json").read_text())
    return found


def plant(part: str, patch: pytest.MonkeyPatch) -> None:
    """Let one part of the report raise."""
    if part == "alignment":
        patch.setattr(semantics, "alignment", named("alignment"))
    elif part == "detector planted":
        broken = Detector("planted", "function", (), raising)
        patch.setattr(detector, "_built_in", lambda: (broken,))
    elif part == "square":
        patch.setattr("mismatch.analysis.square.measure", raising)
    elif part == "levels":
        patch.setattr(build, "judge", raising)
    elif part == "section tokens":
        patch.setitem(sections.OF_REPORT, "tokens", raising)
    elif part == "report.html":
        patch.setattr(files, "to_html", raising)
    elif part == "explain":
        patch.setattr(commands, "with_explanation", raising)
    else:
        patch.setattr(commands, "with_fixes", raising)


def named(name: str) -> Any:
    function = partial(raising)
    function.__name__ = name  # type: ignore[attr-defined]
    return function


PARTS = ("alignment", "detector planted", "square", "levels", "section tokens", "report.html")


@pytest.mark.parametrize("part", [*PARTS, "explain", "fixes"])
def test_a_part_that_raises_costs_no_number(
    sound: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    run = make_run(tmp_path / "run", shift=0.0)
    plant(part, monkeypatch)
    assert app(["compare", str(run)], standalone_mode=False) == 2
    report = document(run)
    assert report["comparisons"] == sound["comparisons"]
    assert report["headline"]["exit_code"] == 2
    assert report["verdict"]["status"] == "inconclusive"
    (check,) = [each for each in report["checks"] if each["id"] == INCOMPLETE]
    assert "ValueError: planted" in check["detail"]
    assert part in [entry["what"] for entry in report["not_tested"]]
    assert (run / "report.md").exists()
    assert (run / "report.html").exists() == (part != "report.html")
    monkeypatch.undo()
    assert app(["report", str(run)], standalone_mode=False) == 2
    assert app(["compare", str(run)], standalone_mode=False) == 1


class Quiet:
    """A narrator who says nothing."""

    def note(self, text: str) -> None: ...

    def stage(self, title: str) -> Any:
        from contextlib import nullcontext

        return nullcontext(lambda text: None)


@pytest.mark.parametrize("error", [raising, refusing])
@pytest.mark.parametrize("stage", ["fixes", "explain", "weights on disk", "planted"])
def test_what_fails_after_scoring_leaves_the_report_of_the_check(
    sound: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, error: Any
) -> None:
    run = make_run(tmp_path / "run", shift=0.0)
    asked = replace(spec(), fixes=("fp32-lm-head",) * (stage == "fixes"))
    asked = replace(asked, explain=stage == "explain")
    store.write_json(run / "spec.json", to_dict(asked))
    monkeypatch.setattr(Stages, "measure", lambda *_, **__: None)
    monkeypatch.setattr(fix_trials, "measure_with_fixes", error)
    monkeypatch.setattr(explain, "explain", error)
    monkeypatch.setattr(commands, "features", tuple)
    monkeypatch.setattr(commands, "compare_with_disk", lambda stages: None)
    if stage == "weights on disk":
        monkeypatch.setattr(commands, "compare_with_disk", error)
    if stage == "planted":
        step = Feature("planted", check_step="planted:step")
        monkeypatch.setattr(commands, "features", lambda: (step,))
        monkeypatch.setattr(commands, "load", lambda name: error)
    report = commands.run_check(asked, run, Quiet(), write=write_report)
    written = document(run)
    assert written["comparisons"] == sound["comparisons"]
    refused_step = stage == "planted" and error is refusing  # a step may refuse: it is not tested
    assert written["headline"]["exit_code"] == (1 if refused_step else 2)
    assert report.verdict.status == written["verdict"]["status"] == "inconclusive"
    if not refused_step:
        assert stage in [entry["what"] for entry in written["not_tested"]]


def test_a_check_that_has_not_scored_ends_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", shift=0.0)
    (run / "scores" / "fsdp.parquet").unlink()
    monkeypatch.setattr(fix_trials, "measure_with_fixes", refusing)
    with pytest.raises(MismatchError, match="planted"):
        commands.run_check(replace(spec(), fixes=("fp32-lm-head",)), run, Quiet())
