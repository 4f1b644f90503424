"""The faults of benchmarks/sides.py: each changes what the trainer's model computes."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.family_models import FAMILIES as CONFIGS
from benchmarks.planted_sides import (
    BEYOND,
    FAULTS,
    FUNCTIONS,
    NEEDS,
    PARTS,
    ROUNDINGS,
    WEIGHTS,
    change,
    in_trainer,
)
from benchmarks.sides import CLEAN, EMBEDDED, FAMILIES, SAID, Row, anatomy, lacked, page
from mismatch.models import resolve_model
from tests.families import tiny

ROUNDING = 1e-3  # a second forward moves a logit by less; the smallest fault moves one by 0.06
IDS = (torch.arange(BEYOND + 44) * 7 % 900)[None]
DENSE = {"experts", "biases", "sinks", "YaRN"}
LACKED = {  # by a family's model
    EMBEDDED: set(),
    "llama": DENSE | {"window"},
    "qwen3": DENSE | {"window"},
    "qwen3_moe": DENSE - {"experts"} | {"window"},
    "gemma3_text": DENSE,
    "mistral": DENSE,
    "deepseek_v3": DENSE - {"experts"} | {"window", "key heads"},
}


def logits() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(resolve_model(EMBEDDED), dtype=torch.float32)
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


@pytest.mark.parametrize("name", ROUNDINGS)
def test_a_private_precision_is_right_in_float32_and_wrong_below(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    model = tiny("olmoe").eval()
    model.set_attn_implementation("sdpa")
    low = deepcopy(model).to(torch.bfloat16)
    ids = IDS[:, :64] % model.config.vocab_size
    with torch.no_grad():
        before, rounded = (each(input_ids=ids).logits for each in (model, low))
        in_trainer(model, name)
        torch.testing.assert_close(model(input_ids=ids).logits, before, atol=1e-4, rtol=1e-4)
        in_trainer(low, name)
        assert not torch.equal(low(input_ids=ids).logits, rounded)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_a_family_gets_the_faults_that_it_can_have(family: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from tests.families import configuration

    torch.manual_seed(0)
    sizes = {"vocab_size": 1024, "initializer_range": 0.2}
    config = configuration(family, **sizes, **CONFIGS[family])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    about = anatomy(tmp_path)
    assert {lacked(fault, about) for fault in FAULTS} - {""} == LACKED[family]
    for fault in (fault for fault in FAULTS if not lacked(fault, about)):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        with torch.no_grad():
            before = model(input_ids=IDS).logits
            in_trainer(model, fault)
            moved = (model(input_ids=IDS).logits - before).abs().max()
        assert moved > (1e-5 if fault == "epsilon-x10" else ROUNDING), fault
        if fault in WEIGHTS:  # as an engine reads them
            state = load_file(tmp_path / "model.safetensors")
            kept = {name: tensor.clone() for name, tensor in state.items()}
            change(state, fault)
            assert any(not torch.equal(state[name], kept[name]) for name in kept), fault


@pytest.mark.parametrize("name", ["expert-1.1", "layers-exchanged", *FUNCTIONS[:-1]])
def test_a_share_of_a_fault_moves_logits_by_about_that_share(name: str) -> None:
    moved = {}
    for share in ("", "~0.1"):
        model, run = logits()
        with torch.no_grad():
            before = run()
            in_trainer(model, f"{name}{share}")
            moved[share] = float((run() - before).abs().mean())
    assert 0.02 < moved["~0.1"] / moved[""] < 0.5, moved


def test_the_embedded_model_can_have_every_fault() -> None:
    about = anatomy(Path(resolve_model(EMBEDDED)))
    assert not any(lacked(fault, about) for fault in NEEDS)


def test_the_page_counts_faults_and_tells_those_that_are_not_broken() -> None:
    rows = [
        Row(CLEAN, "", "healthy", 0, 9, 0.004, {"vllm:fp32": 2e-7}, (), "", "", "llama"),
        Row("stale-2%", "engine", "broken", 1, 9, 0.1, {"a": 0.02}, (), "", "engine", "llama"),
        Row("stale-2%", "trainer", "tolerable", 0, 9, 0.1, {"a": 0.01}, (), "", "", "llama"),
    ]
    text = page(rows, {"llama": ["experts", "sinks"]}, "today")
    told = {
        line.split("`")[1]: line.strip("| ").split(" | ")
        for line in text.splitlines()
        if line.startswith("| `")
    }
    assert told["llama"][1:] == ["HEALTHY", "1/1", "0/1", "–", "experts, sinks"]
    assert "`stale-2%` 0.01." in text
    (line,) = [line for line in text.splitlines() if line.startswith("- ")]
    assert {"`llama`,", "`stale-2%`,", "trainer:", "TOLERABLE"} <= set(line.split())
    assert SAID.format(n=1, all=2) in text


@pytest.mark.parametrize(
    ("fault", "place", "side", "right"),
    [
        ("final-norm-1.02", "engine", "engine", True),
        ("final-norm-1.02", "engine", "trainer", False),
        ("final-norm-1.02", "engine", "either", False),
        ("epsilon-x10", "engine", "either", True),
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
