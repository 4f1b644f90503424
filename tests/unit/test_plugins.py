"""Features: registered by one entry, in the command line and the report, and removable."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import mismatch
from mismatch import plugins
from mismatch.analysis import plugins as analyses
from mismatch.attempts import Attempts
from mismatch.cli.command import with_flags
from mismatch.cli.flags import Flags, Option
from mismatch.cli.main import app
from mismatch.errors import MismatchError
from mismatch.pipeline.build import build_report
from mismatch.pipeline.commands import run_steps
from mismatch.pipeline.document import report_from_json, report_to_json
from mismatch.plugins import Analysis, Command, Feature
from mismatch.processes.stages import Stages
from mismatch.reports.section import Section
from mismatch.reports.sections import chapters
from mismatch.run.directory import Journal
from mismatch.specs import CheckSpec
from mismatch.types import Check, Report
from tests.made_run import make_run, spec


@dataclass(frozen=True)
class Weather:
    """The result of a feature of another package."""

    degrees: float


def read(run_dir: Path, spec: CheckSpec) -> Weather | None:
    place = run_dir / "weather"
    return Weather(float(place.read_text())) if place.exists() else None


def judge(result: Weather) -> tuple[Check, ...]:
    return (Check("weather", "failed" if result.degrees < 0 else "passed", "measured outside"),)


def section(result: Weather, report: Report) -> Section:
    return Section("weather", "Weather", sentences=(f"{result.degrees} degrees",))


@with_flags()
def forecast(flags: Flags) -> int:
    """Say what the weather is."""
    print("sunny")
    return 0


def look_outside(stages: Stages) -> None:
    where = stages.spec.extra("weather_at")
    if where == "the moon":
        raise MismatchError("no weather there", "--weather-at Paris")
    if where:
        (stages.run_dir / "weather").write_text("20")


FLAGS = (Option("weather_at", str | None, "Weather", "Where."),)


def module_of_another_package() -> types.ModuleType:
    module = types.ModuleType("weather_for_mismatch")
    analysis = Analysis(
        "weather",
        "weather_for_mismatch:Weather",
        section="weather_for_mismatch:section",
        from_run="weather_for_mismatch:read",
        checks="weather_for_mismatch:judge",
        chapter="why",
    )
    module.__dict__.update(
        forecast=forecast,
        Weather=Weather,
        read=read,
        judge=judge,
        section=section,
        look_outside=look_outside,
        FLAGS=FLAGS,
        FEATURE=Feature(
            "weather",
            (Command("weather", "Say what the weather is.", "weather_for_mismatch:forecast"),),
            (analysis,),
            check_flags="weather_for_mismatch:FLAGS",
            check_step="weather_for_mismatch:look_outside",
        ),
    )
    return module


class EntryPoint:
    """What importlib.metadata gives for a package that names a feature."""

    name, value = "weather", "weather_for_mismatch:FEATURE"

    def load(self) -> object:
        return plugins.load(self.value)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The other package is installed, for this test alone."""
    monkeypatch.setitem(sys.modules, "weather_for_mismatch", module_of_another_package())
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [EntryPoint()])
    forget()
    yield
    forget()


def forget() -> None:
    plugins.of_other_packages.cache_clear()
    analyses.analyses.cache_clear()


@pytest.mark.parametrize("analysis", analyses.analyses(), ids=lambda analysis: analysis.id)
def test_every_import_string_of_an_analysis_names_something(analysis: Analysis) -> None:
    names = [getattr(analysis, field.name) for field in fields(analysis)]
    assert all(plugins.load(each) for each in names if isinstance(each, str) and ":" in each)
    result = plugins.load(analysis.result)
    held = {"", *(field.name for field in fields(result)), *vars(result)}  # and its properties
    assert analysis.unseen in held


def test_its_command_is_listed_and_runs(installed: None) -> None:
    assert "weather" in CliRunner().invoke(app, ["--help"]).output
    assert CliRunner().invoke(app, ["weather"]).output == "sunny\n"


def test_its_result_is_judged_shown_and_written(installed: None, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    calm, _ = build_report(run, spec())
    assert "weather" not in calm.analyses
    (run / "weather").write_text("-3")
    report, _ = build_report(run, spec())
    assert report.result("weather") == Weather(-3.0)
    assert [check.status for check in report.checks if check.id == "weather"] == ["failed"]
    assert report.verdict.status == "broken"
    (why,) = [chapter for chapter in chapters(report) if chapter.id == "why"]
    assert "weather" in [part.id for part in why.parts]
    assert report_from_json(report_to_json(report)).result("weather") == Weather(-3.0)


@pytest.mark.parametrize("where", ["Paris", None, "the moon"])
def test_a_check_runs_its_step(installed: None, tmp_path: Path, where: str | None) -> None:
    run, notes = make_run(tmp_path / "run"), Notes()
    asked = replace(spec(), extras=(("weather_at", where),) if where else ())
    run_steps(Stages(asked, run, notes, Journal(run, "check", asked, "")), Attempts())
    report, _ = build_report(run, asked)
    assert (report.result("weather") is not None) == (where == "Paris")
    failed = where == "the moon"
    assert [entry.how for entry in report.not_tested if entry.what == "weather"] == (
        ["--weather-at Paris"] if failed else []
    )
    assert len(notes.notes) == failed


PACKAGE = """
from mismatch.cli.flags import Option
from mismatch.plugins import Feature
FLAGS = (Option("weather_at", str | None, "Weather", "Where."),)
FEATURE = Feature("weather", check_flags="weather_package:FLAGS")
"""


def test_its_flag_is_one_of_a_check(tmp_path: Path) -> None:
    (tmp_path / "weather_package.py").write_text(PACKAGE)
    metadata = tmp_path / "weather_package-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: weather-package\nVersion: 1\n")
    entry = "[mismatch.features]\nweather = weather_package:FEATURE\n"
    (metadata / "entry_points.txt").write_text(entry)
    path = os.pathsep.join([str(tmp_path), str(Path(mismatch.__file__).parents[1])])
    command = [sys.executable, "-m", "mismatch", "check", "--help-all"]
    env = os.environ | {"PYTHONPATH": path}
    shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert "--weather-at" in shown


class Notes:
    """A narrator that keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stage(self, title: str) -> Any:
        raise AssertionError(title)


def test_without_it_a_report_that_holds_its_result_is_still_read(
    installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    (run / "weather").write_text("20")
    document = report_to_json(build_report(run, spec())[0])
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    forget()
    assert report_from_json(document).verdict.status == document["verdict"]["status"]


def test_a_feature_that_cannot_be_loaded_is_named(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EntryPoint, "value", "weather_for_mismatch:NOTHING")
    forget()
    with pytest.raises(MismatchError, match="weather"):
        plugins.features()
