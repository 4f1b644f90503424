"""A setting of the run that could not run here is told first, and confirms no cause of the run."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from mismatch.analysis.cause_results import Cause, Causes
from mismatch.analysis.causes import of_this_machine
from mismatch.analysis.diagnosis.declared import attention_sinks
from mismatch.analysis.explained import lead_of
from mismatch.facts import Replaced, SideFacts
from mismatch.reports import summary
from mismatch.reports.html import to_html
from mismatch.reports.markdown import to_markdown
from mismatch.reports.sections import page
from mismatch.reports.sections.headline import answers
from mismatch.reports.terminal import print_page
from mismatch.types import Check, Report
from tests.report_makers import html_text
from tests.reports_fixture import TRAINER, make_failing_report

EAGER: Replaced = {
    "what": "attention",
    "asked": "flash_attention_2",
    "ran": "eager",
    "why": "it needs a GPU",
    "instead": "attn_implementation=eager",
    "causes": ["packing-leak"],
}
FACTS: SideFacts = {"replaced": [EAGER]}


def leak(side: str = "trainer", status: str = "confirmed", id: str = "packing-leak") -> Causes:
    cause = Cause(id, status, side, None, ())  # type: ignore[arg-type]
    return Causes((cause,), (), (), (), 1.2, 0.0)


def test_a_cause_that_the_replacement_can_make_is_suspected_and_says_what_ran() -> None:
    (cause,) = of_this_machine(leak(), FACTS).ranked
    assert (cause.status, cause.made_here) == ("suspected", True)
    assert [(item.value, item.normal) for item in cause.evidence] == [("eager", EAGER["asked"])]
    again = of_this_machine(of_this_machine(leak(), FACTS), FACTS)
    assert again.ranked == (cause,)


@pytest.mark.parametrize(
    ("causes", "facts"),
    [
        (leak(), {"attention": "eager"}),  # the run asked for it
        (leak("engine"), FACTS),
        (leak(id="misalignment"), FACTS),
    ],
)
def test_every_other_cause_stays_confirmed(causes: Causes, facts: SideFacts) -> None:
    (cause,) = of_this_machine(causes, facts).ranked
    assert (cause.status, cause.made_here, cause.evidence) == ("confirmed", False, ())


def broken(made: bool) -> Report:
    report, _ = make_failing_report()
    facts: SideFacts = TRAINER | FACTS if made else TRAINER  # type: ignore[operator]
    report = replace(report, fingerprints=report.fingerprints | {"fsdp": facts})
    return report.with_analyses(causes=of_this_machine(leak(), facts))


def test_the_first_screen_of_every_form_says_what_ran_and_what_to_do() -> None:
    report, (_, tokens) = broken(made=True), make_failing_report()
    told = f"{EAGER['ran']} in place of {EAGER['asked']}"
    out = io.StringIO()
    print_page(page(report), Console(file=out, width=80), details=False)
    for text in (out.getvalue(), to_markdown(report), html_text(to_html(report, tokens))):
        words = " ".join(text.replace("\\", "").split())
        assert told in words
    shown = {answer.question: answer for answer in answers(report)}
    assert "Replaced" in shown
    assert "by experiment" not in shown["Cause"].text
    assert not {"Fix", "Fix, not measured"} & shown.keys()  # the run itself may have no fault
    first, *_ = summary.next_steps(report)
    assert "GPU" in first
    assert EAGER["instead"] in first


def test_the_verdict_is_about_what_ran_in_place_of_the_setting() -> None:
    """A failed check of the ratios alone would accuse the engine."""
    ratio = Check("importance-ratio", "failed", "the left did not sample these", "look there")
    report = replace(broken(made=True), checks=(ratio,))
    lead = lead_of(report.result("causes"), report.checks)
    assert lead is not None
    assert lead.cause.id == "packing-leak"
    assert "confirmed" not in lead.reason
    assert lead.failed == (ratio,)
    assert ratio.fix not in " ".join(summary.next_steps(report))


def test_nothing_is_told_where_nothing_was_replaced() -> None:
    shown = {answer.question: answer for answer in answers(broken(made=False))}
    assert "Replaced" not in shown
    assert "Fix" in shown
    assert "suspected" not in shown["Cause"].text.lower()


def test_the_check_of_sinks_names_the_kernel_that_the_trainer_named() -> None:
    assert "flash" in attention_sinks({"attention": "flash_attention_2"}).detail
    assert attention_sinks({"attention": "eager", "honours_sinks": True}).status == "passed"
