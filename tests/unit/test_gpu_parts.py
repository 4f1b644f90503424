"""What `make test-gpu` asks of a GPU: its model, its judgement and its comparison, without one."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu_gpt_oss import offline_hub
from benchmarks.gpu_parts import (
    MARLIN,
    VARIANTS,
    WIDE,
    equal_choices,
    fault_of,
    released,
    same_routes,
    whole_check,
    whole_checks,
)
from mismatch.models import resolve_model
from mismatch.models.config import find_config
from mismatch.models.derived import is_mxfp4
from mismatch.types import Routing
from tests.checkpoints import rollout

TINY = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 8}


def test_the_model_has_two_layers_of_the_published_width(tmp_path: Path) -> None:
    published = find_config(resolve_model("gpt-oss-20b")).values
    assert {name: published[name] for name in WIDE} == WIDE
    made = released(tmp_path / "model", torch.device("cpu"), **TINY)
    assert is_mxfp4(made)
    assert len(list(made.glob("*.safetensors"))) == 3
    model = find_config(str(made)).model
    assert (model.layers, model.top_k, model.family) == (2, 4, "gpt_oss")


def test_the_hub_is_played_by_a_folder(tmp_path: Path) -> None:
    """``mismatch check --model gpt-oss-20b`` finds it without a network."""
    made = offline_hub(tmp_path, TINY)
    script = "from mismatch.models.config import find_config as f; print(f('openai/gpt-oss-20b'))"
    offline = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    python = [sys.executable, "-c", script]
    done = subprocess.run(python, env=offline, capture_output=True, text=True)
    assert "the hub's cache" in done.stdout, done
    assert str(made) in done.stdout


def left(place: Path, *missing: str, quick: bool = False, routes: bool = True) -> Path:
    place.mkdir()
    report = {
        "not_tested": [{"what": what, "reason": "why"} for what in missing],
        "run": {"spec": {"quick": quick}},
    }
    (place / "report.json").write_text(json.dumps(report))
    if routes:
        (place / "routing").mkdir()
        (place / "routing" / "vllm-decode.safetensors").touch()
    return place


def test_what_a_check_on_a_gpu_must_not_say(tmp_path: Path) -> None:
    usual = ("sharding", "weight syncs", "positions beyond 511", "several turns")
    usual += ("the same tokens from the same seed",)  # as a check on an H200 said
    assert fault_of(left(tmp_path / "good", *usual)) == ""
    assert "routes" in fault_of(left(tmp_path / "routes", *usual, routes=False))
    assert "weights loaded" in fault_of(left(tmp_path / "digests", *usual, "weights loaded"))
    square = "rounding or fault (the square)"
    assert fault_of(left(tmp_path / "quick", square, quick=True)) == ""
    assert "noise floor" in fault_of(left(tmp_path / "whole", "noise floor"))


def test_choices_are_compared_on_the_prompts_alone() -> None:
    """What was sampled behind them differs between kernels."""
    sampled = rollout()
    draw = np.random.default_rng(0)
    ids = draw.integers(0, 8, (len(sampled.token_ids), 2, 2)).astype(np.uint8)
    present = np.ones(len(ids), bool)

    def routing(changed: np.ndarray) -> Routing:
        return Routing((0, 1), 8, changed, present)

    other = ids[:, :, ::-1].copy()  # the order of a token's experts says nothing
    other[sampled.action_mask] += 8
    assert equal_choices((sampled, routing(ids)), (sampled, routing(other))) == [1.0, 1.0]
    prompt = np.flatnonzero(~sampled.action_mask)
    other[prompt[: len(prompt) // 2], 1] += 8
    first, second = equal_choices((sampled, routing(ids)), (sampled, routing(other)))
    assert first == 1.0
    assert 0.3 < second < 0.7


def test_a_check_that_ends_early_tells_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its standard output ends with the last progress line."""
    told = "error: vLLM cannot load it\n  fix: install something\n"
    ended = subprocess.CompletedProcess([], 2, "[1/3] rollout: starting\n", told)
    monkeypatch.setattr("benchmarks.gpu_parts.subprocess.run", lambda *_args, **_more: ended)
    with pytest.raises(AssertionError) as raised:
        whole_check(lambda: tmp_path, tmp_path / "out", ())
    assert str(raised.value).startswith("error: vLLM cannot")


def test_a_check_that_ends_well_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.CompletedProcess([], 0, "verdict: HEALTHY\n", "")
    monkeypatch.setattr("benchmarks.gpu_parts.subprocess.run", lambda *_args, **_more: ended)
    assert whole_check(lambda: tmp_path, left(tmp_path / "good"), ()) == "verdict: HEALTHY"
    with pytest.raises(AssertionError, match="no routes"):
        whole_check(lambda: tmp_path, left(tmp_path / "bad", routes=False), ())


def test_without_a_gpu_every_check_is_not_run(tmp_path: Path) -> None:
    answers = list(whole_checks(torch.device("cpu")))
    assert len(answers) == len(VARIANTS) + 1
    assert {answer.state for answer in answers} == {"not run"}
    assert callable(same_routes)


def test_vllm_knows_the_kernel_that_others_are_compared_with() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("engine: vllm is not installed")
    source = Path(found.origin).parent / "config" / "kernel.py"
    words = {node.value for node in ast.walk(ast.parse(source.read_text("utf-8")))
             if isinstance(node, ast.Constant)}  # fmt: skip
    assert MARLIN.partition("=")[2] in words
