"""The words of reports: plain English of the field, no phrase that a reader has stumbled over."""

from __future__ import annotations

import re

import pytest

from mismatch.reports.formatting import wording
from tests.unit.test_goldens import GOLDENS, ROOT

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
TEXTS = sorted(path for path in GOLDENS.iterdir() if path.suffix in (".txt", ".md"))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_no_rendering_has_a_banned_phrase(path) -> None:  # type: ignore[no-untyped-def]
    text = " ".join(path.read_text("utf-8").split()).lower()
    assert [phrase for phrase in BANNED if phrase in text] == []
    assert SCIENTIFIC_PERCENT.findall(text) == []


def test_the_glossary_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "reading-a-report.md").read_text("utf-8")
    for word, meaning in wording("glossary").items():
        assert f"| {word} | {meaning} |" in page
