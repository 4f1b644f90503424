"""Terminal and Markdown: what holds for every report, and that foreign text stays text."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from mismatch.reports.formatting import MARKS
from mismatch.reports.markdown import plain, to_markdown
from mismatch.reports.sections import page
from mismatch.reports.terminal import print_page
from mismatch.types import Check, NotTested, Report
from tests.report_makers import MAKERS, sections
from tests.reports_fixture import (
    make_empty_report,
    make_failing_report,
    make_inconclusive_report,
    make_report,
)

HOSTILE = "[red]x[/red] \x1b[31m| `a` <img src=x onerror=alert(1)> @team\nverdict: HEALTHY"


def hostile_report() -> Report:
    report = make_report()
    check = Check(HOSTILE, "failed", HOSTILE, HOSTILE)
    names = {HOSTILE: {"mode": "decode", "engine": HOSTILE}, "fsdp": {"mode": "train"}}
    comparison = replace(report.comparisons[0], rollout=HOSTILE)
    return replace(
        report,
        model=HOSTILE,
        checks=(check,),
        not_tested=(NotTested(HOSTILE, HOSTILE, HOSTILE),),
        fingerprints=names,
        comparisons=(comparison,),
    )


REPORTS = {
    "healthy": make_report(),
    "inconclusive": make_inconclusive_report()[0],
    "failing": make_failing_report()[0],
    "empty": make_empty_report()[0],
}


def printed(
    report: Report, run_dir: str | None = "runs/one", details: bool = True, **settings: object
) -> str:
    buffer = io.StringIO()
    console = Console(file=buffer, **{"width": 80, **settings})  # type: ignore[arg-type]
    print_page(page(report), console, run_dir, details=details)
    return buffer.getvalue()


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
@pytest.mark.parametrize("width", [80, 120])
def test_plain_aligned_and_the_last_line_is_the_verdict(report: Report, width: int) -> None:
    text = printed(report, width=width)
    lines = text.splitlines()
    verdict = f"verdict: {report.verdict.status.upper()} – {report.verdict.reason}"
    assert lines.pop() == verdict
    shown = printed(report, width=width, force_terminal=True, no_color=True, style=None)
    last = re.sub(r"\x1b\[[\d;]*m", "", shown).splitlines()
    start = max(number for number, line in enumerate(last) if line.startswith("verdict: "))
    assert " ".join(last[start:]) == verdict  # wrapped, on a terminal
    assert max(map(len, last[start:])) <= width
    copied = " " * 6  # a block's lines stay whole
    assert max(len(line) for line in lines if not line.startswith(copied)) <= width
    assert "\x1b" not in text
    assert not re.search("[\u2500-\u257f]", text)  # box drawing


def test_colour_only_on_a_terminal() -> None:
    assert "\x1b[" in printed(make_report(), force_terminal=True)


def test_a_long_run_directory_is_not_broken_in_two() -> None:
    path = "runs/" + "deep/" * 30 + "report"
    assert path in printed(make_report(), run_dir=path)
    assert "Everything is in" not in printed(make_report(), run_dir=None)


def test_foreign_text_is_neither_markup_nor_an_escape_sequence() -> None:
    text = printed(hostile_report())
    assert re.search(r"^  software +\[red\]x\[/red\]", text, flags=re.MULTILINE)  # in a table
    assert re.search(r"^  Checks: Failed: \[red\]x\[/red\]", text, flags=re.MULTILINE)
    assert "\x1b" not in text
    assert not re.search(r"^verdict: HEALTHY *$", text, flags=re.MULTILINE)  # wrapped in a cell
    forged = [line for line in text.splitlines() if line.startswith("verdict: ")]
    assert len(forged) == 1  # the newline before the other one was taken out


SAVED = {name: MAKERS[name]()[0] for name in MAKERS if name.startswith("example-")}


@pytest.mark.parametrize("report", [*REPORTS.values(), *SAVED.values()], ids=[*REPORTS, *SAVED])
def test_without_details_it_is_a_screen(report: Report) -> None:
    lines = printed(report, details=False).splitlines()
    assert len(lines) <= (40 if report.result("fixes") else 27)
    words = " ".join(" ".join(lines).split())
    for answer in page(report).answers:
        assert answer.question in words
    for check in report.checks:
        assert check.status == "passed" or check.id in words
    warned = [text for section in sections(report) for text in section.warnings]
    assert all(text in words for text in warned)


@pytest.mark.parametrize("report", [*REPORTS.values(), *SAVED.values()], ids=[*REPORTS, *SAVED])
def test_markdown_fits_a_comment(report: Report) -> None:
    text = to_markdown(report)
    assert len(text.encode()) <= 6_000
    assert len(text.splitlines()) <= 40
    assert text.startswith(f"### {MARKS[page(report).tone]} {report.verdict.status.upper()}: ")
    if best := report.result("fixes"):
        assert text.index(best.best_together) < text.index("| metric |") < text.index("- Next: ")
    assert "<details>" not in text
    full = to_markdown(report, details=True)
    assert full.count("<details>") == full.count("</details>")


@pytest.mark.parametrize("report", [*REPORTS.values(), hostile_report()], ids=[*REPORTS, "hostile"])
def test_markdown_tables_are_rectangular(report: Report) -> None:
    tables = re.findall(r"(?:^\|.*\n)+", to_markdown(report, details=True), flags=re.MULTILINE)
    assert tables
    for table in tables:
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(cells) == 1


def test_markdown_disarms_foreign_text() -> None:
    assert plain("a|b\n<img> [x](y) @team") == "a\\|b \\<img\\> \\[x\\](y) @\u200bteam"
    text = to_markdown(hostile_report(), details=True)
    assert "<img" not in re.sub(r"\\<", "", text)
    assert "@team" not in text.replace("`", "")
