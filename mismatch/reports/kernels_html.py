"""An audit of kernels as one self-contained HTML file, in the look of the report."""

from __future__ import annotations

from typing import Any

from mismatch.experiments.kernels.types import AuditReport
from mismatch.reports import kernels
from mismatch.reports.html import packaged, template
from mismatch.reports.text import line


def to_html(report: AuditReport) -> str:
    """The page. The same input gives the same bytes.

    Raises:
        MismatchError: nothing was audited.
    """
    return template("kernels_page.html").render(
        kernels=kernels.view(report),
        facts=[(line(name), _fact(value)) for name, value in report.facts.items()],
        created=line(report.facts.get("created", "")),
        css=packaged("report.css"),
    )


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{line(name)} {line(one)}" for name, one in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(line(one) for one in value) or "none"
    return line(value)
