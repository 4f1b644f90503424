"""Numbers and foreign strings: what is written is what was meant, and nothing hostile survives."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mismatch.reports.formatting import alike, near_one, number, signed, token_text, visible
from mismatch.reports.formatting import text as words
from mismatch.reports.section import Cell, Column, Table, cell_text

MOVING = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.011123, "0.0111"),
        (0.0009999, "0.00100"),
        (3.1e-4, "0.000310"),
        (-3.1e-4, "−0.000310"),
        (0.9996, "1.00"),
        (12.34, "12.3"),
        (999.7, "1,000"),
        (12345.6, "12,346"),
        (2.5e9, "2.50e9"),
        (float("nan"), "–"),
        (float("inf"), "inf"),
        (None, "–"),
    ],
)
def test_three_significant_digits(value: float | None, text: str) -> None:
    assert number(value) == text


@given(st.floats(1e-12, 1e12))
@example(1.921348454507227e-05)
@example(1.051e-06)
def test_a_written_number_reads_back_within_its_digits(value: float) -> None:
    """Three digits, and two where more would be zeros behind the point alone."""
    rel = 5.1e-2 if 1e-6 <= value < 1e-4 else 5.1e-3
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=rel)


@given(st.text())
def test_nothing_invisible_or_moving_survives(text: str) -> None:
    shown = visible(text)
    assert not {unicodedata.category(character) for character in shown} & MOVING
    assert "\n" not in shown
    assert not shown or not unicodedata.combining(shown[0])
    shown.encode("utf-8")  # a lone surrogate would fail here, and in write_text


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("\u202egnp.exe", "⟨202E⟩gnp.exe"),
        ("\x1b[31m", "⟨1B⟩[31m"),
        ("\ud83d", "⟨D83D⟩"),
        ("\u200b", "⟨200B⟩"),
        ("\u00a0", "⟨A0⟩"),
        (" the ", "␣the␣"),
        ("\n", "↵"),
        ("\u0301", "\u25cc\u0301"),
        ("", "(empty)"),
    ],
)
def test_tokens_are_spelled_out(token: str, shown: str) -> None:
    assert token_text(token) == shown


def test_the_numbers_of_a_column_are_written_alike() -> None:
    own, near = Cell(2e-9, format=number), Cell(1.00123, format=near_one)
    rows = (("a", 9.48e-5, own), ("b", Cell(0.063), 0.5), ("c", None, 0.25), ("d", 0.0, near))
    table = Table((Column("name", words), Column("k3"), Column("other")), rows)
    shown = [[cell_text(cell, column) for cell, column in zip(row, table.columns, strict=True)]
             for row in table.cells()]  # fmt: skip
    assert [row[1] for row in shown] == ["0.000095", "0.0630", "–", "0"]
    assert [row[2] for row in shown] == ["< 0.0000001", "0.500", "0.250", "1.0012"]


def test_what_is_too_small_for_plain_digits_is_below_them() -> None:
    write = alike([2e-8, 0.5])
    assert (write(2e-8), write(-2e-8), write(2e-7)) == ("< 0.0000001", "> −0.0000001", "0.00000020")
    small = alike([2e-8, 5e-4])
    assert (small(2e-8), small(5e-4)) == ("2.00e-8", "5.00e-4")
    changes = alike([-2e-4, 0.5], signed)
    assert (changes(-2e-4), changes(0.5), changes(0.0)) == ("−0.000200", "+0.500", "0")
    assert changes(float("nan")) == signed(float("nan"))
