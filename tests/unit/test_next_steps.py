"""The first next step of an inconclusive run, when it is followed, changes the verdict.

Pairs are drawn from a population whose tokens differ by a known amount. Following a step means to
measure again what it asks for: more prompts, the float32 passes, a policy that is not certain.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import pytest

from mismatch.analysis.comparison import compare
from mismatch.analysis.diagnosis.pass_checks import enough_data, policy_entropy
from mismatch.analysis.levels import judge, verdict
from mismatch.analysis.square_checks import square_checks
from mismatch.metrics.inference import prompts_needed
from mismatch.reports import summary
from mismatch.types import Check, Estimate, Judgement, Report, Rollout, Sampling, Scoring
from tests.reports_fixture import make_report, square_of

COLUMN = "bf16 MoE"
UNDECIDED = Check("excess-engine", "inconclusive", "1.2 [1.1, 1.3]", "measure more: --num-prompts")
LEFT_OUT = "left out"


@dataclass(frozen=True)
class Run:
    """What is measured, and how loud and how certain the pair is."""

    prompts: int
    loud: float = 0.004
    entropy: float = 0.8
    float32: bool = True
    undecided_below: int = 0
    """Prompts under which a side's excess spans its level."""
    tail: float = 50.0
    """Degrees of freedom of the differences: few make heavy tails."""

    def report(self, spec: dict[str, object] | None = None) -> Report:
        """Compare the two sides and judge them, as a check does."""
        samples, tokens = 4, 40
        n = self.prompts * samples
        rng = np.random.default_rng(self.prompts)
        mask = np.tile(np.arange(tokens + 1) > 0, n)
        rollout = Rollout(
            token_ids=np.repeat(np.arange(n) // samples, tokens + 1),
            offsets=np.arange(n + 1) * (tokens + 1),
            action_mask=mask,
            turn=mask.astype(np.int64),
            prompt_index=np.arange(n) // samples,
            finish_reason=("stop",) * n,
            sampling=Sampling(),
            fingerprint={"engine": "vllm"},
        )
        ids = rollout.token_ids[mask]
        left = -rng.gamma(1.0, 0.6, len(ids)) - 0.05
        spread = np.repeat(rng.gamma(4.0, 0.25, self.prompts), samples * tokens)
        right = np.minimum(left + self.loud * spread * rng.standard_t(self.tail, len(ids)), -1e-6)
        entropy = np.full(len(ids), self.entropy, np.float32)
        pair = compare(
            rollout,
            Scoring("vllm:decode", ids, left, {}),
            Scoring("fsdp", ids, right, {}, entropy=entropy),
            sampled_by_left=True,
            seed=0,
        )
        checks = [enough_data(rollout), *policy_entropy(pair)]
        square = square_of() if self.float32 else None
        checks += square_checks(square)
        if self.prompts < self.undecided_below:
            checks = [check for check in checks if check.id != UNDECIDED.id] + [UNDECIDED]
        judged = verdict(judge(pair, COLUMN), checks, COLUMN, "" if self.float32 else LEFT_OUT)
        made = replace(
            make_report(), verdict=judged, comparisons=(pair,), checks=tuple(checks),
            run={"spec": spec or {}},
        )  # fmt: skip
        return made.with_analyses(square=square, fixes=None, causes=None)


def followed(run: Run, step: str) -> Run:
    """Return the run that does what a step says."""
    if many := re.search(r"--num-prompts (\d+)", step):
        return replace(run, prompts=int(many[1]))
    if "--num-prompts" in step:
        return replace(run, prompts=4 * run.prompts)
    if "--quick" in step or "--no-noise-floor" in step or "float32" in step:
        return replace(run, float32=True)
    assert "policy" in step, step
    return replace(run, entropy=0.8)


REASONS = {
    "without float32 passes": (Run(16, float32=False), {"quick": True}),
    "without a noise floor": (Run(16, float32=False), {"noise_floor": False}),
    "float32 passes that did not run": (Run(16, float32=False), {}),
    "too few prompts": (Run(3), {}),
    "a side that is not decided": (Run(16, undecided_below=40), {}),
    "a certain policy": (Run(16, entropy=0.01), {}),
    "an interval over a level": (Run(12, loud=0.02, tail=3.0), {}),
    "heavy tails": (Run(12, loud=0.005, tail=2.0), {}),
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_first_step_of_an_inconclusive_run_changes_the_verdict(reason: str) -> None:
    run, spec = REASONS[reason]
    report = run.report(spec)
    assert report.verdict.status == "inconclusive"
    step = summary.next_steps(report)[0]
    after = followed(run, step)
    assert after != run
    again = after.report({})
    assert again.verdict.status != "inconclusive", (step, report.verdict, again.verdict)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("arm", [0.05, 0.3, 1.0])
def test_the_number_of_prompts_puts_the_bound_outside(share: float, arm: float) -> None:
    """With intervals that shrink with the root of the prompts, around the same value."""
    bound = 0.013
    value = share * bound
    few = Estimate(value, value * (1 - arm), max(value * (1 + arm), 1.01 * bound), 999, 64, 16)
    wanted = prompts_needed(few, bound)
    assert wanted is not None
    item = Judgement("k3_kl", "inconclusive", value, 0.002, bound, "x", True, wanted)
    report = make_report()
    report = replace(
        report, verdict=replace(report.verdict, judgements=(item,), status="inconclusive")
    )
    step = summary.next_steps(report.with_analyses(square=square_of()))[0]
    found = re.search(r"--num-prompts (\d+)", step)
    assert found is not None
    assert few.high is not None
    assert value + (few.high - value) * (16 / int(found[1])) ** 0.5 < bound
