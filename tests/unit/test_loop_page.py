"""What docs/loop.md says of the demonstration is what its curves say."""

from __future__ import annotations

from mismatch.reports.sections.loop import section
from tools.loop_page import DOCUMENT, EXAMPLE, PICTURE, read, short, text


def test_the_demonstration_is_written_from_its_curves() -> None:
    report = read(EXAMPLE / "loop.json")
    page = DOCUMENT.read_text("utf-8")
    assert text(report) in page
    assert all(arm.runs for arm in report.arms)
    assert f"images/{PICTURE.name}" in page
    assert PICTURE.exists()
    said = set(section(report).sentences)
    for arm in report.arms:
        if len(arm.runs) < 2:  # one seed claims nothing
            assert not any(arm.name in sentence for sentence in said)


def test_numbers_are_shortened_wherever_they_stand() -> None:
    assert short({"a": [0.123456789, {"b": (1.0, None, "x", 3)}]}) == {
        "a": [0.12346, {"b": [1.0, None, "x", 3]}]
    }
