"""The twenty faults of benchmarks/sides.py: each changes what the trainer's model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.planted_sides import BEYOND, FAULTS, PARTS, in_trainer
from benchmarks.sides import Row
from mismatch.models import resolve_model

ROUNDING = 1e-3  # a second forward moves a logit by less; the smallest fault moves one by 0.06
IDS = (torch.arange(BEYOND + 44) * 7 % 900)[None]


def logits() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(resolve_model("tiny-gpt-oss"), dtype=torch.float32)
    return model, lambda: model(input_ids=IDS).logits


@pytest.mark.parametrize("name", [*FAULTS, *(f"half-{part}-1.05" for part in PARTS)])
def test_a_planted_fault_changes_the_logits(name: str) -> None:
    model, run = logits()
    with torch.no_grad():
        before = run()
        in_trainer(model, name)
        moved = (run() - before).abs().amax(-1)[0]
    assert moved.max() > ROUNDING
    if name == "rope-still-from-256":
        assert moved[: BEYOND + 1].max() < ROUNDING


@pytest.mark.parametrize(
    ("fault", "place", "side", "right"),
    [
        ("final-norm-1.02", "engine", "engine", True),
        ("final-norm-1.02", "engine", "trainer", False),
        ("final-norm-1.02", "trainer", "either", False),
        ("final-norm-1.02", "shared", "trainer", True),  # it holds other weights than the files
        ("rope-base+3%", "shared", "trainer", False),
        ("rope-base+3%", "shared", "either", True),
        ("rope-base+3%", "shared", "", False),
    ],
)
def test_a_side_counts_as_right_where_a_run_can_know_it(
    fault: str, place: str, side: str, right: bool
) -> None:
    row = Row(fault, place, "broken", 1, 9, 0.1, {}, (), "", side)
    assert row.right_side == right
