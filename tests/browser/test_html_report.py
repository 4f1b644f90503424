"""The HTML report in a real browser: it loads quietly, alone, and can be read everywhere."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest

from mismatch.reports.html import to_html
from tests.browser.chromium import Browser
from tests.fixes_fixture import make_long_table
from tests.report_makers import MAKERS
from tests.reports_fixture import make_failing_report

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


OPEN_ALL = "(document.querySelectorAll('details').forEach(d => d.open = true), 0)"
# Numbers in visible text, those of pictures included.
NUMBERS = """
(() => {
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let count = 0, node;
  while (node = walk.nextNode()) {
    const parent = node.parentElement;
    if (parent.closest('title, style') || !parent.checkVisibility()) continue;
    if (!parent.getClientRects().length) continue;
    count += [...node.textContent.matchAll(/(?<![\\w.])\\d[\\d,]*(\\.\\d+)?(e-?\\d+)?/g)].length;
  }
  return count;
})()
"""
EXAMPLES = ("tiny-gpt-oss", "tiny-gpt-oss-no-sinks")


@pytest.fixture(scope="module", params=EXAMPLES)
def example_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    report, tokens = MAKERS[f"example-{request.param}"]()
    path = tmp_path_factory.mktemp("example") / "report.html"
    path.write_text(to_html(report, tokens), encoding="utf-8")
    return path.as_uri()


def test_an_example_is_five_screens_six_pages_and_260_numbers(
    browser: Browser, example_url: str
) -> None:
    require_short(browser, example_url, screens=5.1)


def test_twenty_fixes_fold_within_the_budget(browser: Browser, tmp_path: Path) -> None:
    report, tokens = MAKERS["example-tiny-gpt-oss-no-sinks"]()
    path = tmp_path / "report.html"
    path.write_text(to_html(report.with_analyses(fixes=make_long_table(20)), tokens), "utf-8")
    require_short(browser, path.as_uri(), screens=4.8)  # of 5: room for what a run may add
    rows = (
        "[...document.querySelectorAll('tr')].filter(r => /helps-|idle-|hurts-/.test(r.innerText))"
    )
    assert browser.evaluate(f"{rows}.filter(r => r.checkVisibility()).length") < 20
    browser.evaluate(OPEN_ALL)
    names = browser.evaluate(f"{rows}.map(r => r.innerText.match(/(helps|idle|hurts)-[a-z]/)[0])")
    assert len(set(names)) == 20


def require_short(browser: Browser, url: str, screens: float) -> None:
    """The answers on the first screen; all of it in so many screens, six pages, 260 numbers."""
    browser.open(url, width=1280, height=800)
    browser.wait(
        "document.querySelector('.compact')?.dataset.ready !== undefined || "
        "!document.querySelector('.compact')"
    )
    bottom = "document.querySelector('.answers').getBoundingClientRect().bottom"
    assert browser.evaluate(bottom) <= 800
    assert browser.evaluate("document.documentElement.scrollHeight") <= screens * 800
    assert browser.evaluate(NUMBERS) <= 260
    pdf = browser.page.pdf(
        format="A4", margin={"top": "1cm", "right": "1cm", "bottom": "1cm", "left": "1cm"}
    )
    assert 1 <= len(re.findall(rb"/Type\s*/Page[^s]", pdf)) <= 6


def test_commands_of_the_first_screen_are_copied_by_a_button(
    browser: Browser, example_url: str
) -> None:
    browser.open(example_url, width=1280, height=800)
    codes = browser.evaluate(
        "[...document.querySelectorAll('.answers code.copy')].map(code => code.textContent)"
    )
    buttons = "[...document.querySelectorAll('button.copier')]"
    assert browser.evaluate(f"{buttons}.length") == len(codes)
    if not codes:  # a clean run has nothing to apply
        return
    browser.evaluate(
        "window.copied = []; navigator.clipboard.writeText = async text => copied.push(text); 0"
    )
    browser.evaluate(f"{buttons}.forEach(button => button.click())")
    assert browser.evaluate("window.copied") == codes
    assert browser.evaluate(f"{buttons}.map(b => b.getAttribute('aria-label'))") == [
        f"copy {code}" for code in codes
    ]
    browser.page.emulate_media(media="print")
    assert browser.evaluate(f"{buttons}.every(button => !button.checkVisibility())")


def test_text_of_pictures_can_be_read_on_a_phone(browser: Browser, example_url: str) -> None:
    browser.open(example_url, width=390, height=844)
    sizes = browser.evaluate(
        "[...document.querySelectorAll('svg.figure')].filter(s => s.getBoundingClientRect().width)"
        ".flatMap(s => [...s.querySelectorAll('text')].map(t => parseFloat(getComputedStyle(t)"
        ".fontSize) * s.getBoundingClientRect().width / s.viewBox.baseVal.width))"
    )
    assert len(sizes) > 20
    assert min(sizes) >= 11
    cut = browser.evaluate(
        "[...document.querySelectorAll('svg.figure')].flatMap(s => { const frame = "
        "s.getBoundingClientRect(); return [...s.querySelectorAll('text')].filter(t => { const b = "
        "t.getBoundingClientRect(); return frame.width && (b.left < frame.left - 1 || "
        "b.right > frame.right + 1); }).map(t => t.textContent); })"
    )
    assert cut == []


@pytest.mark.parametrize("width", [400, 1280])
def test_no_table_is_wider_than_its_box(browser: Browser, example_url: str, width: int) -> None:
    browser.open(example_url, width=width, height=800)
    browser.evaluate(OPEN_ALL)
    cut = browser.evaluate(
        "[...document.querySelectorAll('.scroll')].filter(box => box.checkVisibility() && "
        "box.scrollWidth > box.clientWidth + 1).map(box => box.getAttribute('aria-label'))"
    )
    assert cut == []


@pytest.fixture(scope="module")
def report_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(to_html(*make_failing_report()), encoding="utf-8")
    return path.as_uri()


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


def test_every_figure_is_painted(browser: Browser, report_url: str) -> None:
    browser.open(report_url)
    sizes = browser.evaluate(
        "[...document.querySelectorAll('svg.figure')].map(s => s.getBoundingClientRect())"
        ".map(r => [r.width, r.height])"
    )
    assert len(sizes) >= 4
    assert all(width > 300 and height > 100 for width, height in sizes if width)
    browser.evaluate("document.getElementById('histogram').scrollIntoView()")
    picture = pixels(browser.page.screenshot())[..., :3]
    accent = np.array([0x2B, 0x5C, 0xC4]) / 255  # --accent of the light scheme: the bars
    assert (np.abs(picture - accent).max(axis=2) < 0.02).sum() > 1_000


@pytest.mark.parametrize("width", [390, 1280])
def test_the_map_of_layers_is_painted_in_its_shades(
    browser: Browser, report_url: str, width: int
) -> None:
    browser.open(report_url, width=width)
    browser.evaluate(OPEN_ALL)
    cells = browser.evaluate(
        "[...document.querySelectorAll('#routing-map path[clip-path]')].map(p => "
        "[p.getBBox().width, getComputedStyle(p).fill, +getComputedStyle(p).opacity])"
    )
    assert len(cells) >= 2
    assert {fill for _, fill, _ in cells} == {"rgb(43, 92, 196)"}  # --accent, never black
    assert len({opacity for _, _, opacity in cells}) == len(cells)
    assert all(size > 5 for size, _, _ in cells)
    right = "document.querySelector('#routing-map .drawing').getBoundingClientRect().right"
    assert browser.evaluate(right) <= width


def test_the_table_of_layers_opens(browser: Browser, report_url: str) -> None:
    browser.open(report_url)
    rows = (
        "(() => { const all = [...document.querySelectorAll('details')].filter(d => "
        "d.querySelector('summary').textContent === '%s'); all[0].open = true; "
        "return all[0].querySelectorAll('tbody tr').length; })()"
    )
    assert browser.evaluate(rows % "Every layer") == 4


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_both_schemes_can_be_read(browser: Browser, report_url: str, dark: bool) -> None:
    browser.open(report_url, dark=dark)
    picture = pixels(browser.page.screenshot())[..., :3]
    assert picture.std() > 0.05
    assert (np.median(picture) < 0.3) == dark
    ratio, where = browser.evaluate(CONTRAST)
    assert ratio >= 4.5, where  # WCAG AA for body text


def test_a_phone_scrolls_in_one_direction_only(browser: Browser, report_url: str) -> None:
    browser.open(report_url, width=390, height=844)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    browser.evaluate(OPEN_ALL)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    bottom = "document.querySelector('.verdict').getBoundingClientRect().bottom"
    assert browser.evaluate(bottom) <= 844  # the verdict is on the first screen


def test_prints_light_whatever_the_scheme(
    browser: Browser, report_url: str, tmp_path: Path
) -> None:
    browser.open(report_url, dark=True)
    browser.page.emulate_media(media="print")
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(251, 251, 249)"
