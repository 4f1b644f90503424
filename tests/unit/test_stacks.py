"""The table of stacks, and the page that is made of what was measured."""

import json
from pathlib import Path

import pytest

from tools.stacks import MODELS, Stack, page, stacks

HEALTHY = {
    "verdict": "healthy",
    "mean_abs_delta": 0.00312,
    "causes": [],
    "not_tested": ["exact KL"],
    "versions": {"vllm": "0.28.0", "torch": "2.13.0+cpu", "transformers": "5.10.4"},
    "date": "2026-11-24",
}


def test_every_stack_has_a_name_and_a_folder_of_its_own() -> None:
    rows = stacks()
    assert len({stack.folder for stack in rows}) == len({stack.name for stack in rows}) == len(rows)
    assert {stack.scorer for stack in rows} == {"fsdp", "verl", "trl"}


@pytest.mark.parametrize(
    ("found", "cells"),
    [
        (HEALTHY, ("healthy, 0.0031", "–")),
        (
            HEALTHY | {"verdict": "broken", "causes": ["packing-leak"]},
            ("broken (packing-leak), 0.0031",),
        ),
        ({"refused": "cannot load", "date": "2026-11-24"}, ("none: cannot load",)),
    ],
)
def test_the_page_has_a_row_for_what_was_measured_alone(
    tmp_path: Path, found: dict[str, object], cells: tuple[str, ...]
) -> None:
    measured, other = Stack("A 1", vllm="0.28.0"), Stack("B 2")
    (tmp_path / "results" / measured.folder).mkdir(parents=True)
    (tmp_path / "results" / measured.folder / f"{MODELS[0]}.json").write_text(json.dumps(found))
    text = page([measured, other], tmp_path)
    assert ("code: exact KL." in text) == ("not_tested" in found)
    (row,) = [line for line in text.splitlines() if "| 2026" in line]
    shown = [cell.strip() for cell in row.strip("|").split("|")]
    assert shown[:2] == ["A 1", "0.28.0"]
    assert set(cells) <= set(shown)
