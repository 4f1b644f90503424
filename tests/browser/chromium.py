"""Chromium, headless, through Playwright: the system's, else Playwright's own build."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser as Chromium
    from playwright.sync_api import Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking")


def find_chromium() -> str | None:
    """Return the path of a Chromium; None where there is none."""
    on_path = next((path for name in NAMES if (path := shutil.which(name))), None)
    return on_path or _own_build()


def _own_build() -> str | None:
    """Return the path of the build that ``playwright install chromium`` left, if any."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).exists() else None


class Browser:
    """A page at a time, and what went on in it.

    Attributes:
        chromium: Playwright's browser.
        page: Playwright's page, of the last :meth:`open`.
        requests: every URL that it asked for.
        problems: what its console said, uncaught exceptions.
    """

    page: Page

    def __init__(self, chromium: Chromium) -> None:
        self.chromium = chromium
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._pages: dict[tuple[bool, bool], Page] = {}

    def open(
        self,
        url: str,
        *,
        dark: bool = False,
        width: int = 1280,
        height: int = 900,
        scripts: bool = True,
    ) -> None:
        """Load a page afresh and wait until it has loaded."""
        kind = width < 600, scripts
        if kind not in self._pages:
            self._pages[kind] = self._new_page(*kind)
        self.page = self._pages[kind]
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(media="null", color_scheme="dark" if dark else "light")
        self.page.goto("about:blank")
        self.requests.clear()
        self.problems.clear()
        self.page.goto(url)

    def evaluate(self, script: str) -> Any:
        """Value of a JavaScript expression in the page."""
        return self.page.evaluate(script)

    def wait(self, condition: str, timeout_s: float = 60) -> None:
        """Until an expression holds. (Playwright's own waiting is eval, which the pages forbid.)"""
        end = time.monotonic() + timeout_s
        while not self.evaluate(condition):
            assert time.monotonic() < end, f"the page never came to: {condition}"
            time.sleep(0.02)

    def _new_page(self, phone: bool, scripts: bool) -> Page:
        page = self.chromium.new_context(is_mobile=phone, java_script_enabled=scripts).new_page()
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        return page


@contextmanager
def started(binary: str) -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=binary, args=list(FLAGS))
        yield Browser(chromium)
        chromium.close()
