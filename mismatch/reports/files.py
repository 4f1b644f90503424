"""A report as the files of a run directory: report.html, report.md, report.json."""

from __future__ import annotations

import hmac
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch.analysis.levels import incomplete
from mismatch.attempts import Attempts
from mismatch.errors import MismatchError
from mismatch.pipeline.document import (
    COMPARISON,
    COMPARISON_SCHEMA,
    SCHEMA,
    comparisons_to_json,
    report_to_json,
)
from mismatch.reports import html, markdown
from mismatch.reports.html import to_html
from mismatch.reports.markdown import to_markdown
from mismatch.reports.section import Page
from mismatch.reports.summary import next_steps
from mismatch.run import manifest, store
from mismatch.run.files import read_regular
from mismatch.run.trust import seal
from mismatch.types import NotTested, Report

if TYPE_CHECKING:
    import pandas as pd


REPORT = "report.json"
MARKED = b"report:"  # before what is sealed: the mark of a report is none of a spec


def write_report(run_dir: Path, report: Report, tokens: pd.DataFrame) -> Report:
    """Write report.html, report.md, and last report.json: where that is, the rest is.

    Returns:
        The report, which names what could not be shown.
    """
    if failed := write_rendered(run_dir, report, tokens):
        report = incomplete(report, failed)
        write_rendered(run_dir, report, tokens)
    steps = Attempts().make("next steps", next_steps, report, otherwise=[])
    document, inputs = report_to_json(report, steps), report_inputs(run_dir)
    store.save_document(run_dir, REPORT, document, schema=SCHEMA, inputs=inputs)
    if mark := seal(MARKED + read_regular(run_dir / REPORT)):
        manifest.record(run_dir, REPORT, SCHEMA, inputs=inputs, made_with={"seal": mark})
    return report


def judged_here(run_dir: Path) -> bool:
    """Return whether a command of this user wrote the report of a run (:func:`trust.seal`).

    Not where a recorded artefact is gone: nothing could judge the report again.
    """
    recorded = manifest.entries(run_dir)
    if not all((run_dir / name).exists() for name in recorded):
        return False
    made_with = recorded.get(REPORT, {}).get("made_with") or {}
    mark = seal(MARKED + read_regular(run_dir / REPORT)) if isinstance(made_with, dict) else ""
    return bool(mark) and hmac.compare_digest(mark, str(made_with.get("seal", "")))


def report_inputs(run_dir: Path) -> list[str]:
    """Return the recorded artefacts that a report of this directory is made from."""
    return [
        name
        for name in manifest.entries(run_dir)
        if name in (store.ROLLOUT, COMPARISON) or name.startswith("scores/")
    ]


def require_fresh(run_dir: Path) -> None:
    """Check that ``report.json`` was made from what lies there now.

    Raises:
        MismatchError: a scoring was made, or made again, since.
    """
    entries = manifest.entries(run_dir)
    now = {name: entries[name]["sha256"] for name in report_inputs(run_dir)}
    before = entries.get(REPORT, {}).get("inputs", {})
    changed = sorted(name for name in now.keys() | before.keys()
                     if now.get(name) != before.get(name))  # fmt: skip
    if REPORT in entries and changed:
        fault = f"the report of {run_dir} is older than {', '.join(changed[:3])}"
        raise MismatchError(fault, f"judge what lies there now: mismatch compare {run_dir}")


def write_rendered(
    run_dir: Path, report: Report, tokens: pd.DataFrame, framework: str | None = None
) -> list[NotTested]:
    """Write report.html and report.md.

    Args:
        framework: whose names the tables show; None: everybody's in the HTML report, nobody's in
            Markdown.

    Returns:
        What raised: sections, which the pages lack, or a whole page, which is deleted.
    """
    attempts = Attempts()
    asked = report, tokens, framework, attempts, run_dir
    brief = report, framework, False, run_dir
    for name, text in (
        ("report.md", attempts.make("report.md", to_markdown, *brief, otherwise="")),
        ("report.html", attempts.make("report.html", to_html, *asked, otherwise="")),
    ):
        if not text:
            (run_dir / name).unlink(missing_ok=True)
            continue
        store.write_text(run_dir / name, text)
        manifest.record(run_dir, name, "")
    return attempts.failed


def write_pair(directory: Path, report: Report, tokens: pd.DataFrame) -> Report:
    """comparison.json, tokens.parquet and the report, as a run has them."""
    store.save_tokens(directory, tokens)
    document = {"schema": COMPARISON_SCHEMA, **comparisons_to_json(report.comparisons, ())}
    store.save_document(directory, COMPARISON, document, schema=COMPARISON_SCHEMA)
    return write_report(directory, report, tokens)


def write_page(directory: Path, shown: Page, document: dict[str, Any]) -> None:
    """Write a page as HTML and Markdown, and last its numbers as JSON: where that is, the rest is.

    Raises:
        MismatchError: the directory cannot be written.
    """
    for name, text in (
        (f"{shown.file}.html", html.show_page(shown)),
        (f"{shown.file}.md", markdown.show_page(shown)),
    ):
        store.write_text(directory / name, text)
        manifest.record(directory, name, "")
    store.save_document(directory, f"{shown.file}.json", document, schema=document["schema"])


def to_json(report: Report) -> str:
    """``report.json``, with what to do next; its exit code is that of no ``--fail-on``."""
    return json.dumps(report_to_json(report, next_steps(report)), indent=1, allow_nan=False) + "\n"
