"""The section of `mismatch locate`."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from mismatch.features.locate.errors import site_errors
from mismatch.features.locate.results import Group, Location
from mismatch.features.locate.section import section
from mismatch.reports.terminal import print_section
from tests.unit.test_locate import chain, location

FIRST, SECOND = Group("mlp", (1,), 50.0, 0.9, 0.95), Group("final_norm", (), 9.0, 0.1, 0.05)


def located() -> Location:
    result = location(FIRST, SECOND)
    sites = tuple(site_errors(chain({"1.mlp": 0.3}), chain({}), "bf16"))
    side = replace(result.sides[0], sites=sites, explained=0.93)
    return replace(result, sides=(side,))


def test_the_source_comes_first_with_its_share() -> None:
    shown = section(located())
    (table,) = shown.tables
    rows = table.cells()
    assert rows[0][0].value == "fsdp"
    assert rows[0][3].value == FIRST.explains
    assert rows[0][1].tone == "critical"
    assert not rows[1][1].tone
    sources = [row for row in shown.parts[0].tables[0].cells() if row[-1].tone == "critical"]
    assert [row[0].value for row in sources] == ["1"]


def test_a_clean_side_has_no_row_and_says_its_distance() -> None:
    shown = section(location())
    assert shown.tables == ()
    assert "0.01" in shown.sentences[0]


def test_what_was_not_tested_is_shown() -> None:
    assert any("sglang" in note for note in section(located()).notes)


def test_the_terminal_prints_it() -> None:
    output = io.StringIO()
    print_section(section(located()), Console(file=output, width=80), details=True)
    assert "layer 1" in output.getvalue()
