"""What others published of working and broken stacks, judged as an expert would judge it.

Noise gets its published mean |delta| and k3: a squared normal number with a sign, with a size of
its own for every prompt, and the smaller the surer its token is. The trainer's own passes differ by
published sizes too: batches of other sizes on one GPU (batch-logprob-gap, verl#6280).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch.types import Rollout
from tests.invented_run import report_of, sampled, saved

# Stack, class, mean |delta| and k3 of the headline, mean |delta| of other micro-batches, and what
# an expert says of a training run with it.
PUBLISHED = [
    ("Qwen3-8B, vLLM and HF", "bf16 dense", 0.0116, 4.3e-4, 0.010, "healthy"),
    ("gpt-oss-20b, FlashAttention 3", "bf16 MoE", 0.0176, 1.1e-3, 0.012, "healthy"),
    (
        "Qwen3-30B-A3B, no replay",
        "bf16 MoE",
        0.019,
        1.5e-3,
        0.015,
        "healthy or tolerable",
    ),  # as 2e-3 is near
    ("GLM-4.5-Air", "bf16 MoE", 0.0277, 2.8e-3, 0.02, "tolerable"),
    ("gpt-oss-20b, eager", "bf16 MoE", 0.078, 0.024, 0.02, "unfit"),
    ("DeepSeek-V4 on verl", "bf16 MoE", 0.044, 5.2e-3, 0.02, "tolerable"),
]
PROMPTS, SPREAD = 64, 0.2  # of the logarithm of a prompt's size


def heavy(rollout: Rollout, left: np.ndarray, mean: float, k3: float, seed: int) -> np.ndarray:
    """Return noise of this mean |delta| and k3 under which probabilities still add up to 1."""
    draw = np.random.default_rng(seed)
    sizes = np.exp(SPREAD * draw.normal(size=PROMPTS))
    of_prompt = rollout.prompt_index[rollout.sequence_of_token[rollout.actions]]
    uncertain = -np.expm1(left)  # what is certain hardly moves
    normal, low, high = draw.normal(size=rollout.n_actions), 0.0, 20.0
    for _ in range(20):
        power = (low + high) / 2
        noise = normal * np.abs(normal) * sizes[of_prompt] * uncertain**power
        noise *= mean / np.abs(noise).mean()
        noise = np.minimum(noise, -left)  # no probability beyond 1
        noise -= np.log(np.mean(np.exp(noise)))
        more = np.mean(np.expm1(noise) - noise) < k3
        low, high = (power, high) if more else (low, power)
    return noise


@pytest.mark.parametrize(("stack", "column", "mean", "k3", "batches", "fitness"), PUBLISHED)
def test_a_published_size_gets_an_experts_verdict(
    stack: str, column: str, mean: float, k3: float, batches: float, fitness: str, tmp_path: Path
) -> None:
    rollout = replace(sampled(PROMPTS, response=500), fingerprint={"engine": "vllm"})
    left = -np.random.default_rng(1).exponential(2.0, rollout.n_actions)  # p is 1/3 on average
    right = left + heavy(rollout, left, mean, k3, 2)
    side: dict[str, Any] = {"moe": column.endswith("MoE")}
    again = {
        name: right + heavy(rollout, left, batches, 3 * batches**2, seed)
        for seed, name in enumerate(("fsdp:regrouped", "fsdp:grad"), 3)
    }
    run = saved(tmp_path / "run", rollout, left, right, again, engine=side, trainer=side)
    report = report_of(run)
    assert report.comparisons[0].metrics["k3_kl"].value == pytest.approx(k3, rel=0.02), stack
    assert report.verdict.levels == column
    assert report.verdict.fitness.status in fitness.split(" or "), report.verdict.fitness
    found = {check.id: check for check in report.checks}["trainer-self-agreement"]
    assert found.status == "passed", found
