"""One run has one deciding number, one failing case and one number of prompts, in every format."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from mismatch.analysis.cause_results import Cause
from mismatch.analysis.explained import explains
from mismatch.reports.ci_formats import to_github, to_junit
from mismatch.reports.sections import page
from mismatch.reports.summary import deciding, findings, next_steps
from mismatch.types import Check, Estimate
from tests.report_makers import MAKERS, report_of

EXCESS = Check("excess-engine", "failed", "1.3 times what precision costs")


@pytest.mark.parametrize("name", MAKERS)
def test_both_ci_formats_fail_the_same_cases(name: str) -> None:
    report, _ = report_of(name)
    suite = ElementTree.fromstring(to_junit(report, failing=True))
    failed = [
        case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None
    ]
    titles = re.findall(r"::error title=mismatch ([\w-]+)::", to_github(report, failing=True))
    assert failed
    assert titles[: len(failed)] == failed[:3] or failed == ["verdict"]


@pytest.mark.parametrize("name", MAKERS)
def test_how_sure_is_of_what_decided(name: str) -> None:
    report, _ = report_of(name)
    sure = [each.text for each in page(report).answers if each.question == "How sure"]
    by = deciding(report)
    assert bool(sure) == (by is not None)
    if isinstance(by, Check):
        assert by.status != "passed"
        assert sure[0].startswith(by.id)
    elif by is not None:
        assert sure[0].startswith(by.words.label.split(",")[0])
        assert by.judgement is not None
        assert by.judgement.status == report.verdict.status or by.metric == "k3_kl"


def test_the_deciding_finding_shows_its_interval_and_limit() -> None:
    report, _ = report_of("example-tiny-gpt-oss-no-sinks")
    by = deciding(report)
    assert isinstance(by, Check)
    value = findings(report)[by.id].value
    (sure,) = [each.text for each in page(report).answers if each.question == "How sure"]
    assert f"{value.n_prompts} prompts" in sure
    assert "limit" in sure


@pytest.mark.parametrize("name", MAKERS)
def test_a_run_asks_for_one_number_of_prompts(name: str) -> None:
    report, _ = report_of(name)
    said = re.findall(r"([\d,]+) prompts", report.verdict.reason)
    asked = re.findall(r"--num-prompts (\d+)", " ".join(next_steps(report)))
    if said and asked:
        assert {each.replace(",", "") for each in said} == set(asked)


def test_what_the_yardstick_does_too_exceeds_nothing() -> None:
    cache = Cause("fp8-kv", "confirmed", "engine", Estimate(0.9, 0.8, 1.0, 99, 9, 9), ())
    assert not explains(cache, EXCESS)
    assert not explains(cache, replace(EXCESS, id="displaced-engine"))
    assert explains(replace(cache, id="bf16-lm-head"), EXCESS)
    report, _ = report_of("healthy")
    causes = report_of("example-tiny-gpt-oss-no-sinks")[0].result("causes")
    chosen = report.with_analyses(causes=replace(causes, ranked=(cache,)))
    assert "choice" in page(chosen).lead  # with its price, and no fault
    assert "90 %" in page(chosen).lead
    assert "choice" not in page(replace(chosen, checks=(EXCESS,))).lead


def test_commands_are_whole_and_of_the_run() -> None:
    report, _ = report_of("example-tiny-gpt-oss-no-sinks")
    (best,) = [each for each in page(report).answers if each.question == "Best fix"]
    words = ["mismatch", "check", "--model", "tiny-gpt-oss", "--attention", "auto"]
    assert shlex.split(best.flags) == words
    assert best.flags in next_steps(report)[0]
    alone = report.with_analyses(fixes=None, explain=None)
    shown = page(alone).placed("runs/my run")
    (fix,) = [each for each in shown.answers if each.question.startswith("Fix")]
    words = ["mismatch", "check", "--resume", "runs/my run", "--fix", "attention-sinks"]
    assert shlex.split(fix.flags) == words
    assert fix.flags in shown.steps[0]
