"""axe-core finds nothing serious on any page, on a desktop and on a phone.

tests/data/axe.min.js is axe-core 4.14.1 (MPL-2.0, tests/data/axe.LICENSE), unchanged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mismatch.pipeline.run_comparison import compare_runs
from mismatch.reports.html import show_page, to_html
from mismatch.reports.saved_runs import runs_page
from tests.browser.chromium import Browser
from tests.report_makers import MAKERS

ROOT = Path(__file__).parents[2]
AXE = (ROOT / "tests" / "data" / "axe.min.js").read_text("utf-8")
RUN = """
axe.run(document, {resultTypes: ['violations']}).then(done => done.violations.map(
  v => [v.impact, v.id, v.nodes.length, v.nodes[0].html.slice(0, 200)]))
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A page of every kind: its address."""
    examples = ROOT / "examples"
    broken = "example-tiny-gpt-oss-no-sinks"
    both = compare_runs([examples / "tiny-gpt-oss", examples / "tiny-gpt-oss-no-sinks"])
    documents = {"report": to_html(*MAKERS[broken]()), "side by side": show_page(runs_page(both))}
    folder, addresses = tmp_path_factory.mktemp("axe"), {}
    for name, document in documents.items():
        path = folder / f"{name}.html"
        path.write_text(document, "utf-8")
        addresses[name] = path.as_uri()
    return addresses


def violations(browser: Browser) -> list[list[Any]]:
    browser.evaluate(f"{AXE};0")
    return list(browser.evaluate(RUN))


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
@pytest.mark.parametrize("name", ["report", "side by side"])
def test_axe_finds_nothing_serious(
    browser: Browser, pages: dict[str, str], name: str, width: int, height: int
) -> None:
    browser.open(pages[name], width=width, height=height)
    assert not [row for row in violations(browser) if row[0] in ("serious", "critical")]


def test_axe_sees_a_page_that_is_wrong(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "wrong.html"
    page.write_text(
        "<!doctype html><html lang=en><title>x</title><main><h1>x</h1><button></button>"
    )
    browser.open(page.as_uri())
    assert "button-name" in [row[1] for row in violations(browser)]
