"""The words of reports: plain English of the field, no phrase that a reader has stumbled over."""

from __future__ import annotations

import re

import pytest

from mismatch.reports.formatting import wording
from tests.report_makers import MAKERS, ROOT, rendered
from tests.unit.test_plain_words import BANNED as BANNED_WORDS
from tests.unit.test_plain_words import found
from tools import site_pages

BANNED = (
    "typically",
    "routed to other experts",
    "such a layer",
    "such tokens",
    "same likeliest",
    "are off alike",
    "as far as the others",
    "as far as sure ones",
    "it coincides",
    "so the interval may be too narrow",
    "parts are no shares",
    "that vouches for",
    "never shows an effective size",
    "entered as ±20",
    "do both sides speak",
    "nothing to mend",
    "mends nothing",
    "what really ran",
    "not what was asked for",
)
SCIENTIFIC_PERCENT = re.compile(r"\de-?\d+\s%")


@pytest.mark.parametrize("name", MAKERS)
def test_no_rendering_has_a_banned_phrase(name: str) -> None:
    for text in rendered(name).values():
        words = " ".join(text.split()).lower()
        assert [phrase for phrase in BANNED if phrase in words] == []
        assert SCIENTIFIC_PERCENT.findall(words) == []


@pytest.mark.parametrize("name", [name for name in MAKERS if not name.startswith("example-")])
def test_made_reports_have_none_of_the_banned_words(name: str) -> None:
    """The saved examples hold labels of the version that ran them."""
    assert found(iter(rendered(name).items()), tuple(BANNED_WORDS)) == []


def test_the_glossary_is_in_the_docs() -> None:
    page = site_pages.filled((ROOT / "docs" / "start" / "read-report.md").read_text("utf-8"))
    for word, meaning in wording("glossary").items():
        assert f"| {word} | {meaning} |" in page
