"""An audit of kernels as JSON, on a terminal, as a page, and inside a run's report."""

import json
from dataclasses import replace

import pytest
from rich.console import Console

from mismatch.errors import MismatchError
from mismatch.features.kernels import section as kernels
from mismatch.features.kernels.results import (
    ATTENTION_COLUMNS,
    EXPERT_COLUMNS,
    Audit,
    AuditReport,
    Finding,
    judge,
    kernels_to_json,
    word_of,
)
from mismatch.features.kernels.section import section
from mismatch.reports.section import Cell
from mismatch.reports.terminal import print_alone
from tests.kernels_fixture import findings, make_audit_report, sound_report
from tests.texts import numbers


def text_of(report: AuditReport, details: bool = False) -> str:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_alone(section(report), judge(report), console, None, "", details)
    return console.export_text()


def report_of_one(verdict: str, **changes) -> AuditReport:
    """A report of a single implementation."""
    audit = Audit("eager", "attention", "transformers", verdict, "", True, False, findings())
    return replace(make_audit_report(), audits=(replace(audit, **changes),))


# ---------------------------------------------------------------- verdict


def test_a_wrong_one_that_a_run_could_use_decides():
    fault = Finding("sinks", "failed", "they change nothing", 1.0, 0.01)
    assert judge(report_of_one("wrong", findings=(fault,))).code == 1
    assert judge(report_of_one("wrong", findings=(fault,))).reason == "eager: sinks"
    assert judge(report_of_one("sound")).code == 0


def test_one_that_nobody_can_use_does_not_decide():
    verdict = judge(sound_report())  # sdpa fails in it, and the model refuses sdpa
    assert verdict.code == 0
    named = "sink-sdpa, eager: nothing wrong (sdpa: wrong, but not usable here)"
    assert verdict.line == f"verdict: sound – {named}"


def test_the_verdict_says_of_which_kind_a_name_is():
    experts = replace(make_audit_report().audits[-1], name="eager")
    report = replace(sound_report(), audits=(*sound_report().audits[:2], experts))
    attention, experts_part = judge(report).reason.split("; ")
    assert attention == "attention sink-sdpa, eager"
    assert experts_part.startswith("experts eager:")


def test_causes_come_first_and_what_follows_is_only_named():
    report = sound_report()
    (audit,) = [audit for audit in report.audits if audit.failed]
    cause = audit.finding("sinks")
    assert cause is not None
    (sentence,) = [text for text in kernels.sentences(report) if cause.detail in text]
    names = [word_of(column) for column in ("forward", "sink_gradient")]
    before, after = sentence.split(f"sinks: {cause.detail}")
    assert not any(name in before for name in names)
    assert f" {', '.join(names)}." in after
    fault = Finding("sink_gradient", "failed", "no gradient arrives", 1.0, 0.01)
    (alone, *_) = kernels.sentences(report_of_one("wrong", findings=(fault,)))
    assert f"{word_of('sink_gradient')}: {fault.detail}." in alone


def test_the_users_own_that_does_not_run_at_all_is_wrong_and_named():
    refused = (Finding("accepts", "failed", "returns None"), Finding("sinks", "not_tested", "none"))
    yours = Audit("my:kernel", "attention", "yours", "unusable", "returns None", False)
    for findings_ in ((), refused):
        report = replace(sound_report(), audits=(replace(yours, findings=findings_),))
        assert judge(report).code == 1
        assert "my:kernel: returns None." in kernels.sentences(report)


@pytest.mark.parametrize("reason", ["crashed: signal 11", "it does not take the model's masks"])
def test_the_users_own_has_to_pass(reason):
    yours = Audit("my:kernel", "attention", "yours", "unusable", reason, False)
    report = replace(sound_report(), audits=(*sound_report().audits, yours))
    assert judge(report).code == 1
    assert judge(report).reason == f"my:kernel: {reason}"


def test_a_crash_of_another_ones_kernel_is_told_and_does_not_decide():
    other = Audit(
        "fancy", "attention", "transformers", "unusable", "signal 11", False, crashed=True
    )
    report = replace(sound_report(), audits=(*sound_report().audits, other))
    assert judge(report).code == 0
    assert f"{other.name}: {other.reason}." in kernels.sentences(report)
    refused = replace(other, crashed=False)
    report = replace(report, audits=(*sound_report().audits, refused))
    assert f"{other.name}: {other.reason}." not in kernels.sentences(report)


def test_nothing_audited_is_an_error():
    missing = Audit("flash", "attention", "transformers", "unusable", "not installed", False)
    refused = (Finding("accepts", "failed", "needs CUDA"), Finding("sinks", "not_tested", "none"))
    for audits in ((), (missing,), (replace(missing, findings=refused),)):
        with pytest.raises(MismatchError, match="audited for"):
            judge(replace(make_audit_report(), audits=audits))


def test_only_refused_ones_are_not_called_sound():
    report = replace(sound_report(), audits=sound_report().audits[2:3])
    assert judge(report).code == 1
    assert numbers(judge(report).reason) == [1]  # of those that ran


# ---------------------------------------------------------------- JSON


def test_numbers_that_are_none_are_null():
    fault = Finding("forward", "failed", "not finite", float("nan"), 1e-5)
    content = kernels_to_json(report_of_one("wrong", findings=(fault,)))
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert content["audits"][0]["findings"][0]["value"] is None
    assert content["verdict"]["status"] == "wrong"


# ---------------------------------------------------------------- renderings


def tables(report: AuditReport, id: str) -> list[list[Cell]]:
    """Rows of the one table of a part, wherever it is."""
    parts = list(section(report).parts)
    parts += [inner for part in parts for inner in part.parts]
    return next(part for part in parts if part.id == id).tables[0].cells()


def test_every_column_has_words_that_fit_its_place():
    assert set(ATTENTION_COLUMNS) | set(EXPERT_COLUMNS) == set(kernels.NARROW)
    for title in kernels.NARROW.values():
        assert all(len(row) <= 5 for row in title.split("\n"))


@pytest.mark.parametrize("details", [False, True])
def test_the_terminal_is_80_columns_wide_and_ends_with_the_verdict(details):
    report = make_audit_report("my.kernels:attend")
    text = text_of(report, details=details)
    rows = text.splitlines()
    assert rows[-1] == judge(report).line
    assert max(len(row) for row in rows[:-1]) <= 80
    (absent,) = (audit for audit in report.audits if not audit.findings and not audit.crashed)
    assert (absent.reason.partition(" <")[0] in text) == details
    row = next(row for row in rows if row.startswith("  attend "))
    assert row.split()[1:] == list("✓✕✓✓·✓✓✓✓✕✓✓")


def test_a_wrong_mark_is_never_shown_as_right():
    marks = {row[0].value: [cell.tone for cell in row[1:]] for row in
             tables(make_audit_report(), "kernels-attention")}  # fmt: skip
    column = ATTENTION_COLUMNS.index
    assert marks["sdpa"][column("sinks")] == "critical"
    assert marks["eager"][column("batches")] == "warn"
    assert set(marks["sink-sdpa"]) == {"healthy"}
    assert marks["attend\x1b[31m"][column("offsets")] == "dim"


def test_the_largest_error_of_a_gradient_has_its_own_column():
    rows = tables(make_audit_report("my.kernels:attend"), "kernels-attention-errors")
    largest = {(row[0].value, row[1].value): (row[3].value, row[4].value) for row in rows}
    assert largest["attend", "bf16"] == (pytest.approx(420.0), "q")
    assert largest["sdpa", "fp32"] == (1.0, "sinks")
