"""One family of benchmarks/families.py: trained, checked clean, and with a fault planted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.families import SMALL, Result, outcome, page, result, wrong
from benchmarks.families import Row as Family
from benchmarks.family_models import FAMILIES, trained
from benchmarks.planted_sides import MLP
from benchmarks.sides import CLEAN

HEALTHY = Result("healthy", nats=0.004, gap=4e-7, routing=0.01)
FOUND = Result("broken", 1, located=("vllm:prefill mlp [1]",))


@pytest.mark.grid
@pytest.mark.slow
def test_a_trained_model_agrees_and_a_planted_fault_is_located(tmp_path: Path) -> None:
    # ln 1024 is 6.9; a busy machine takes fewer steps in ten seconds.
    assert trained("qwen3_moe", tmp_path / "model", seconds=10) < 6.8
    assert trained("qwen3_moe", tmp_path / "model", seconds=10) < 6.8  # read again
    flags = ("--model", str(tmp_path / "model"), "--nproc-per-node", "1", *SMALL)
    clean = result(CLEAN, "", tmp_path, flags)
    assert not clean.error
    assert clean.verdict not in ("broken", "unfit")
    assert clean.gap is not None
    assert clean.gap < 1e-5
    assert clean.routing is not None
    fault = result(MLP, "engine", tmp_path, flags)
    assert (fault.verdict, fault.located) == ("broken", ("vllm:prefill mlp [1]",))


def test_a_fault_that_passes_or_a_clean_run_that_is_broken_fails_the_benchmark() -> None:
    def row(clean: Result, engine: Result, family: str = "llama") -> Family:
        return Family(family, 1.3, {CLEAN: clean, "engine": engine, "trainer": FOUND})

    assert not wrong(row(HEALTHY, FOUND))
    assert wrong(row(HEALTHY, Result("tolerable")))
    assert wrong(row(Result("broken"), FOUND))
    assert not wrong(row(Result("broken"), FOUND, "deepseek_v3"))
    text = page([row(HEALTHY, FOUND), Family("gpt2", 2.0, {CLEAN: Result(error="no")})], "today")
    (line,) = [line for line in text.splitlines() if "`llama`" in line]
    assert line.strip("| ").split(" | ") == [outcome(row(HEALTHY, FOUND)), "`llama` 4.0 (1.0%)"]
    assert line.startswith("| HEALTHY; BROKEN,")
    assert "- `gpt2`: no" in text


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_model_of_its_kind(family: str) -> None:
    from tests.families import configuration

    assert configuration(family, **FAMILIES[family]).model_type == family
