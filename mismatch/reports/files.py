"""A report as the files of a run directory: report.html, report.md, report.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from mismatch.errors import MismatchError
from mismatch.experiments.regression.types import Against, AgainstRow
from mismatch.pipeline.build import COMPARISON, COMPARISON_SCHEMA
from mismatch.pipeline.document import SCHEMA, comparisons_to_json, report_to_json
from mismatch.reports.formatting import TONES, alike, chance, line
from mismatch.reports.summary import checks, judged_rows, next_steps
from mismatch.run import manifest, store
from mismatch.types import Report

if TYPE_CHECKING:
    import pandas as pd

    from mismatch.reports.section import Page


REPORT = "report.json"


def write_report(run_dir: Path, report: Report, tokens: pd.DataFrame) -> None:
    """Write report.html, report.md, and last report.json: where that is, the rest is."""
    write_rendered(run_dir, report, tokens)
    store.save_document(
        run_dir,
        REPORT,
        report_to_json(report, next_steps(report)),
        schema=SCHEMA,
        inputs=report_inputs(run_dir),
    )


def report_inputs(run_dir: Path) -> list[str]:
    """The recorded artefacts that a report of this directory is made from."""
    return [
        name
        for name in manifest.entries(run_dir)
        if name in (store.ROLLOUT, COMPARISON) or name.startswith("scores/")
    ]


def require_fresh(run_dir: Path) -> None:
    """What ``report.json`` was made from is what lies there now.

    Raises:
        MismatchError: a scoring was made, or made again, since.
    """
    entries = manifest.entries(run_dir)
    now = {name: entries[name]["sha256"] for name in report_inputs(run_dir)}
    before = entries.get(REPORT, {}).get("inputs", {})
    changed = sorted(name for name in now.keys() | before.keys()
                     if now.get(name) != before.get(name))  # fmt: skip
    if REPORT in entries and changed:
        raise MismatchError(
            f"the report of {run_dir} is older than {', '.join(changed[:3])}",
            f"judge what lies there now: mismatch compare {run_dir}",
        )


def write_rendered(
    run_dir: Path, report: Report, tokens: pd.DataFrame, framework: str | None = None
) -> None:
    """Write report.html and report.md.

    Args:
        framework: whose names the tables show; None: everybody's in the HTML report, nobody's in
            Markdown.
    """
    from mismatch.reports.html import to_html
    from mismatch.reports.markdown import to_markdown

    for name, text in (
        ("report.md", to_markdown(report, framework)),
        ("report.html", to_html(report, tokens, framework)),
    ):
        store.write_text(run_dir / name, text)
        manifest.record(run_dir, name, "")


def write_pair(directory: Path, report: Report, tokens: pd.DataFrame) -> None:
    """comparison.json, tokens.parquet and the report, as a run has them."""
    store.save_tokens(directory, tokens)
    document = {"schema": COMPARISON_SCHEMA, **comparisons_to_json(report.comparisons, ())}
    store.save_document(directory, COMPARISON, document, schema=COMPARISON_SCHEMA)
    write_report(directory, report, tokens)


def write_page(directory: Path, shown: Page, document: dict[str, Any]) -> None:
    """Write a page as HTML and Markdown, and last its numbers as JSON: where that is, the rest is.

    Raises:
        MismatchError: the directory cannot be written.
    """
    from mismatch.reports import html, markdown

    for name, text in (
        (f"{shown.file}.html", html.show_page(shown)),
        (f"{shown.file}.md", markdown.show_page(shown)),
    ):
        store.write_text(directory / name, text)
        manifest.record(directory, name, "")
    store.save_document(directory, f"{shown.file}.json", document, schema=document["schema"])


LEVELS = {"critical": "error", "warn": "warning"}  # tone -> annotation


def to_json(report: Report, failing: bool) -> str:
    """``report.json``, with what to do next; its exit code is that of no ``--fail-on``."""
    return json.dumps(report_to_json(report, next_steps(report)), indent=1, allow_nan=False) + "\n"


def to_github(report: Report, failing: bool) -> str:
    """Workflow commands that GitHub shows as annotations, errors first; the verdict last.

    Args:
        failing: the command ends with exit code 1; then the verdict is an error.
    """
    faults = [(LEVELS[TONES[status]], name, text) for name, status, text in _faults(report)]
    lines = [
        _annotation(level, f"mismatch {name}", text)
        for level, name, text in sorted(faults, key=lambda fault: fault[0])
    ]
    verdict = report.verdict
    level = "error" if failing else LEVELS.get(TONES[verdict.status], "notice")
    lines.append(_annotation(level, f"mismatch: {verdict.status.upper()}", verdict.reason))
    return "\n".join(lines) + "\n"


def _faults(report: Report) -> Iterator[tuple[str, str, str]]:
    """(name, status, text) of every check that did not pass and metric that is not healthy."""
    for check in checks(report, "failed", "inconclusive", "warning"):
        fix = f"; fix: {check.fix}" if check.fix else ""
        yield check.id, check.status, f"{check.detail}{fix}"
    for row in judged_rows(report):
        judgement = row.judgement
        if judgement is not None and judgement.status != "healthy":
            bounds = f"healthy {row.healthy(judgement.healthy)}, unfit {row.unfit(judgement.unfit)}"
            yield row.metric, judgement.status, f"{row.words.label}: {row.value} ({bounds})"


def _annotation(level: str, title: str, text: str) -> str:
    """One workflow command; its separators are escaped as GitHub asks.

    >>> _annotation("error", "a: b", "50 % off")
    '::error title=a%3A b::50 %25 off'
    """
    escaped = line(title).replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={escaped}::{line(text).replace('%', '%25')}"


def to_junit(report: Report, failing: bool) -> str:
    """A test case for every check, every judged metric, and the verdict.

    Failed and unfit ones fail; what was not tested is skipped; the rest passes, warnings with
    their text as output. The verdict fails where the command does: an inconclusive run that no
    check failed is not green.

    Args:
        failing: the command ends with exit code 1.
    """
    suite = ElementTree.Element("testsuite", name="mismatch")
    faults = {name: (status, text) for name, status, text in _faults(report)}
    names = [("checks", check.id) for check in report.checks]
    names += [("metrics", row.metric) for row in judged_rows(report)]
    skipped = {check.id: check.detail for check in checks(report, "not_tested")}
    failures = 0
    for kind, name in names:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"mismatch.{kind}", name=line(name)
        )
        status, text = faults.get(name, ("", ""))
        if name in skipped and kind == "checks":
            ElementTree.SubElement(case, "skipped", message=line(skipped[name]))
        elif status and TONES[status] == "critical":
            failures += 1
            ElementTree.SubElement(case, "failure", type=status, message=line(text))
        elif status:
            ElementTree.SubElement(case, "system-out").text = f"{status}: {line(text)}"
    case = ElementTree.SubElement(suite, "testcase", classname="mismatch", name="verdict")
    if failing:
        verdict = report.verdict
        failures += 1
        ElementTree.SubElement(case, "failure", type=verdict.status, message=line(verdict.reason))
    return _written(suite, failures, len(skipped))


def _written(suite: ElementTree.Element, failures: int, skipped: int) -> str:
    counts = {"tests": len(suite), "failures": failures, "skipped": skipped}
    suite.attrib |= {name: str(count) for name, count in counts.items()}
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def against_to_github(result: Against) -> str:
    """An annotation for every deciding metric that moved; the outcome last."""
    lines = [
        _annotation("error" if row.beyond else "warning", f"mismatch {row.metric}", _move(row))
        for row in result.rows
        if row.outcome in ("worse", "undecided")
    ]
    level = "error" if result.fails else "notice"
    return "\n".join([*lines, _annotation(level, "mismatch: against", result.reason)]) + "\n"


def against_to_junit(result: Against) -> str:
    """A test case for every deciding metric, and the outcome; it fails where the command does."""
    suite = ElementTree.Element("testsuite", name="mismatch against")
    failures = int(result.fails)
    for row in result.rows:
        if row.outcome is None:
            continue
        case = ElementTree.SubElement(
            suite, "testcase", classname="mismatch.against", name=line(row.metric)
        )
        if row.beyond or row.outcome == "undecided":
            failures += 1
            ElementTree.SubElement(case, "failure", type=row.outcome, message=line(_move(row)))
        else:
            ElementTree.SubElement(case, "system-out").text = f"{row.outcome}: {line(_move(row))}"
    case = ElementTree.SubElement(suite, "testcase", classname="mismatch", name="against")
    if result.fails:
        ElementTree.SubElement(case, "failure", type=result.outcome, message=line(result.reason))
    return _written(suite, failures, 0)


def _move(row: AgainstRow) -> str:
    p_value = "" if row.p_value is None else f", p {chance(row.p_value)}"
    write = alike((row.old.value, row.new.value))
    return f"{row.metric} {write(row.old.value)} → {write(row.new.value)}{p_value}"
