"""Ten reports for tests of the renderers: two saved runs, and eight made by fixtures."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from mismatch.pipeline.document import report_from_json
from mismatch.reports.html import to_html
from mismatch.reports.markdown import to_markdown
from mismatch.reports.section import Section
from mismatch.reports.sections import chapters, page
from mismatch.reports.terminal import print_page
from mismatch.run import store
from mismatch.types import Report
from tests import reports_fixture
from tests.fixes_fixture import make_table

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ("tiny-gpt-oss", "tiny-gpt-oss-no-sinks")
EMPTY = '<svg viewBox="0 0 6 4"></svg>'
ReportAndTokens = tuple[Report, pd.DataFrame]


def sections(report: Report, tokens: pd.DataFrame | None = None) -> list[Section]:
    """The sections of a report without its chapters."""
    return [part for chapter in chapters(report, tokens) for part in chapter.parts]


def _example(name: str) -> ReportAndTokens:
    folder = ROOT / "examples" / name
    document = json.loads((folder / "report.json").read_text("utf-8"))
    return report_from_json(document), store.load_tokens(folder)


def _healthy() -> ReportAndTokens:
    tokens = reports_fixture.make_tokens()
    return reports_fixture.make_report(tokens).with_analyses(gradients=None), tokens


def _gradients() -> ReportAndTokens:
    tokens = reports_fixture.make_tokens()
    return reports_fixture.make_report(tokens), tokens


def _fixes() -> ReportAndTokens:
    report, tokens = reports_fixture.make_failing_report()
    return report.with_analyses(fixes=make_table("after-fixes"), gradients=None), tokens


MAKERS: dict[str, Callable[[], ReportAndTokens]] = {
    "healthy": _healthy,
    "failing": reports_fixture.make_failing_report,
    "empty": reports_fixture.make_empty_report,
    "inconclusive": reports_fixture.make_inconclusive_report,
    "fixes": _fixes,
    "gradients": _gradients,
    **{f"example-{name}": (lambda name=name: _example(name)) for name in EXAMPLES},
}


class _Text(HTMLParser):
    """The words of a page, without style sheets and the inside of pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.hidden += tag in ("style", "svg", "script")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in ("style", "svg", "script")

    def handle_data(self, data: str) -> None:
        if not self.hidden and data.strip():
            self.words.append(" ".join(data.split()))


def html_text(page: str) -> str:
    """Return the text that a reader of a page sees."""
    parser = _Text()
    parser.feed(page)
    return "\n".join(parser.words) + "\n"


def _terminal(report: Report, details: bool) -> str:
    out = io.StringIO()
    print_page(page(report), Console(file=out, width=80), "RUN", details=details)
    return out.getvalue()


@cache
def report_of(name: str) -> ReportAndTokens:
    """Return a report and its tokens, made once in a process."""
    return MAKERS[name]()


@cache
def rendered(name: str) -> dict[str, str]:
    """Return every text rendering of a report by the suffix of its file."""
    report, tokens = report_of(name)
    with pytest.MonkeyPatch.context() as patch:
        # Drawing takes most of a page's time, and a picture has no text.
        patch.setattr(Figure, "savefig", lambda figure, file, **_: file.write(EMPTY))
        page = to_html(report, tokens)
    return {
        "md": to_markdown(report),
        "terminal.txt": _terminal(report, details=False),
        "details.txt": _terminal(report, details=True),
        "html.txt": html_text(page),
    }
