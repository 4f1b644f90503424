"""A page says "confirmed by" only of an experiment or a fix that its report.json holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mismatch.experiments.results import TESTS
from mismatch.features.megatron.one_rank import LayoutEffect, causes_of
from mismatch.pipeline.saved_runs import load_report
from mismatch.reports.markdown import to_markdown
from mismatch.reports.summary import known_by
from mismatch.types import Report
from tests import frozen
from tests.conftest import grid
from tests.report_makers import MAKERS, rendered, report_of

CLAIM = re.compile(r"[Cc]onfirmed by (experiment|fix)\s+([\w=+.-]*[\w=])")
SHARE = re.compile(r"(?:without it|explains) ([\d.]+ %) of mean")


def measured(report: Report) -> set[tuple[str, str]]:
    """Return the experiments that confirmed something, and the fixes that helped."""
    told, table = report.result("explain"), report.result("fixes")
    made = {
        ("experiment", e.id) for e in (told.experiments if told else ()) if e.outcome == "confirmed"
    }
    return made | {
        ("fix", row.id) for row in (table.outcomes if table else ()) if row.outcome == "better"
    }


def claims(text: str) -> set[tuple[str, str]]:
    flat = " ".join(text.split())
    said = [flat.lower().count(f"confirmed by {kind}") for kind in ("experiment", "fix")]
    found = CLAIM.findall(flat)
    assert len(found) == sum(said)  # none without a name
    return set(found)


@pytest.mark.parametrize("name", MAKERS)
def test_what_a_made_report_calls_confirmed_was_measured(name: str) -> None:
    report, _ = report_of(name)
    texts = rendered(name)
    assert set().union(*map(claims, texts.values())) <= measured(report)
    causes = report.result("causes")
    if causes and causes.ranked and causes.ranked[0].effect is not None:
        shares = {
            share for text in texts.values() for share in SHARE.findall(" ".join(text.split()))
        }
        assert len(shares) <= 1, shares


@pytest.mark.parametrize("name", grid(frozen.RUNS, "no-sinks"))
def test_what_a_frozen_report_calls_confirmed_was_measured(name: str, tmp_path: Path) -> None:
    report = load_report(frozen.unpack(name, tmp_path))
    assert claims(to_markdown(report)) <= measured(report)
    causes = report.result("causes")
    for cause in causes.ranked if causes else ():
        known = known_by(report, cause)
        assert not known.gone or claims(known.how) <= measured(report)
        if cause.status == "confirmed" and not measured(report):
            assert "confirmed" not in known.how


def test_a_fix_that_takes_a_cause_out_gives_the_share() -> None:
    report, _ = report_of("example-tiny-gpt-oss-no-sinks")
    (cause, *_) = report.result("causes").ranked
    table = report.result("fixes")
    known = known_by(report, cause)
    assert CLAIM.findall(known.how) == [("fix", "attention-sinks")]
    assert known.share == table.outcome("attention-sinks").removed["logprob_abs_diff_mean"]
    assert cause.id in TESTS["attention-sinks"].own
    alone = known_by(report.with_analyses(fixes=None, explain=None), cause)
    assert "located" in alone.how
    assert alone.share == cause.effect


def test_a_fault_of_the_layout_is_known_by_the_scoring_that_found_it() -> None:
    (cause,) = causes_of(LayoutEffect("tp=2", "fp32", spread=0.4, alone=1e-6))
    report, _ = report_of(next(iter(MAKERS)))
    assert "another scoring" in known_by(report, cause).how
    assert not causes_of(LayoutEffect("tp=2", "fp32", spread=0.4, alone=0.3))
