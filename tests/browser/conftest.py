"""A browser for each file of tests, where there is a Chromium (tools/get_browser.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.chromium import Browser, find_chromium, started


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    binary = find_chromium()
    if binary is None:
        pytest.skip("browser: there is no Chromium here")
    with started(binary) as opened:
        yield opened
