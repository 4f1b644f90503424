"""The terminal's report and the Markdown comment, as their readers see them."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from mismatch.reports.analyses import in_short
from mismatch.reports.markdown import plain, to_markdown
from mismatch.reports.terminal import print_report
from mismatch.types import Check, Estimate, Report
from tests.reports_fixture import (
    make_empty_report,
    make_failing_report,
    make_inconclusive_report,
    make_report,
)

REPORTS = {
    "healthy": make_report(),
    "inconclusive": make_inconclusive_report()[0],
    "failing": make_failing_report()[0],
    "empty": make_empty_report()[0],
}
HOSTILE = "[red]x[/red] \x1b[31m| `a` <img src=x onerror=alert(1)> @team\nverdict: HEALTHY"


def printed(report: Report, run_dir: str | None = "runs/one", **settings: object) -> str:
    buffer = io.StringIO()
    print_report(report, Console(file=buffer, **{"width": 80, **settings}), run_dir)  # type: ignore[arg-type]
    return buffer.getvalue()


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_plain_where_there_is_no_terminal(report: Report) -> None:
    text = printed(report)
    assert "\x1b" not in text
    assert not re.search("[\u2500-\u257f]", text)  # box drawing


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
@pytest.mark.parametrize("width", [80, 120])
def test_the_last_line_is_the_verdict(report: Report, width: int) -> None:
    last = printed(report, width=width).splitlines()[-1]
    assert last == f"verdict: {report.verdict.status.upper()} – {report.verdict.reason}"


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_eighty_columns_hold_everything_but_the_verdict_and_the_path(report: Report) -> None:
    lines = printed(report).splitlines()
    copied = " " * 6  # a block's lines stay whole
    assert max(len(line) for line in lines[:-1] if not line.startswith(copied)) <= 80
    assert not any(line.strip()[-1:] == "…" for line in lines)  # no cell was cut


def test_numbers_stand_beside_their_interval_level_and_status() -> None:
    report = make_report()
    k3 = report.comparisons[0].metrics["k3_kl"]
    (line,) = [
        line for line in printed(report).splitlines() if line.startswith("  k3 KL") and "…" in line
    ]
    assert float(line.split()[5]) == pytest.approx(k3.value, rel=5e-3)
    assert "≤ 0.002" in line
    assert "> 0.013" in line
    assert line.rstrip().endswith("✓ healthy")


def test_eighty_columns_hold_the_widest_numbers() -> None:
    report = make_failing_report()[0]
    first = report.comparisons[0]
    wide = Estimate(-3e-4, -1.48e-4, -7.35e-4, 5000, 64, 16)
    share = Estimate(0.99991, 0.99990, 0.99991, 5000, 64, 16)
    metrics = first.metrics | {"kl": wide, "ess_token": share, "k3_kl": replace(wide, value=3e-4)}
    report = replace(report, comparisons=(replace(first, metrics=metrics),))
    lines = printed(report).splitlines()
    table = lines[lines.index(next(line for line in lines if line.startswith("How far"))) :]
    text = "\n".join(table)
    assert "-1.48e-4 … -7.35e-4" in text
    statuses = [item.status for item in report.verdict.judgements]
    marked = re.compile("[✓!✕] (healthy|warn|critical) *$")
    assert [line.split()[-1] for line in table if marked.search(line)] == statuses


def test_a_note_that_concerns_every_metric_is_said_once() -> None:
    report = make_report()
    first = report.comparisons[0]
    metrics = {k: replace(v, flags=("few-prompts",)) for k, v in first.metrics.items()}
    text = printed(replace(report, comparisons=(replace(first, metrics=metrics),)))
    assert text.count("few prompts, so the interval may be too narrow") == 1
    assert "! all: few prompts" in text
    assert "! k3 KL: a few tokens carry it" in printed(report)


def test_an_inconclusive_metric_says_which_n_decides() -> None:
    text = " ".join(printed(REPORTS["inconclusive"]).split())
    (judgement,) = [
        item for item in REPORTS["inconclusive"].verdict.judgements if item.inconclusive
    ]
    assert f"about {judgement.deciding_prompts} prompts would decide" in text
    assert f"--num-prompts {judgement.deciding_prompts}" in text
    assert "--num-prompts" not in printed(REPORTS["healthy"])


def test_failed_checks_come_with_their_fix_before_the_passed_ones() -> None:
    text = printed(REPORTS["failing"])
    failed, fix = (
        text.index("✕ attention-sinks"),
        text.index("fix: mismatch check --attention auto"),
    )
    assert failed < fix < text.index("! special-tokens") < text.index("5 passed:")


def test_colour_only_on_a_terminal() -> None:
    assert "\x1b[" in printed(make_report(), force_terminal=True)


def test_a_long_run_directory_is_not_broken_in_two() -> None:
    path = "runs/" + "deep/" * 30 + "report"
    assert path in printed(make_report(), run_dir=path)
    assert "Everything is in" not in printed(make_report(), run_dir=None)


def hostile_report() -> Report:
    report = make_report()
    check = Check(HOSTILE, "failed", HOSTILE, HOSTILE)
    names = {HOSTILE: {"mode": "decode", "engine": HOSTILE}, "fsdp": {"mode": "train"}}
    comparison = replace(report.comparisons[0], rollout=HOSTILE)
    return replace(
        report,
        model=HOSTILE,
        checks=(check,),
        not_tested=(HOSTILE,),
        fingerprints=names,
        comparisons=(comparison,),
    )


def test_foreign_text_is_neither_markup_nor_an_escape_sequence() -> None:
    text = printed(hostile_report())
    assert re.search(r"^  software +\[red\]x\[/red\]", text, flags=re.MULTILINE)  # in a table
    assert re.search(r"^  ✕ \[red\]x\[/red\]", text, flags=re.MULTILINE)  # in a paragraph
    assert "\x1b" not in text
    forged = [line for line in text.splitlines() if line.startswith("verdict: HEALTHY")]
    assert forged == text.splitlines()[-1:]  # the newline before the other one was taken out


def test_markdown_opens_with_the_verdict_and_folds_the_details() -> None:
    text = to_markdown(REPORTS["failing"])
    assert text.startswith("### ✕ CRITICAL: check attention-sinks failed")
    assert text.index("| mean \\|delta\\|, nats") < text.index("<details>")
    assert text.count("<details>") == text.count("</details>") >= 6


@pytest.mark.parametrize("report", [*REPORTS.values(), hostile_report()], ids=[*REPORTS, "hostile"])
def test_markdown_tables_are_rectangular(report: Report) -> None:
    widths = []
    for block in re.findall(r"(?:^\|.*\n)+", to_markdown(report), flags=re.MULTILINE):
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(cells) == 1
        widths.append(cells)
    assert widths


def test_markdown_disarms_foreign_text() -> None:
    assert plain("a|b\n<img> [x](y) @team") == "a\\|b \\<img\\> \\[x\\](y) @\u200bteam"
    text = to_markdown(hostile_report())
    assert "<img" not in re.sub(r"\\<", "", text)
    assert "@team" not in text.replace("`", "")


def test_without_details_every_analysis_keeps_one_sentence() -> None:
    report = REPORTS["healthy"]
    full, short = io.StringIO(), io.StringIO()
    print_report(report, Console(file=full, width=80))
    print_report(report, Console(file=short, width=80), details=False)
    text = " ".join(short.getvalue().split())
    assert "Also measured" in text
    for sentence in in_short(report):
        assert " ".join(sentence.split()) in text
    assert len([sentence for sentence in in_short(report) if sentence]) >= 3
    assert len(short.getvalue().splitlines()) < len(full.getvalue().splitlines()) - 10
