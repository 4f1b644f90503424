"""The first next step of an inconclusive run, when it is followed, changes the verdict.

Pairs are drawn from a population whose tokens differ by a known amount. Following a step means to
measure again what it asks for: more prompts, the float32 passes, a policy that is not certain.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from mismatch.analysis import levels
from mismatch.analysis.cause_results import Cause, Causes
from mismatch.analysis.comparison import compare
from mismatch.analysis.diagnosis.pass_checks import enough_data, policy_entropy
from mismatch.analysis.levels import MORE_PROMPTS as MORE
from mismatch.analysis.levels import judge, verdict
from mismatch.analysis.long_sequence import checks as long_checks
from mismatch.analysis.results import Block, LongGap, LongSequence
from mismatch.analysis.square_checks import square_checks
from mismatch.features.recorded.facts import RecordedReport
from mismatch.metrics.inference import prompts_needed
from mismatch.reports import summary
from mismatch.types import Check, Estimate, Judgement, Report, Rollout, Sampling, Scoring
from tests.reports_fixture import make_report, square_of

COLUMN = "bf16 MoE"
UNDECIDED = Check("excess-engine", "inconclusive", "1.2 [1.1, 1.3]", MORE)
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
    tokens: int = 40
    """Tokens of a response."""
    empty: int = 0
    """Sequences of which no token counts."""
    states_dtype: bool = True
    by_position: bool = False
    """The engine drifts with the position, and by how much does not decide."""
    recorded: bool = False
    """The tokens are those of a dump."""

    def report(self, spec: dict[str, object] | None = None) -> Report:
        """Compare the two sides and judge them, as a check does."""
        samples, tokens = 4, self.tokens
        n = self.prompts * samples
        rng = np.random.default_rng(self.prompts)
        mask = np.tile(np.arange(tokens + 1) > 0, n)
        mask[: self.empty * (tokens + 1)] = False
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
        spread = np.repeat(rng.gamma(4.0, 0.25, self.prompts), samples * (tokens + 1))[mask]
        right = np.minimum(left + self.loud * spread * rng.standard_t(self.tail, len(ids)), -1e-6)
        entropy = np.full(len(ids), self.entropy, np.float32)
        pair = compare(
            rollout,
            Scoring("recorded:decode" if self.recorded else "vllm:decode", ids, left, {}),
            Scoring("fsdp", ids, right, {}, entropy=entropy),
            sampled_by_left=True,
            seed=0,
        )
        checks = [enough_data(rollout), *policy_entropy(pair)]
        square = square_of() if self.float32 else None
        checks += square_checks(square)
        if self.prompts < self.undecided_below:
            checks = [check for check in checks if check.id != UNDECIDED.id] + [UNDECIDED]
        gap = LongGap("vllm:long", "either", (Block(1, 9, 1e-6), Block(9, 99, 2e-5)), 1e-5, 4e-5)
        checks += long_checks(LongSequence(99, 9, (gap,))) if self.by_position else ()
        column = COLUMN if self.states_dtype else None
        judged = verdict(judge(pair, column), checks, column, "" if self.float32 else LEFT_OUT)
        made = replace(
            make_report(), verdict=judged, comparisons=(pair,), checks=tuple(checks),
            run={"spec": spec or {}},
        )  # fmt: skip
        dump = RecordedReport("dump.jsonl", "verl") if self.recorded else None
        return made.with_analyses(square=square, fixes=None, causes=None, recorded=dump)


def followed(run: Run, step: str) -> Run:
    """Return the run that does what a step says."""
    if many := re.search(r"--num-prompts (\d+)", step):
        return replace(run, prompts=int(many[1]))
    if "--num-prompts" in step:
        return replace(run, prompts=4 * run.prompts)
    if "float32" in step:
        return replace(run, float32=True, recorded=run.recorded and "score" not in step)
    answered: dict[str, dict[str, Any]] = {
        "dtype": {"states_dtype": True},
        "mask": {"empty": 0},
        "position": {"by_position": False},
        "policy": {"entropy": 0.8},
    }
    (change,) = [change for word, change in answered.items() if word in step]
    return replace(run, **change)


REASONS = {
    "without float32 passes": (Run(16, float32=False), {"quick": True}),
    "without a noise floor": (Run(16, float32=False), {"noise_floor": False}),
    "float32 passes that did not run": (Run(16, float32=False), {}),
    "a dump": (Run(16, float32=False, recorded=True), {}),
    "too few prompts": (Run(3), {}),
    "too few tokens": (Run(8, tokens=6), {}),
    "sequences without a token": (Run(16, empty=8), {}),
    "a server that states no dtype": (Run(16, states_dtype=False), {}),
    "a drift with the position": (Run(16, by_position=True), {}),
    "a side that is not decided": (Run(16, undecided_below=40), {}),
    "a certain policy": (Run(16, entropy=0.01), {}),
    "an interval over a level": (Run(12, loud=0.02, tail=3.0), {}),
    "k3 carried by a few prompts of many": (Run(64, loud=0.007, tail=1.4), {}),
    "heavy tails": (Run(12, loud=0.0115, tail=1.6), {}),
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


def inconclusive_lines() -> set[int]:
    """Lines of mismatch/analysis/levels.py that make a verdict or a metric inconclusive."""
    source = Path(levels.__file__).read_text("utf-8").splitlines()
    made = re.compile(r'(return Answer\(|status(, blind)? = )"inconclusive"')
    return {number for number, text in enumerate(source, 1) if made.search(text)}


@contextmanager
def lines_run(reached: set[int]) -> Iterator[None]:
    """Add the lines of levels.py that run within the block."""

    def local(frame: FrameType, event: str, arg: object) -> Any:
        reached.add(frame.f_lineno)
        return local

    before = sys.gettrace()
    sys.settrace(lambda f, *rest: local if f.f_code.co_filename == levels.__file__ else None)
    try:
        yield
    finally:
        sys.settrace(before)


def test_every_way_to_an_inconclusive_verdict_is_among_the_reasons() -> None:
    reached: set[int] = set()
    with lines_run(reached):
        for run, spec in REASONS.values():
            run.report(spec)
        verdict([], [Check("missing-logprobs", "failed", "all")], COLUMN)  # BROKEN, not compared
    wanted = inconclusive_lines()
    assert len(wanted) == 8
    assert wanted - reached == set()


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


@pytest.mark.parametrize(
    ("failed", "words"), [("displaced-engine", ("--explain", "cache")), ("turns", ("--explain",))]
)
def test_a_broken_run_without_a_cause_says_which_experiment_would_name_it(
    failed: str, words: tuple[str, ...]
) -> None:
    check = Check(failed, "failed", "it is off", "look at it")
    judged = replace(make_report().verdict, status="broken")
    report = replace(make_report(), verdict=judged, checks=(check,))
    steps = summary.next_steps(report.with_analyses(causes=None, fixes=None))
    assert all(word in steps[-1] for word in words)
    named = Causes((Cause("kv-block", "suspected", "engine", None, ()),), (), (), (), 0.1, 0.0)
    more = summary.next_steps(report.with_analyses(causes=named, fixes=None))
    assert not any("--explain" in step for step in more)
