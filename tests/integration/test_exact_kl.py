"""Exact KL through real engines and a real FSDP2 world: what a user reads in a report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mismatch.codec import to_json
from mismatch.run import store
from mismatch.types import EXACT_KL, NotTested
from tests.checkpoints import make

from .conftest import TINY_RUN, Run, run_check

pytestmark = pytest.mark.slow
LARGE = 5000  # entries of a vocabulary that is not kept whole


def metric(run: Run, name: str) -> dict:
    return run.headline["metrics"][name]


@pytest.mark.grid
def test_in_fp32_nothing_is_left(fp32_run: Run) -> None:
    assert 0 <= run_value(fp32_run, "exact_kl") < 1e-9
    assert run_value(fp32_run, "exact_argmax_agree") > 0.99
    assert fp32_run.checks["exact-kl"] == "passed"


def run_value(run: Run, name: str) -> float:
    return metric(run, name)["value"]


def test_in_bf16_it_agrees_with_what_the_tokens_say(default_run: Run) -> None:
    exact, k3 = metric(default_run, "exact_kl"), metric(default_run, "k3_kl")
    assert exact["n_tokens"] == 512
    assert exact["low"] > 1e-6
    # Other tokens, so two intervals; they speak of one number.
    assert exact["low"] < k3["high"]
    assert k3["low"] < exact["high"]
    assert exact["high"] - exact["low"] < 2 * (k3["high"] - k3["low"])
    assert default_run.checks["exact-kl"] == "passed"
    page = (default_run.directory / "report.html").read_text()
    assert '<details id="exact">' in page
    assert "exact KL: " in page


def test_the_trainer_repeats_itself_exactly(default_run: Run) -> None:
    floor = {pair["id"]: pair["metrics"] for pair in default_run.report["noise_floor"]}
    values = {name: pair["exact_kl"]["value"] for name, pair in floor.items() if "exact_kl" in pair}
    assert values["fsdp / fsdp:grad"] < 1e-3 * run_value(default_run, "exact_kl")
    assert values["fsdp / reference:fp32"] > 0


def test_every_side_holds_the_same_positions(default_run: Run) -> None:
    names = ("vllm:decode", "fsdp", "reference:fp32")
    sides = [store.load_distributions(default_run.directory, name) for name in names]
    assert all(side.whole and side.vocabulary == 1024 for side in sides)
    assert all(np.array_equal(side.positions, sides[0].positions) for side in sides)
    rollout = store.load_rollout(default_run.directory)
    sequences = rollout.sequence_of_token[rollout.actions[sides[0].positions]]
    assert len(np.unique(rollout.prompt_index[sequences])) > 13  # of 16


def test_the_trainers_rows_are_those_that_it_scored(default_run: Run) -> None:
    for name in ("fsdp", "reference:fp32"):
        scoring = store.load_scoring(default_run.directory, name)
        whole = scoring.distributions
        column = whole.column(scoring.token_ids[whole.positions])
        given = whole.law()[np.arange(len(column)), column]
        np.testing.assert_allclose(given, scoring.logprobs[whole.positions], atol=1e-5)


@pytest.mark.grid
def test_a_tempered_law_is_compared_as_such(tempered_run: Run) -> None:
    assert tempered_run.checks["exact-kl"] == "passed"
    assert 0 < run_value(tempered_run, "exact_kl") < 0.01


@pytest.mark.grid
def test_a_large_vocabulary_gives_a_lower_bound(tmp_path: Path) -> None:
    model = make("qwen3", tmp_path / "model", vocab_size=LARGE)
    ids = np.random.default_rng(0).integers(3, LARGE, (6, 8)).tolist()
    lines = [json.dumps({"prompt_token_ids": prompt}) for prompt in ids]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    flags = ("--model", str(model), "--engine", "transformers")
    flags += ("--prompts", str(tmp_path / "prompts.jsonl"))
    small = ("--max-tokens", "24", "--no-noise-floor", "--nproc-per-node", "2", "--no-prefill")
    top = ("--exact-kl", "100", "--exact-kl-top-k", "32")
    run = run_check(tmp_path / "run", *flags, *small, *top)
    assert run.code == 1, run.output
    assert "exact_kl" not in run.headline["metrics"]
    assert metric(run, "exact_kl_topk")["n_tokens"] == 100
    assert 0 < run_value(run, "exact_kl_topk") < 0.1
    sides = [store.load_distributions(run.directory, n) for n in ("transformers:decode", "fsdp")]
    assert sides[0].ids.shape == (100, 32)
    assert np.array_equal(sides[0].ids, sides[1].ids)
    assert run.checks["exact-kl"] == "passed"
    assert "a lower bound" in (run.directory / "report.html").read_text()


@pytest.mark.grid
def test_switched_off_it_is_named(tmp_path: Path) -> None:
    off = ("--exact-kl", "0", "--no-noise-floor", "--no-prefill")
    run = run_check(tmp_path / "run", *TINY_RUN, *off)
    assert "exact_kl" not in run.headline["metrics"]
    assert not (run.directory / "dists").exists()
    assert to_json(NotTested(EXACT_KL, "switched off")) in run.report["not_tested"]


@pytest.mark.grid
def test_lost_distributions_are_made_again(tiny_run: Path, tmp_path: Path) -> None:
    """A run that was killed before they were whole: only that scoring is made again."""
    run = shutil.copytree(tiny_run, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in run.glob("dists/*")}
    (run / "dists" / "fsdp.safetensors").unlink()
    (run / "report.json").unlink()
    from .test_stages import mismatch

    output = mismatch("check", "--resume", run, cwd=tmp_path)
    assert "1 pass" in output
    assert {path.name: path.read_bytes() for path in run.glob("dists/*")} == before
    old, new = (json.loads((r / "report.json").read_text()) for r in (tiny_run, run))
    assert old["comparisons"] == new["comparisons"]
