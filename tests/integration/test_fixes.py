"""Fixes measured for real: what is broken on purpose is mended first, and a healthy run claims
nothing that it has not.

vLLM's tokens are sampled once where that is possible: runs of other tests are copied and resumed
with ``--fix``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import SMALL, Run, run_check

pytestmark = pytest.mark.slow
ABS, K3 = "logprob_abs_diff_mean", "k3_kl"
Rows = dict[str, dict[str, Any]]


def resumed(source: Path, target: Path, *flags: str, train: dict[str, Any] | None = None) -> Run:
    """A copy of a run, with other settings of the trainer, gone on with."""
    shutil.copytree(source, target)
    spec = json.loads((target / "spec.json").read_text())
    spec["train"] |= train or {}
    (target / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "mismatch", "check", "--resume", str(target), *flags]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500
    )
    return Run(target, done.returncode, done.stdout)


def rows(run: Run) -> Rows:
    return {row["id"]: row for row in run.report["fixes"]}


def ratio(row: dict[str, Any], metric: str) -> float:
    """How many times smaller a metric is with the fix."""
    return row["before"][metric]["value"] / row["after"][metric]["value"]


def excludes_zero(estimate: dict[str, Any]) -> bool:
    return estimate["low"] > 0 or estimate["high"] < 0


# ---------------------------------------------------------------- a trainer without sinks


@pytest.fixture(scope="module")
def without_sinks(no_sinks_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    target = tmp_path_factory.mktemp("fixes") / "no-sinks"
    fixes = "attention-sinks,router-replay=ids,batch-invariant,tis"
    flags = ("--fix", fixes, "--verdict", "after-fixes")
    run = resumed(no_sinks_run.directory, target, *flags)
    run.require_judged()
    return run


def test_attention_sinks_come_first_where_they_are_missing(without_sinks: Run) -> None:
    best = without_sinks.report["fixes"][0]
    assert best["id"].partition("+")[0] == "attention-sinks"
    row = rows(without_sinks)["attention-sinks"]
    assert row["outcome"] == "better"
    assert ratio(row, ABS) >= 10
    assert row["paired"] is not None
    assert excludes_zero(row["paired"])
    assert row["difference"] is None
    assert without_sinks.report["fix_trials"]["best"] == "attention-sinks"


def test_the_fix_that_was_measured_confirms_its_cause(without_sinks: Run) -> None:
    """Replayed routes go with a good part of the mismatch too, and confirm nothing."""
    report = without_sinks.report
    first = report["causes"]["ranked"][0]
    assert (first["id"], first["status"], first["side"]) == (
        "attention-sinks", "confirmed", "trainer",
    )  # fmt: skip
    removed = rows(without_sinks)["attention-sinks"]["removed"][ABS]
    assert first["effect"]["value"] == pytest.approx(removed["value"], abs=1e-6)
    assert f"share removed by {first['id']}" in {item["what"] for item in first["evidence"]}
    assert report["explain"]["confirmed"] == ["attention-sinks"]


def test_replaying_routes_does_not_mend_a_missing_sink(without_sinks: Run) -> None:
    trials = rows(without_sinks)
    replayed = trials["router-replay=ids"]
    assert ratio(replayed, ABS) < 4
    assert replayed["after"][ABS]["value"] > 10 * trials["attention-sinks"]["after"][ABS]["value"]
    assert replayed["verdict_after"]["status"] in ("broken", "unfit")
    assert "routing_disagree_layer" not in replayed["after"]  # 0 by construction is no measurement


def test_what_cannot_run_here_is_refused_and_estimators_are_not_run(without_sinks: Run) -> None:
    refused = rows(without_sinks)["batch-invariant"]
    assert refused["applies"] is False
    assert "GPU" in refused["reason"]
    assert [each["id"] for each in without_sinks.report["fix_trials"]["estimators"]] == ["tis"]
    assert "tis" not in rows(without_sinks)


@pytest.mark.grid
def test_all_says_of_every_fix_what_became_of_it(no_sinks_run: Run, tmp_path: Path) -> None:
    from mismatch.experiments.fixes.catalogue import FIXES

    run = resumed(no_sinks_run.directory, tmp_path / "run", "--fix", "all", "--budget-minutes", "1")
    left = {text.partition(":")[0] for text in run.report["fix_trials"]["left_out"]}
    named = {name.partition("=")[0] for name in {*rows(run), *left}}
    assert {fix.id for fix in FIXES if fix.side != "estimator"} <= named
    listed = {estimator["id"] for estimator in run.report["fix_trials"]["estimators"]}
    assert listed == {fix.id for fix in FIXES if fix.side == "estimator"}
    assert not listed & rows(run).keys()


def test_the_plan_is_said_before_anything_runs(without_sinks: Run) -> None:
    text = without_sinks.output
    assert 0 <= text.index("variants to measure") < text.index("score: FSDP2")


def test_the_verdict_after_fixes_decides_the_exit_code(
    without_sinks: Run, no_sinks_run: Run
) -> None:
    assert no_sinks_run.code == 1
    assert without_sinks.code == without_sinks.report["headline"]["exit_code"]
    report = without_sinks.report
    assert report["verdict"]["status"] not in ("broken", "unfit")
    assert report["verdict"]["reason"].startswith("after attention-sinks")
    assert report["fix_trials"]["verdict_as_is"]["status"] == "broken"


@pytest.mark.grid
def test_resuming_makes_nothing_again(without_sinks: Run, tmp_path: Path) -> None:
    again = resumed(without_sinks.directory, tmp_path / "again", "--fix", "train")
    assert again.code == 1, again.output  # as it is: without --verdict after-fixes
    scores = list(without_sinks.directory.rglob("scores/*.parquet"))
    assert scores
    for source in scores:  # on a busy machine the budget ends early, and this run makes the rest
        path = again.directory / source.relative_to(without_sinks.directory)
        assert path.stat().st_mtime_ns == source.stat().st_mtime_ns, path.name
    assert (
        rows(again)["attention-sinks"]["after"] == rows(without_sinks)["attention-sinks"]["after"]
    )


# ---------------------------------------------------------------- a healthy run


@pytest.fixture(scope="module")
def healthy(no_sinks_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    target = tmp_path_factory.mktemp("fixes") / "healthy"
    fixes = (
        "fp32+engine-fp32,engine-fp32,fp32,fp32-lm-head,fp32-router,micro-batch,expert-memory,"
        "experts-implementation"
    )
    run = resumed(no_sinks_run.directory, target, "--fix", fixes, train={"attention": "auto"})
    run.require_judged()
    return run


@pytest.mark.grid
def test_float32_on_both_sides_wins_by_orders_of_magnitude(healthy: Run) -> None:
    best = healthy.report["fixes"][0]
    assert best["id"] == "fp32+engine-fp32"
    assert best["outcome"] == "better"
    assert best["difference"] is not None
    assert best["paired"] is None
    assert ratio(best, K3) > 100
    assert ratio(best, ABS) > 10
    assert rows(healthy)["engine-fp32"]["cost"]["seconds"] > 1


@pytest.mark.grid
def test_a_healthy_run_claims_nothing_that_it_has_not(healthy: Run) -> None:
    trials = rows(healthy)
    for row in trials.values():
        if row["significant"]:
            least = min(row["p_values"], key=row["p_values"].get)
            assert row["p_values"][least] <= 0.05
            assert excludes_zero(row["changes"][least]), row["id"]
    for name in ("micro-batch=1024", "expert-memory", "experts-implementation=eager"):
        assert trials[name]["outcome"] in ("none", "negligible"), name
    assert healthy.report["causes"]["ranked"] == []
    assert "explain" not in healthy.report


# ---------------------------------------------------------------- a quantised KV cache


@pytest.mark.skipif(
    "avx512" not in Path("/proc/cpuinfo").read_text()
    and "amx" not in Path("/proc/cpuinfo").read_text(),
    reason="machine: vLLM's fp8 KV cache on a CPU needs AVX-512 or AMX",
)
@pytest.mark.grid
def test_a_quantised_kv_cache_is_found(tmp_path: Path) -> None:
    run = run_check(
        tmp_path / "run",
        *(*SMALL, "--engine-arg", "kv_cache_dtype=fp8"),
        *("--fix", "bf16-kv-cache,fp32,fp32-lm-head,router-replay"),
    )
    run.require_judged()
    best = run.report["fixes"][0]
    assert (best["id"], best["outcome"]) == ("bf16-kv-cache", "better")
    assert best["difference"] is not None
    assert ratio(best, ABS) > 2
    assert ratio(rows(run)["fp32"], ABS) < 1.5
    first = run.report["causes"]["ranked"][0]
    assert (first["id"], first["status"], first["side"]) == ("fp8-kv", "confirmed", "engine")


# ---------------------------------------------------------------- a temperature on one side


@pytest.mark.grid
def test_raw_logprobs_at_another_temperature_are_mended_by_their_meaning(
    raw_run: Run, tmp_path: Path
) -> None:
    run = resumed(
        raw_run.directory,
        tmp_path / "run",
        "--fix",
        "processed-logprobs,fp32,fp32-lm-head,tis",
        "--trust-run",
    )
    assert run.code == 1, run.output  # fixes are tried, the verdict stays
    best = run.report["fixes"][0]
    assert (best["id"], best["outcome"]) == ("processed-logprobs", "better")
    assert ratio(best, ABS) > 5
    assert 1e-4 < best["after"][ABS]["value"] < 0.02  # rounding to bf16 remains
    assert best["verdict_after"]["fitness"]["status"] in ("healthy", "tolerable")
    assert rows(run)["fp32"]["outcome"] in ("none", "negligible")
    first = run.report["causes"]["ranked"][0]
    assert (first["id"], first["status"]) == ("temperature-semantics", "confirmed")
    assert [estimator["id"] for estimator in run.report["fix_trials"]["estimators"]] == ["tis"]


# ---------------------------------------------------------------- fixes that fail


@pytest.mark.grid
def test_a_fix_that_cannot_run_leaves_the_others_alone(tiny_run: Path, tmp_path: Path) -> None:
    fixes = "experts-implementation=nonsense,fp32-lm-head,micro-batch=64"
    run = resumed(tiny_run, tmp_path / "run", "--fix", fixes)
    run.require_judged()
    trials = rows(run)
    failed = trials["experts-implementation=nonsense"]
    assert failed["applies"] is True
    assert "nonsense" in failed["reason"]
    assert failed["after"] in ({}, None)
    for name in ("fp32-lm-head", "micro-batch=64"):
        assert trials[name]["after"], trials[name]
        assert trials[name]["cost"]["seconds"] > 0
        assert trials[name]["outcome"] == "none"  # four prompts cannot tell anything


@pytest.mark.grid
def test_an_experiment_confirms_the_missing_sinks(without_sinks: Run, tmp_path: Path) -> None:
    """The pass with sinks is there: --explain makes only what is missing beside it."""
    run = resumed(without_sinks.directory, tmp_path / "explained", "--explain")
    run.require_judged()
    explained = run.report["explain"]
    assert explained["confirmed"] == ["attention-sinks"]
    first = run.report["causes"]["ranked"][0]
    assert (first["id"], first["status"], first["side"]) == (
        "attention-sinks", "confirmed", "trainer",
    )  # fmt: skip
    experiments = {experiment["id"]: experiment for experiment in explained["experiments"]}
    assert len(experiments) == len(explained["experiments"])
    assert experiments["attention-sinks"]["gone"]["low"] > 0.9
    assert explained["seconds"] > 0
