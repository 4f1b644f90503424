"""The page of an audit of kernels in a real browser."""

from __future__ import annotations

from pathlib import Path

from mismatch.features.kernels.section import page as page_of
from mismatch.reports.html import show_page
from tests.browser.chromium import Browser
from tests.browser.test_html_report import CONTRAST
from tests.kernels_fixture import make_audit_report


def test_it_loads_alone_and_can_be_read_everywhere(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "kernels.html"
    page.write_text(show_page(page_of(make_audit_report())), encoding="utf-8")
    for dark in (False, True):
        browser.open(page.as_uri(), dark=dark)
        browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        ratio, where = browser.evaluate(CONTRAST)
        assert ratio >= 4.5, where
    browser.open(page.as_uri(), width=390, height=844)
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    assert browser.problems == []
    assert browser.requests == [page.as_uri()]
    sizes = browser.evaluate(
        "[...document.querySelectorAll('svg.figure')].map(s => s.getBoundingClientRect())"
        ".map(r => [r.width, r.height])"
    )
    assert len(sizes) == 2
    assert all(width > 250 and height > 50 for width, height in sizes)
