"""The numbered pictures of "Read your report": each number has its place on the present page."""

from __future__ import annotations

from pathlib import Path

import pytest

import mismatch
from tests.browser.chromium import Browser
from tools.annotate_report import EXAMPLE, PICTURES, WIDTH, Picture, draw


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("annotated") / "report.html"
    path.write_text(mismatch.load(EXAMPLE).to_html(), "utf-8")
    return path


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_every_numbered_place_is_on_the_page(
    browser: Browser, page: Path, picture: Picture, tmp_path: Path
) -> None:
    browser.open(page.as_uri(), width=WIDTH)
    for place in picture.places:
        assert browser.page.locator(place).count() == 1, place
        assert browser.page.locator(place).is_visible(), place
    draw(browser.page, picture, tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").stat().st_size > 10_000
