"""The HTML report in a real browser: it loads quietly, alone, and can be read everywhere."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mismatch.reports.html import to_html
from tests.browser.chromium import Browser, find_chromium
from tests.reports_fixture import make_failing_report

BINARY = find_chromium()
pytestmark = pytest.mark.skipif(
    BINARY is None, reason="needs Chromium: apt-get install -y chromium"
)
# Of every text element: does its colour stand out from the background it is painted on?
CONTRAST = """
(() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = rgb => rgb.slice(0, 3).map(v => v / 255)
    .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const ground = node => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  let worst = [99, ''];
  for (const node of document.querySelectorAll('p, li, td, th, small, h1, h2, h3, span, text')) {
    const own = [...node.childNodes].some(c => c.nodeType === 3 && c.textContent.trim());
    if (!own) continue;
    const style = getComputedStyle(node);
    const ink = node.closest('svg') ? style.fill : style.color;
    const [a, b] = [light(parse(ink)), light(ground(node))].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < worst[0]) worst = [ratio, node.textContent.trim().slice(0, 40)];
  }
  return worst;
})()
"""


@pytest.fixture(scope="module")
def report_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(to_html(*make_failing_report()), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert BINARY
    with Browser(BINARY) as started:
        yield started


def pixels(png: bytes) -> np.ndarray:
    from matplotlib import image

    read: np.ndarray = image.imread(io.BytesIO(png), format="png")
    return read


def test_loads_without_a_complaint_and_asks_for_nothing(browser: Browser, report_url: str) -> None:
    browser.open(report_url)
    assert browser.problems == []
    assert browser.requests == [report_url]
    assert browser.evaluate("document.querySelectorAll('img, iframe').length") == 0
    assert browser.evaluate("document.querySelector('.word').textContent").endswith("Broken")


def test_verdict_and_next_steps_are_on_the_first_screen(browser: Browser, report_url: str) -> None:
    browser.open(report_url, width=1280, height=800)
    bottom = "document.querySelector('header').getBoundingClientRect().bottom"
    assert browser.evaluate(bottom) <= 800


def test_every_figure_is_painted(browser: Browser, report_url: str) -> None:
    browser.open(report_url)
    sizes = browser.evaluate(
        "[...document.querySelectorAll('svg.figure')].map(s => s.getBoundingClientRect())"
        ".map(r => [r.width, r.height])"
    )
    assert len(sizes) >= 10
    assert all(width > 300 and height > 150 for width, height in sizes)
    browser.evaluate("document.getElementById('histogram').scrollIntoView()")
    picture = pixels(browser.screenshot())[..., :3]
    accent = np.array([0x2B, 0x5C, 0xC4]) / 255  # --accent of the light scheme: the bars
    assert (np.abs(picture - accent).max(axis=2) < 0.02).sum() > 1_000


@pytest.mark.parametrize("width", [390, 1280])
def test_the_map_of_layers_is_painted_in_its_shades(
    browser: Browser, report_url: str, width: int
) -> None:
    browser.open(report_url, width=width)
    cells = browser.evaluate(
        "[...document.querySelectorAll('#routing-map path[clip-path]')].map(p => "
        "[p.getBBox().width, getComputedStyle(p).fill, +getComputedStyle(p).opacity])"
    )
    assert len(cells) >= 2
    assert {fill for _, fill, _ in cells} == {"rgb(43, 92, 196)"}  # --accent, never black
    assert len({opacity for _, _, opacity in cells}) == len(cells)
    assert all(size > 5 for size, _, _ in cells)
    right = "document.querySelector('#routing-map svg').getBoundingClientRect().right"
    assert browser.evaluate(right) <= width


def test_tables_of_layers_and_experts_open(browser: Browser, report_url: str) -> None:
    browser.open(report_url)
    rows = (
        "(() => { const all = [...document.querySelectorAll('details')].filter(d => "
        "d.querySelector('summary').textContent === '%s'); all[0].open = true; "
        "return all[0].querySelectorAll('tbody tr').length; })()"
    )
    assert browser.evaluate(rows % "Every layer") == 4
    assert browser.evaluate(rows % "Experts whose load moved most") == 10


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_both_schemes_can_be_read(browser: Browser, report_url: str, dark: bool) -> None:
    browser.open(report_url, dark=dark)
    picture = pixels(browser.screenshot())[..., :3]
    assert picture.std() > 0.05
    assert (np.median(picture) < 0.3) == dark
    ratio, where = browser.evaluate(CONTRAST)
    assert ratio >= 4.5, where  # WCAG AA for body text


def test_a_phone_scrolls_in_one_direction_only(browser: Browser, report_url: str) -> None:
    browser.open(report_url, width=390, height=844)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    opened = "document.querySelectorAll('details').forEach(d => d.open = true)"
    browser.evaluate(f"({opened}, 0)")
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    bottom = "document.querySelector('.verdict').getBoundingClientRect().bottom"
    assert browser.evaluate(bottom) <= 844  # the verdict is on the first screen


def test_prints_light_whatever_the_scheme(
    browser: Browser, report_url: str, tmp_path: Path
) -> None:
    browser.open(report_url, dark=True)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.call("Emulation.setEmulatedMedia", media="print", features=dark)
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    browser.call("Emulation.setEmulatedMedia", media="")
    assert ground == "rgb(251, 251, 249)"
