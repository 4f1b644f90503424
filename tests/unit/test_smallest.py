"""The search for the smallest fault that a check does not call healthy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planted_sides import FUNCTIONS, WEIGHTS
from benchmarks.sides import EMBEDDED
from benchmarks.smallest import (
    HALVES,
    START,
    STRENGTHS,
    Found,
    bounds,
    cell,
    changes_bf16,
    page,
    smallest,
)
from mismatch.models import resolve_model

LEAST = STRENGTHS[-1]
MODEL = Path(resolve_model(EMBEDDED))


@pytest.mark.parametrize("smallest_seen", STRENGTHS)
def test_the_search_ends_at_the_smallest_strength_that_is_seen(smallest_seen: float) -> None:
    asked: list[float] = []

    def broken(strength: float) -> bool:
        asked.append(strength)
        return strength >= smallest_seen

    assert smallest(broken, START, LEAST) == smallest_seen
    assert len(asked) == len(set(asked)) <= 6
    assert asked[0] == START


def test_a_search_does_not_go_below_what_is_a_fault_at_all() -> None:
    asked: list[float] = []
    assert smallest(lambda strength: not asked.append(strength), 0.1, 0.03) == 0.03  # type: ignore[func-returns-value]
    assert asked == [0.1, 0.03]


def test_a_fault_that_is_never_seen_has_no_smallest_strength() -> None:
    assert smallest(lambda strength: False, START, LEAST) is None
    row = Found("llama", "half-mlp", "engine", 0.004, 100)
    assert cell(row) == f"> {STRENGTHS[0]:g}"


@pytest.mark.parametrize("fault", ["expert-1.1", "k-bias-zeroed", *FUNCTIONS, HALVES[0]])
def test_the_least_share_of_a_fault_is_the_last_that_changes_a_weight(fault: str) -> None:
    start, least = bounds(fault, "engine", MODEL)
    assert LEAST <= least <= start <= STRENGTHS[0]
    if fault in WEIGHTS:
        assert changes_bf16(f"{fault}~{least:g}", MODEL)
        below = STRENGTHS[STRENGTHS.index(least) + 1 :]
        assert not any(changes_bf16(f"{fault}~{share:g}", MODEL) for share in below[:1])


def test_the_page_has_a_line_for_each_family_and_side_and_each_fault() -> None:
    found = Found("llama", "half-mlp", "trainer", 0.0041, 100, 0.001, "broken", 0.0042, 2e-5)
    other = Found("llama", "half-norm", "trainer", 0.0041, 100, 0.01, "tolerable", 0.0052, 2e-5)
    share = Found(EMBEDDED, "stale-2%", "engine", 0.004, 9, 0.03, "broken", 0.004, 2e-5, True)
    text = page([found, other, share], "now")
    (line,) = [line for line in text.splitlines() if line.startswith("| `llama` |")]
    assert line.strip("| ").split(" | ")[1:] == ["trainer", "0.01", "0.001"]
    assert "`stale-2%` 0.03\\* (engine)." in text
    both = page([share, replace(share, place="trainer")], "now")
    assert "`stale-2%` 0.03\\*." in both
    assert "2 of 3" in text
    assert text.count("TOLERABLE") == 1
