"""What `mismatch report` writes for machines, and what a terminal shows while a stage runs."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from rich.console import Console

from mismatch.cli.session import ConsoleNarrator
from mismatch.pipeline.document import report_from_json, report_to_json, schema
from mismatch.reports import ci_formats, files
from tests.command import ROOT, mismatch
from tests.conftest import grid
from tests.unit.test_reports_terminal import HOSTILE, REPORTS, hostile_report

NAME = "tiny-gpt-oss-no-sinks"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("formats") / "run"
    shutil.copytree(ROOT / "examples" / NAME, directory)
    return directory


@pytest.mark.parametrize("form", grid(["json", "markdown", "github", "junit"], "json"))
def test_a_format_stands_alone_on_standard_output(run: Path, form: str) -> None:
    done = mismatch("report", run, "--format", form)
    assert done.returncode == 1
    report = report_from_json(json.loads((run / "report.json").read_text()))
    if form == "json":
        document = json.loads(done.stdout)
        jsonschema.validate(document, schema())
        assert document["verdict"]["status"] == report.verdict.status
        assert document["next"]
    elif form == "markdown":
        assert done.stdout == (run / "report.md").read_text()
    elif form == "github":
        assert done.stdout == ci_formats.to_github(report, failing=True)
    else:
        assert ElementTree.fromstring(done.stdout.encode()).get("name") == "mismatch"


def test_quiet_is_the_verdict_alone(run: Path) -> None:
    done = mismatch("report", run, "--quiet")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("verdict: BROKEN")
    assert "metric " not in done.stdout


@pytest.mark.slow
def test_no_color_is_respected(run: Path) -> None:
    colour = re.compile(r"\x1b\[[\d;]*3[0-7]m")  # bold may stay
    shown = mismatch("report", run, FORCE_COLOR="1", TERM="xterm-256color").stdout
    assert colour.search(shown)
    plain = mismatch("report", run, NO_COLOR="1", FORCE_COLOR="1", TERM="xterm-256color").stdout
    assert not colour.search(plain)


def test_junit_fails_what_failed_and_skips_what_was_not_tested() -> None:
    for report in REPORTS.values():
        suite = ElementTree.fromstring(ci_formats.to_junit(report, failing=False).encode())
        judged = report.verdict.judgements
        assert int(suite.attrib["tests"]) == len(suite) == len(report.checks) + len(judged) + 1
        failed = {case.get("name") for case in suite if case.find("failure") is not None}
        wanted = {check.id for check in report.checks if check.status == "failed"}
        wanted |= {each.metric for each in judged if each.status in ("unfit", "broken")}
        assert failed == wanted
        assert int(suite.attrib["failures"]) == len(failed)
        skipped = {case.get("name") for case in suite if case.find("skipped") is not None}
        assert skipped == {check.id for check in report.checks if check.status == "not_tested"}


def test_what_fails_the_command_is_red_for_machines() -> None:
    report = REPORTS["inconclusive"]
    for failing in (True, False):
        suite = ElementTree.fromstring(ci_formats.to_junit(report, failing).encode())
        assert (suite[-1].find("failure") is not None) == failing
        first = ci_formats.to_github(report, failing).splitlines()[0]
        assert first.startswith("::error") == failing


def test_annotations_begin_with_the_verdict_and_are_at_most_six() -> None:
    for report in REPORTS.values():
        lines = ci_formats.to_github(report, failing=True).splitlines()
        assert {line.split(" ")[0] for line in lines} <= {"::error", "::warning"}
        assert report.verdict.status.upper() in lines[0]
        assert len(lines) <= 6


def test_hostile_text_stays_text_for_machines() -> None:
    report = hostile_report()
    suite = ElementTree.fromstring(ci_formats.to_junit(report, failing=True).encode())
    assert "<img src=x" in str(suite[0].find("failure").get("message"))  # type: ignore[union-attr]
    annotations = ci_formats.to_github(report, failing=True)
    assert "\x1b" not in annotations
    assert all(line.startswith("::") for line in annotations.splitlines())
    assert json.loads(files.to_json(report))["model"] == HOSTILE
    assert report_to_json(report)["model"] == HOSTILE


def test_a_terminal_has_a_bar_and_a_pipe_plain_lines() -> None:
    texts = []
    for terminal in (True, False):
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, width=100)
        with ConsoleNarrator(console).stage("rollout [x]") as show:
            show("12/64 sequences, 340 tokens, 85 tok/s, eta 9s \x1b[31m")
        texts.append(out.getvalue())
        assert "rollout [x]: done" in out.getvalue()
        assert "\x1b[31m" not in out.getvalue().replace("\x1b[31m━", "")
    bar, plain = texts
    assert "tok/s, eta 9s" in bar
    assert "━" in bar
    assert "\x1b" not in plain
    assert "━" not in plain
