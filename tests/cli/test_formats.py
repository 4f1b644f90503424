"""What `mismatch report` writes for machines, and what a terminal shows while a stage runs."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from rich.console import Console

from mismatch.cli import session
from mismatch.cli.session import ConsoleNarrator
from mismatch.pipeline.document import report_from_json, report_to_json, schema
from mismatch.pipeline.saved_runs import called_unverified
from mismatch.processes.launch import finish, started
from mismatch.reports import ci_formats, files
from mismatch.run.messages import PHASES
from mismatch.types import Check, Report
from tests.command import ROOT, mismatch
from tests.conftest import grid
from tests.unit.test_reports_terminal import HOSTILE, REPORTS, hostile_report

NAME = "tiny-gpt-oss-no-sinks"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("formats") / "run"
    shutil.copytree(ROOT / "examples" / NAME, directory)
    return directory


@pytest.mark.parametrize("form", grid(["json", "markdown", "github", "junit", "sarif"], "json"))
def test_a_format_stands_alone_on_standard_output(run: Path, form: str) -> None:
    done = mismatch("report", run, "--format", form)
    assert done.returncode == 1
    report = called_unverified(report_from_json(json.loads((run / "report.json").read_text())))
    if form == "json":
        document = json.loads(done.stdout)
        jsonschema.validate(document, schema())
        assert document["verdict"]["status"] == report.verdict.status
        assert document["next"]
    elif form == "markdown":
        assert done.stdout == (run / "report.md").read_text()
    elif form == "github":
        assert done.stdout == ci_formats.to_github(report, failing=True)
    elif form == "sarif":
        assert done.stdout == ci_formats.to_sarif(report, failing=True)
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


def junit(report: Report, failing: bool = True) -> dict[str, list[str]]:
    """Return the names of the cases that fail and that are skipped."""
    suite = ElementTree.fromstring(ci_formats.to_junit(report, failing).encode())
    assert int(suite.attrib["tests"]) == len(suite)
    found = {
        tag: [str(case.get("name")) for case in suite if case.find(tag) is not None]
        for tag in ("failure", "skipped")
    }
    assert int(suite.attrib["failures"]) == len(found["failure"])
    return found


def test_junit_has_one_failure_a_cause_and_none_for_what_follows_from_it() -> None:
    for report in REPORTS.values():
        cases, judged = junit(report), report.verdict.judgements
        failed = [check.id for check in report.checks if check.status == "failed"]
        unfit = [each.metric for each in judged if each.status == "unfit"]
        untested = [check.id for check in report.checks if check.status == "not_tested"]
        assert cases == {"failure": failed or unfit[:1] or ["verdict"], "skipped": untested}
    saved = json.loads((ROOT / "examples/tiny-gpt-oss-no-sinks/report.json").read_text("utf-8"))
    broken = report_from_json(saved)
    assert sum(check.status == "failed" for check in broken.checks) > 3
    assert junit(broken)["failure"] == ["attention-sinks"]
    (sinks,) = broken.result("causes").ranked
    for also, cause, own in (
        ("passes-finite", sinks, True),  # nothing that a wrong kernel does
        ("excess-engine", sinks, True),  # the other side is off, too
        ("implementation-gap", sinks, False),
        ("temperature", replace(sinks, id="function-differs"), True),
        ("temperature", replace(sinks, alike=("temperature-semantics",)), False),
        ("excess-trainer", replace(sinks, effect=replace(sinks.effect, value=0.01)), True),
    ):
        checks = [c for c in broken.checks if c.status != "failed" and c.id != also]
        causes = replace(broken.result("causes"), ranked=(cause,))
        made = replace(broken, checks=(*checks, Check(also, "failed", "x"))).with_analyses(
            causes=causes
        )
        assert junit(made)["failure"] == [cause.id, *[also] * own], also


@pytest.mark.parametrize("name", REPORTS)
def test_sarif_has_the_cases_of_junit(name: str) -> None:
    """And what code scanning asks of a result: a level, a text, a place, and a rule of its id."""
    report = REPORTS[name]
    for failing in (True, False):
        document = json.loads(ci_formats.to_sarif(report, failing))
        (run,) = document["runs"]
        assert document["version"] == "2.1.0"
        assert run["properties"]["verdict"] == report.verdict.status
        rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
        assert [result["ruleId"] for result in run["results"]] == rules
        assert len({*rules}) == len(rules)
        for result in run["results"]:
            assert result["message"]["text"]
            assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        errors = [r["ruleId"] for r in run["results"] if r["level"] == "error"]
        cases = [f"{each.kind}/{each.name}" for each in ci_formats.failing_cases(report)]
        assert errors == (cases or [f"verdict/{report.verdict.status}"] * failing)
        warned = {r["ruleId"].partition("/")[2] for r in run["results"] if r["level"] != "error"}
        judged = [each.metric for each in report.verdict.judgements if each.status != "healthy"]
        found = [c.id for c in report.checks if c.status in ("failed", "inconclusive", "warning")]
        assert {*judged, *found} <= warned | {each.partition("/")[2] for each in errors}


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


def test_a_terminal_rewrites_one_line_and_a_pipe_has_a_line_every_15_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "PLAIN_INTERVAL_S", 0.05)
    title, progress = "[2/5] rollout [x]", "12/64 sequences, 85 tok/s, eta 9 s"
    texts = []
    for terminal in (True, False):
        out = io.StringIO()
        narrator = ConsoleNarrator(Console(file=out, force_terminal=terminal, width=80))
        with narrator.stage(title) as show:
            show("loading weights \x1b[31m")
            time.sleep(0.3)
            show(f"rollout {progress}")
            time.sleep(0.3)
        texts.append(out.getvalue())
        assert f"{title}: done" in out.getvalue()
        assert "\x1b[31m" not in out.getvalue()
    live, plain = texts
    for text in texts:
        assert session.waiting_line(title, PHASES[0][1], 0.1) in text
        assert f"· {progress}" in text
    assert "\x1b" in live
    assert "\x1b" not in plain
    silent = [line for line in plain.splitlines() if "loading" in line]
    assert len(silent) > 2  # a worker that says nothing more is not forgotten


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_waiting_line_fits_and_keeps_its_end(width: int) -> None:
    doing = "4096/7200 tokens, eta 12 s"
    line = session.waiting_line("[2/5] " + "score " * 20, doing, 83.2, width)
    assert len(line) <= width
    assert line.endswith(f"· 1:23 · {doing}")


def test_an_engine_has_a_phase_from_its_start_on_and_then_those_of_its_log(tmp_path: Path) -> None:
    said: list[str] = []
    later: list[str] = []
    phases = dict(PHASES)
    loading = "Loading safetensors"
    code = (
        f"print('disabling torch.compile'); print({loading!r}, 'shards: 0%'); print('ready');"
        "print('progress rollout 1/2')"
    )
    with started("engine", [sys.executable, "-c", code], tmp_path, said.append) as worker:
        first = list(said)
        finish(worker)
        worker.show(later.append)
    assert first[0].split(" · ")[0] == "starting"
    assert [text.split(" · ")[0] for text in said[1:]] == [phases[loading], "rollout 1/2"]
    assert all("logs/engine.log" in text for text in said[:2])
    assert later == []  # it is ready: its own lines say what it does


def test_a_reader_that_comes_later_gets_the_phase_first(tmp_path: Path) -> None:
    said: list[str] = []
    later: list[str] = []
    code = "import sys; print('Capturing', flush=True); sys.stdin.readline()"
    with started("train", [sys.executable, "-c", code], tmp_path, said.append) as worker:
        while len(said) < 2:
            time.sleep(0.01)
        worker.show(later.append)
    assert later == said[1:]
    assert later[0].startswith(dict(PHASES)["Capturing"])
