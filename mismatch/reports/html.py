"""One self-contained HTML file: no script, no request; for phones, dark screens and paper too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from mismatch.reports import (
    gauge,
    normal,
    quantities,
    sides,
    summary,
)
from mismatch.reports.elsewhere import Elsewhere
from mismatch.reports.section import Section, cell_interval, cell_text
from mismatch.reports.sections import sections
from mismatch.reports.text import line
from mismatch.reports.words import MARKS
from mismatch.types import Report

if TYPE_CHECKING:
    import pandas as pd
    from jinja2 import Template

WORDS = {
    "healthy": "Healthy",
    "warn": "Warning",
    "critical": "Critical",
}
LONG = 40  # entries of a fingerprint beyond which it says how many there are


@dataclass(frozen=True, slots=True)
class Scale:
    """A judged metric with its gauge, for the first screen."""

    row: summary.Row
    gauge: gauge.Gauge


def to_html(report: Report, tokens: pd.DataFrame, framework: str | None = None) -> str:
    """The report as one HTML document. The same input gives the same bytes.

    Args:
        tokens: one row per action token, as in tokens.parquet: sequence, position, token_id,
            token, rollout_logprob, train_logprob, delta, entropy, turn, routing_flips.
        framework: whose names the metrics have in the column of aliases; None: everybody's.
    """
    return template("report.html").render(
        report=report,
        model=summary.model_name(report),
        comparison=summary.headline(report),
        status_word=WORDS[report.verdict.status],
        size=summary.size(report),
        plain=summary.in_plain_words(report),
        scales=_scales(report),
        normal=normal.sentences(report),
        ladders=normal.ladders(report),
        steps=summary.next_steps(report),
        rows=summary.judged_rows(report) + summary.other_rows(report),
        comparisons=[(item, summary.all_rows(item)) for item in report.comparisons],
        noise=summary.noise_rows(report),
        sections=sections(report, tokens),
        checks=summary.checks(report, "failed", "warning", "passed"),
        untested=summary.untested(report),
        ran=sides.what_ran(report),
        fingerprints={name: _shown(side) for name, side in report.fingerprints.items()},
        command=summary.command(report),
        seconds=_seconds(report),
        versions=_versions(report),
        created=line(report.run.get("created", "")),
        names=Elsewhere(tokens, framework),
        line=line,
        css=packaged("report.css"),
    )


def page(sections: Sequence[Section], file: str, **words: Any) -> str:
    """Sections as a page of their own, below a verdict.

    Args:
        file: where the numbers are, for the last line.
        words: title, brand, created, tone, word, reason, model, remarks; see page.html.
    """
    css = packaged("report.css")
    return template("page.html").render(sections=sections, file=file, css=css, **words)


@cache
def template(name: str) -> Template:
    """A packaged page; every value that is put into it is escaped."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(packaged),
        autoescape=True,  # every value is foreign until proved otherwise
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_unbroken,
    )
    environment.filters["line"] = line
    environment.globals.update(marks=MARKS, cell_text=cell_text, cell_interval=cell_interval)
    environment.filters["percent"] = lambda share: f"{100 * share:.2f}%"
    return environment.get_template(name)


def _unbroken(value: Any) -> Any:
    """No line break between a number and its percent sign. Keeps markup what it is."""
    return value.replace(" %", "\u00a0%") if isinstance(value, str) else value


def packaged(name: str) -> str:
    """A template or style sheet that ships with the package."""
    return resources.files("mismatch.reports").joinpath("templates", name).read_text("utf-8")


def _scales(report: Report, most: int = 5) -> list[Scale]:
    """The gauges of the first screen: what decides the verdict is always among them."""
    rows = summary.judged_rows(report)
    severity = ["healthy", "warn", "critical"]
    shown = sorted(rows, key=lambda row: -severity.index(row.status))[:most]
    made = [
        (row, gauge.gauge_of(row, normal.marks(report, row.metric))) for row in rows if row in shown
    ]
    return [Scale(row, scale) for row, scale in made if scale is not None]


def _shown(side: dict[str, Any]) -> str:
    """A fingerprint as JSON, its long tables (weights, source files) as their length."""
    short = {
        key: f"{len(value)} entries, see report.json"
        if isinstance(value, dict | list | tuple) and len(value) > LONG
        else value
        for key, value in side.items()
    }
    return json.dumps(short, indent=2, ensure_ascii=True, sort_keys=True, default=str)


def _seconds(report: Report) -> str:
    seconds = report.run.get("seconds")
    if not isinstance(seconds, dict):
        return ""
    return ", ".join(
        f"{line(stage)} {quantities.number(float(value))} s" for stage, value in seconds.items()
    )


def _versions(report: Report) -> str:
    versions = report.run.get("versions")
    if not isinstance(versions, dict):
        return ""
    return ", ".join(f"{line(name)} {line(version)}" for name, version in versions.items())
