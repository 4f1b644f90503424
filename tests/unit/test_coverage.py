"""Intervals hold the truth as often as they promise; the full table is benchmarks/coverage.py."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import coverage as bench
from benchmarks import coverage_designs as designs
from mismatch.analysis.levels import judge, verdict
from mismatch.metrics import METRICS
from mismatch.metrics.estimator import Estimator
from mismatch.metrics.inference import prompts_needed
from mismatch.reports.summary import judged_rows, next_steps
from tests.reports_fixture import COLUMN, make_inconclusive_report

REPETITIONS, SEED = 200, 1  # standard error 1.5 %
CASES = {case.name: case for case in bench.CASES}


def test_the_truths_are_those_of_the_draws() -> None:
    for heavy in (False, True):
        rng = np.random.default_rng(0)
        scale = bench.of_samples(rng, bench.of_prompts(rng, 40_000))
        delta = bench.draw(rng, scale, heavy)
        assert np.abs(delta).mean() == pytest.approx(bench.mean_size(heavy), rel=0.01)
        assert (delta**2).mean() / 2 == pytest.approx(bench.mean_square(heavy), rel=0.15)


@pytest.mark.slow
def test_from_256_prompts_on_95_percent_means_93_to_97() -> None:
    got = bench.coverage(CASES["mean |delta|, by prompt"], 256, repetitions=REPETITIONS, seed=SEED)
    assert 0.93 - 0.015 <= got.held <= 0.97 + 0.015  # the bounds, and one standard error
    assert got.flagged < 0.05


def test_with_few_prompts_intervals_widen_instead() -> None:
    got = bench.coverage(CASES["mean |delta|, paired"], 24, repetitions=250)
    assert got.held >= 0.92


def test_extreme_quantiles_hold_the_truth_or_are_withheld() -> None:
    """Choosing the runs with evenly spread tails once left 27 % of the intervals at 64 prompts, of
    which 80 % held the truth; benchmarks/coverage.py has the other designs."""
    even, metric = designs.DESIGNS[0], METRICS["logprob_abs_diff_p99"]
    truth, estimates = 0.2143, []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        delta = even.draw(rng, even.scales(rng, 64))
        estimates.append(Estimator(*designs.layout(64)).one(metric, {"delta": delta}))
    intervals = [estimate for estimate in estimates if estimate.low is not None]
    assert len(intervals) > 0.9 * len(estimates)
    assert sum(estimate.low <= truth <= estimate.high for estimate in intervals) >= 0.91 * len(
        intervals
    )
    odd, withheld = designs.DESIGNS[3], 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        delta = odd.draw(rng, odd.scales(rng, 16))
        estimate = Estimator(*designs.layout(16)).one(metric, {"delta": delta})
        withheld += estimate.low is None and "few-tokens" in estimate.flags
    assert withheld == 20  # five prompts or fewer hold the tail


def test_heavy_tails_that_cannot_be_covered_are_flagged() -> None:
    got = bench.coverage(CASES["k2, paired"], 64, heavy=True, repetitions=100)
    assert got.held < 0.93  # what the flag is for
    assert got.flagged > 0.6


def test_sharing_tokens_and_sharing_prompts_both_pay() -> None:
    widths = [
        bench.coverage(CASES[f"mean |delta|, {how}"], 64, repetitions=15).width
        for how in ("paired", "by prompt", "other prompts")
    ]
    assert widths[0] < 0.9 * widths[1] < 0.7 * widths[2]


@pytest.mark.slow
def test_the_prompts_that_would_decide_do() -> None:
    """A 10 % improvement is not told with 12 prompts of others; with the n asked for it mostly is.

    The n is for the value found, so about half of the repetitions can be told with it.
    """
    case = CASES["mean |delta|, other prompts"]
    wanted = []
    for number in range(40):
        difference = case.made(np.random.default_rng([5, number]), 12, False, number)
        wanted.append(prompts_needed(difference, 0.0))
    typical = int(np.median([n for n in wanted if n is not None])) // 2  # counted on both sides
    assert typical > 24
    assert bench.power(case, 12, 60) < 0.45
    assert bench.power(case, 2 * typical, 30) > bench.power(case, 12, 60) + 0.2


def test_reports_say_how_many_prompts_would_decide() -> None:
    report, _ = make_inconclusive_report()
    judgements = judge(report.comparisons[0], COLUMN)
    (wanted,) = {j.deciding_prompts for j in judgements if j.inconclusive}
    assert wanted is not None
    assert any(f"--num-prompts {wanted}" in step for step in next_steps(report))
    notes = [note for row in judged_rows(report) for note in row.notes]
    assert any(f"about {wanted:,} prompts would decide" in note for note in notes)
    assert f"about {wanted:,} prompts " in verdict(judgements, (), COLUMN).reason
