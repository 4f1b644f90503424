"""The token explorer in headless Chromium: how large, how soon painted, how smooth.

    python benchmarks/explorer.py [--tokens 1000000]

A report page of a synthetic run is built and opened. Goals: the page holds at most 5 MB, its first
paint comes within 1 s, no task of the page takes over 50 ms while it loads, and while the explorer
unpacks, scrolls, filters, searches and walks from token to token, and building takes at most 10 s
per million tokens, with a time per token that does not grow from a tenth of them. Tasks are those
of the page's main thread in Chromium's own trace, by the processor's time: other work on the
machine counts little, and Chromium's own pages not at all.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mismatch.reports.html import to_html
from mismatch.reports.sections.explorer import section
from tests.browser.chromium import Browser, find_chromium, started
from tests.explorer_fixture import many
from tests.reports_fixture import make_report

LENGTH, VOCABULARY, LAYERS, ASKED = 1000, 50_000, 24, 50
TRACED = ["disabled-by-default-devtools.timeline", "blink.user_timing"]
MARK = "this page"
LONG_TASK_MS, PAINT_MS, PAGE_BYTES, BUILD_S = 50, 1000, 5_000_000, 10.0
SHOW = """
(() => { const explorer = document.getElementById('explorer'), fold = explorer.closest('details');
  if (fold) fold.open = true; explorer.scrollIntoView(); })()
"""
SCROLL = """
(() => { const list = document.querySelector('[data-part=list]'); let left = 120;
  const go = () => { list.scrollTop += 311; if (left--) requestAnimationFrame(go);
    else window.scrolled = true; }; go(); })()
"""
KEY = """
document.querySelector('[data-part=list]').dispatchEvent(
  new KeyboardEvent('keydown', {key: '%s', bubbles: true}))
"""
SET = """
(() => { const node = document.querySelector('[data-part=%s]'); node.value = '%s';
  node.dispatchEvent(new Event('%s', {bubbles: true})); })()
"""


def build(tokens: int) -> tuple[float, Any]:
    """Seconds of CPU that the explorer's section takes, and the table."""
    table = many(max(1, tokens // LENGTH), LENGTH, 0, VOCABULARY, LAYERS, ASKED)
    start = time.process_time()
    section(make_report(), table)
    return time.process_time() - start, table


@contextmanager
def tasks(browser: Browser, found: dict[str, float], name: str) -> Iterator[None]:
    """Enter the longest task of what is done inside, in milliseconds."""
    browser.chromium.start_tracing(categories=TRACED)
    yield
    browser.evaluate(f"(performance.mark('{MARK}'), 0)")
    time.sleep(0.2)
    events = json.loads(browser.chromium.stop_tracing())["traceEvents"]
    main = [(event["pid"], event["tid"]) for event in events if event["name"] == MARK]
    spent = [
        event["tdur"] / 1000
        for event in events
        if event["name"] == "RunTask" and "tdur" in event and (event["pid"], event["tid"]) in main
    ]
    if not spent:
        raise SystemExit("the trace holds no task of the page")
    found[f"longest task, {name}"] = max(spent)


def walk(browser: Browser, page: Path) -> dict[str, float]:
    """Milliseconds: first paint, until the explorer is ready, and the longest task of each step."""
    found: dict[str, float] = {}
    ready = "document.getElementById('explorer').dataset.ready === 'yes'"
    with tasks(browser, found, "loading the page"):
        browser.open(page.as_uri())
    paints = "performance.getEntriesByType('paint').map(p => p.startTime)"
    found["first paint"] = min(browser.evaluate(paints))
    with tasks(browser, found, "unpacking"):
        browser.evaluate(SHOW)
        start = time.monotonic()
        browser.wait(ready)
        found["explorer ready after"] = 1000 * (time.monotonic() - start)
    with tasks(browser, found, "scrolling"):
        browser.evaluate(SCROLL)
        browser.wait("window.scrolled === true")
    with tasks(browser, found, "keys"):
        for key in ("j", "j", "ArrowRight", "ArrowDown", "k"):
            browser.evaluate(KEY % key)
    with tasks(browser, found, "filter and search"):
        for part, value, event in (("least", "0.05", "input"), ("text", "t1 t", "input")):
            browser.evaluate(SET % (part, value, event))
            time.sleep(0.2)
            browser.wait(ready)
    with tasks(browser, found, "colours and order"):
        browser.evaluate(SET % ("mode", "ratio", "change"))
        browser.evaluate(SET % ("sort", "mean", "change"))
    if browser.problems:
        raise SystemExit(f"the page complains: {browser.problems}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    tokens = parser.parse_args().tokens
    binary = find_chromium()
    if binary is None:
        raise SystemExit("needs Chromium: apt-get install -y chromium")
    build(1000)  # imports
    small, _ = build(tokens // 10)
    seconds, table = build(tokens)
    growth = seconds / (10 * small)
    with tempfile.TemporaryDirectory() as scratch, started(binary) as browser:
        page = Path(scratch) / "report.html"
        page.write_text(to_html(make_report(), table), encoding="utf-8")
        size = page.stat().st_size
        print(f"{len(table):,} tokens: built in {seconds:.1f} s of CPU, {growth:.2f} of linear")
        found = walk(browser, page)
        held = browser.evaluate("document.querySelector('[data-part=count]').textContent")
        notes = browser.evaluate(
            "(document.getElementById('explorer').nextElementSibling || {}).innerText"
        )
    print(f"page: {size / 1e6:.2f} MB; {held}")
    print(notes)
    for name, value in found.items():
        print(f"  {name:36} {value:7.1f} ms")
    tasks = max(value for name, value in found.items() if name.startswith("longest task, "))
    passed = (
        size <= PAGE_BYTES
        and found["first paint"] <= PAINT_MS
        and tasks <= LONG_TASK_MS
        and seconds <= BUILD_S * max(tokens, 1) / 1e6
        and growth <= 1.25
    )
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
