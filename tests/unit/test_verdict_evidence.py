"""Missing evidence is never health: what was not seen, not long enough, or only suspected."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch.analysis.levels import DEQUANTISED, NOT_QUANTISED, column_for
from mismatch.analysis.square import precision_of
from mismatch.reports.sections.headline import lead
from mismatch.types import ROUTES, Rollout, Sampling
from tests.diagnosed import causes, healthy, stating
from tests.invented_run import likely, noise, report_of, sampled, saved, serious


def entropy_of(rollout: Rollout, nats: float) -> dict[str, Any]:
    return {"entropy": np.full(rollout.n_actions, nats)}


def test_a_suspected_cause_is_not_healthy(tmp_path: Path) -> None:
    rollout = sampled()
    exact = likely(rollout)
    passes = {"reference:fp32": exact}
    left, sound = exact + noise(rollout, 0.004, 3), exact + noise(rollout, 0.004, 4)
    clean = report_of(saved(tmp_path / "a", rollout, left, sound, passes))
    assert "causes" not in serious(clean)
    far = exact + noise(rollout, 0.008, 5)
    report = report_of(saved(tmp_path / "b", rollout, left, far, passes))
    assert [cause.id for cause in report.result("causes").ranked] == ["side-off"]
    assert report.verdict.correctness is not None
    assert report.verdict.fitness is not None
    assert report.verdict.fitness.status == "healthy"
    assert "causes" in serious(report)
    assert report.verdict.correctness.status != "healthy"


@pytest.mark.parametrize(("nats", "status"), [(0.008, "inconclusive"), (0.3, "healthy")])
def test_a_nearly_deterministic_policy_says_nothing_of_training(
    nats: float, status: str, tmp_path: Path
) -> None:
    rollout = sampled()
    left = likely(rollout)
    right = left + noise(rollout, 0.001)
    report = report_of(saved(tmp_path / "a", rollout, left, right, two=entropy_of(rollout, nats)))
    assert report.verdict.fitness is not None
    assert report.verdict.fitness.status == status
    assert ("policy-entropy" in report.verdict.reason) is False
    assert report.verdict.correctness is not None
    assert "policy-entropy" not in report.verdict.correctness.reason


@pytest.mark.parametrize(("planned", "judged"), [(60, True), (240, True), (241, False)])
def test_sequence_weights_are_judged_from_a_quarter_of_the_planned_length_on(
    planned: int, judged: bool, tmp_path: Path
) -> None:
    rollout = sampled(sampling=Sampling(max_tokens=planned, samples_per_prompt=4))
    left = likely(rollout)
    report = report_of(saved(tmp_path / "a", rollout, left, left + noise(rollout, 0.001)))
    metrics = {each.metric for each in report.verdict.judgements}
    assert ("ess_seq" in metrics) is judged
    untested = {entry.what for entry in report.not_tested}
    assert (f"sequence weights at {planned} tokens" in untested) is not judged
    assert "positions beyond 63" in untested  # whatever else was measured


@pytest.mark.parametrize("side", ["engine", "trainer"])
@pytest.mark.parametrize("said", ["captured", "not asked for", "failed: no memory", None])
def test_a_moe_model_without_routes_always_has_a_reason(
    side: str, said: str | None, tmp_path: Path
) -> None:
    rollout = sampled()
    left = likely(rollout)
    facts = {"engine": {}, "trainer": {} if said is None else {"routing": said}}
    facts[side]["moe"] = True
    report = report_of(saved(tmp_path / "a", rollout, left, left + noise(rollout, 0.001), **facts))
    assert [entry.reason for entry in report.not_tested if entry.what == ROUTES]


def test_quantisations_go_by_the_names_that_vllm_gives_them() -> None:
    """Its own list, read without importing it: "gpt_oss_mxfp4" is what ModelConfig says."""
    for name in DEQUANTISED:
        engine = {"dtype": "bf16", "quantization": name, "moe": True}
        assert column_for(engine, {"dtype": "bf16", "moe": True}) == "bf16 MoE"
        assert precision_of(engine) == "bf16"
        named = causes(stating(healthy(0), engine, {})).ranked
        assert named == ()
    assert precision_of({"dtype": "bf16", "quantization": "fp8"}) is None
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("engine: vllm is not installed")
    source = Path(found.origin).parent / "model_executor/layers/quantization/__init__.py"
    words = {node.value for node in ast.walk(ast.parse(source.read_text("utf-8")))
             if isinstance(node, ast.Constant)}  # fmt: skip
    assert words >= DEQUANTISED
    assert not words & (NOT_QUANTISED - {None, "", "auto", "none"})


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({"sliding_window": 0}, "sliding-window"),
        ({"max_num_batched_tokens": 0}, "chunked-prefill"),
        ({"block_size": 0}, "kv-block"),
        ({"config": {"rope_scaling": {"original_max_position_embeddings": 0}}}, "rope-config"),
    ],
)
def test_what_no_token_reached_is_not_ruled_out(facts: dict[str, Any], cause: str) -> None:
    def at(length: int) -> dict[str, Any]:
        if "config" not in facts:
            return dict.fromkeys(facts, length)
        return {"config": {"rope_scaling": {"original_max_position_embeddings": length}}}

    def ruled_out(length: int | None) -> bool:
        stated = {} if length is None else at(length)
        result = causes(stating(healthy(0, length=60), stated, stated))
        assert result.ranked == ()
        return cause in {id for entry in result.ruled_out for id in entry.causes}

    assert ruled_out(32)
    assert not ruled_out(4096)
    if cause != "kv-block":  # blocks of many lengths are tried where none is stated
        assert not ruled_out(None)


def test_the_headline_of_a_run_whose_weights_differ_is_the_list(tmp_path: Path) -> None:
    rollout = sampled()
    left = likely(rollout)
    held = {f"layers.{n}.k_proj.bias": [n, 1, 2] for n in range(4)}
    other = {name: [9, *digest] for name, digest in held.items()}
    folder = saved(
        tmp_path / "a", rollout, left, left + noise(rollout, 0.01),
        engine={"weights": held | {"norm": [1]}}, trainer={"weights": other | {"norm": [1]}},
    )  # fmt: skip
    report = report_of(folder)
    assert report.verdict.status == "broken"
    assert "layers.*.k_proj.bias" in lead(report)
    leading = report.result("causes").ranked[0]
    assert (leading.side, replace(leading, effect=None).fact) == ("either", True)
