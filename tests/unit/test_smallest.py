"""The search for the smallest fault that a check does not call healthy."""

from __future__ import annotations

import pytest

from benchmarks.smallest import START, STRENGTHS, Found, cell, page, smallest


@pytest.mark.parametrize("least", STRENGTHS)
def test_the_search_ends_at_the_smallest_strength_that_is_seen(least: float) -> None:
    asked: list[float] = []

    def broken(strength: float) -> bool:
        asked.append(strength)
        return strength >= least

    assert smallest(broken) == least
    assert len(asked) == len(set(asked)) <= 6
    assert asked[0] == START


def test_a_fault_that_is_never_seen_has_no_smallest_strength() -> None:
    assert smallest(lambda strength: False) is None
    row = Found("llama", "mlp", "engine", 0.004, 100)
    assert cell(row) == f"> {STRENGTHS[0]}"


def test_the_page_has_a_line_for_each_family_and_side() -> None:
    found = Found("llama", "mlp", "trainer", 0.0041, 100, 0.001, "broken", 0.0042, 2e-5)
    other = Found("llama", "norm", "trainer", 0.0041, 100, 0.01, "tolerable", 0.0052, 2e-5)
    (line,) = [line for line in page([found, other], "now").splitlines() if "`llama` |" in line]
    assert line.strip("| ").split(" | ")[1:] == ["trainer", "0.01", "0.001"]
    assert "27%" in page([found, other], "now")
    assert page([found, other], "now").count("TOLERABLE") == 1
