"""Ranking: what is told from chance and what is not, on numbers whose truth is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.experiments.fixes.significance import Tried, best_of, held_out, judged, ranked
from mismatch.experiments.results import FixOutcome, FixTable
from mismatch.metrics import METRICS
from mismatch.metrics.difference import Sample
from mismatch.metrics.permutation import LEVEL, holm
from mismatch.types import Estimate

ABS, K3 = "logprob_abs_diff_mean", "k3_kl"


def measured(delta: np.ndarray, per_prompt: int = 10) -> Sample:
    """One sequence per prompt."""
    sequence = np.arange(len(delta)) // per_prompt
    deltas = {"delta": np.asarray(delta, np.float64)}
    return Sample(deltas, sequence, np.arange(sequence[-1] + 1))


def pair(before: Sample, after: Sample, same_tokens: bool = True) -> Tried:
    return Tried(FixOutcome("a", "train", ""), before, after, same_tokens)


def p_value(metric: str, before: Sample, after: Sample, seed: int = 0) -> float:
    return pair(before, after).p_values(seed)[metric]


def row(name: str, k3: float, change: float, absolute: float = 1.0) -> FixOutcome:
    def number(value: float) -> Estimate:
        return Estimate(value, None, None, 10, 1, 1)

    return FixOutcome(
        name,
        "train",
        "",
        after={K3: number(k3), ABS: number(absolute)},
        changes={K3: number(change), ABS: number(change)},
    )


def tried(name: str, k3: float, absolute: float, p_k3: float, p_abs: float) -> FixOutcome:
    """A fix of a mismatch with k3 1 and mean |delta| 1."""

    def number(value: float) -> Estimate:
        return Estimate(value, None, None, 10, 1, 1)

    outcome = FixOutcome(
        name,
        "train",
        "",
        before={K3: number(1.0), ABS: number(1.0)},
        after={K3: number(k3), ABS: number(absolute)},
        changes={K3: number(k3 - 1.0), ABS: number(absolute - 1.0)},
    )
    return judged([outcome], {name: {K3: p_k3, ABS: p_abs}})[0]


def test_a_certain_change_of_half_a_percent_helps_nobody() -> None:
    small, enough = tried("a", 1.0, 0.996, 1.0, 1e-4), tried("b", 1.0, 0.94, 1.0, 1e-4)
    assert (small.outcome, enough.outcome) == ("negligible", "better")
    assert small.significant  # told from chance, and too small to matter
    assert best_of([small]) == (None, None)
    assert tried("c", 1.0, 1.03, 1.0, 1e-4).outcome == "negligible"
    assert tried("d", 1.2, 1.0, 1e-4, 1.0).outcome == "worse"


def test_a_k3_that_is_lower_by_luck_alone_does_not_rank() -> None:
    """One spike less, against 60 % less everywhere."""
    lucky, real = tried("lucky", 0.6, 0.9, 0.76, 1e-4), tried("real", 0.95, 0.4, 0.3, 1e-4)
    assert [row.id for row in ranked([lucky, real])] == ["real", "lucky"]


# ---------------------------------------------------------------- p-values


def test_three_prompts_that_all_fall_are_two_of_eight_swaps() -> None:
    before, after = measured(np.full(30, 0.2)), measured(np.full(30, 0.1))
    assert p_value(ABS, before, after) == pytest.approx(2 / 8)


def test_a_prompt_of_many_samples_counts_once() -> None:
    before, after = measured(np.full(300, 0.2), 100), measured(np.full(300, 0.1), 100)
    assert p_value(ABS, before, after) == pytest.approx(2 / 8)


def test_no_change_is_no_evidence() -> None:
    deltas = measured(np.random.default_rng(0).normal(0, 0.1, 400))
    assert p_value(ABS, deltas, deltas) == 1.0


def test_a_tenfold_fall_over_sixteen_prompts_is_as_clear_as_it_gets() -> None:
    delta = np.random.default_rng(0).normal(0, 0.1, 160)
    assert p_value(ABS, measured(delta), measured(delta / 10)) < 1e-3


def test_other_lengths_are_means_and_not_sums() -> None:
    """Twice the tokens at the same size is no change."""
    before = measured(np.full(320, 0.1), 10)
    after = measured(np.full(640, 0.1), 20)
    assert p_value(ABS, before, after) == 1.0


def test_by_chance_a_false_claim_is_as_rare_as_promised() -> None:
    """Correlated tokens, heavy tails, tokens sampled anew: 5 % of 400 tries, and not more."""
    draw = np.random.default_rng(1)
    claims = []
    for _ in range(400):
        sides = []
        for _ in range(2):
            size = np.repeat(np.exp(draw.normal(0, 1, 8)), 10)
            sides.append(measured(size * draw.standard_t(3, 80) * 0.05))
        claims.append(p_value(K3, *sides) <= LEVEL)
    assert 0.02 < np.mean(claims) < 0.08


def test_runs_without_a_common_prompt_are_refused() -> None:
    deltas = measured(np.ones(20))
    with pytest.raises(MismatchError, match="no prompt"):
        p_value(ABS, deltas, replace(deltas, prompt=deltas.prompt + 5))


def test_nothing_measured_is_an_error() -> None:
    deltas = measured(np.ones(20))
    empty = Sample({"delta": np.empty(0)}, np.empty(0, np.int64), deltas.prompt)
    with pytest.raises(EmptyComparison):
        p_value(ABS, deltas, empty)


def test_holm() -> None:
    assert holm([0.03, 0.001, 0.02]) == pytest.approx([0.04, 0.003, 0.04])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


# ---------------------------------------------------------------- changes


@pytest.mark.parametrize("same", [True, False])
def test_a_change_has_its_interval(same: bool) -> None:
    delta = np.random.default_rng(0).normal(0, 0.1, 640)
    change = pair(measured(delta), measured(delta / 2), same).change(ABS, seed=0)
    assert change.value == pytest.approx(-np.abs(delta).mean() / 2)
    assert change.low is not None
    assert change.high is not None
    assert change.low < change.value < change.high < 0


# ---------------------------------------------------------------- outcomes


@pytest.mark.parametrize(
    ("changes", "p", "outcome"),
    [
        ((-1.0, -1.0), (0.001, 0.001), "better"),
        ((-1.0, -1.0), (0.001, 0.9), "better"),
        ((1.0, 1.0), (0.001, 0.9), "worse"),
        ((1.0, -1.0), (0.001, 0.001), "mixed"),
        ((-1.0, -1.0), (0.2, 0.9), "none"),
        ((-1.0, -1.0), (0.04, 0.04), "none"),  # two tests: 0.08 each
    ],
)
def test_what_a_change_means(
    changes: tuple[float, float], p: tuple[float, float], outcome: str
) -> None:
    before = row("a", 1.0, 0.0)
    for metric, change in zip((K3, ABS), changes, strict=True):
        before.changes[metric] = Estimate(change, None, None, 1, 1, 1)
    (after,) = judged([before], {"a": dict(zip((K3, ABS), p, strict=True))})
    assert after.outcome == outcome
    assert after.significant is (outcome != "none")


def test_the_share_removed_is_one_minus_after_over_before() -> None:
    before = np.random.default_rng(0).normal(0, 0.1, 640)
    after = before * np.where(np.arange(640) % 2, 0.4, 0.2)
    truth = 1 - np.abs(after).mean() / np.abs(before).mean()
    widths = []
    for same in (True, False):
        share = pair(measured(before), measured(after), same).removed(ABS, seed=0)
        assert share is not None
        assert share.value == pytest.approx(truth)
        assert share.low is not None
        assert share.high is not None
        assert share.low < truth < share.high
        widths.append(share.high - share.low)
    assert widths[0] < widths[1]  # what both sides share cancels
    nothing = measured(np.zeros(640))
    assert pair(nothing, nothing).removed(ABS, seed=0) is None


# ---------------------------------------------------------------- held-out prompts


def tried_on(name: str, before: np.ndarray, after: np.ndarray) -> Tried:
    values = [{m: Estimate(METRICS[m](delta=d), None, None, 1, 1, 1) for m in (K3, ABS)}
              for d in (before, after)]  # fmt: skip
    outcome = FixOutcome(name, "train", "", before=values[0], after=values[1])
    tried = Tried(outcome, measured(before), measured(after), same_tokens=True)
    return replace(tried, row=tried.measured(seed=0))


def test_a_fix_that_helps_everywhere_is_confirmed_where_it_was_not_chosen() -> None:
    draw = np.random.default_rng(1)
    before = draw.normal(0, 0.1, 640)
    good, null = tried_on("good", before, before / 4), tried_on("null", before, before * 1.0)
    held = held_out("good", [null, good], seed=0)
    assert (held.id, held.chosen, held.confirmed, held.reason) == ("good", "good", True, "")
    assert (held.chosen_on, held.measured_on) == (32, 32)
    assert held.removed[ABS].value == pytest.approx(0.75)
    assert held.removed[ABS].n_prompts == 32
    assert all(p <= LEVEL for p in held.p_values.values())


def test_a_fix_that_helps_the_half_that_chose_alone_is_not_confirmed() -> None:
    before = np.random.default_rng(2).normal(0, 0.1, 640)
    order = np.random.default_rng(0).permutation(np.arange(64))  # as the split of seed 0
    chose = np.isin(np.arange(640) // 10, order[:32])
    lucky = tried_on("lucky", before, np.where(chose, before / 4, before * 1.05))
    held = held_out("lucky", [lucky], seed=0)
    assert (held.chosen, held.confirmed) == ("lucky", False)
    assert held.removed[ABS].value == pytest.approx(-0.05)


def test_where_half_of_the_prompts_choose_another_the_best_is_not_confirmed() -> None:
    before = np.random.default_rng(3).normal(0, 0.1, 640)
    order = np.random.default_rng(0).permutation(np.arange(64))
    chose = np.isin(np.arange(640) // 10, order[:32])
    late = tried_on("late", before, np.where(chose, before * 0.9, before / 50))
    even = tried_on("even", before, before / 2)
    held = held_out("late", [late, even], seed=0)
    assert (held.id, held.chosen, held.confirmed) == ("late", "even", False)
    assert held.removed[ABS].value == pytest.approx(0.5)


@pytest.mark.slow
def test_the_best_of_null_fixes_looks_good_and_is_not_confirmed() -> None:
    """Selection: the best of six that do nothing seems to remove over 5 %."""
    draw = np.random.default_rng(4)
    flattered = []
    for _ in range(20):
        before = draw.standard_t(3, 320) * 0.05
        fixes = [tried_on(f"f{n}", before, draw.standard_t(3, 320) * 0.05) for n in range(6)]
        best = min(fixes, key=lambda each: each.row.after[ABS].value)
        flattered.append(1 - best.row.after[ABS].value / best.row.before[ABS].value)
        held = held_out(best.row.id, fixes, seed=int(draw.integers(100)))
        assert not held.confirmed
    assert np.mean(flattered) > 0.05


def test_too_few_prompts_leave_none_out() -> None:
    before = np.random.default_rng(5).normal(0, 0.1, 30)
    held = held_out("a", [tried_on("a", before, before / 4)], seed=0)
    assert (held.chosen, held.confirmed, held.removed) == (None, False, {})
    assert "too few prompts" in held.reason
    before = np.random.default_rng(5).normal(0, 0.1, 60)
    assert "find no fix" in held_out("a", [tried_on("a", before, before / 4)], seed=0).reason


def test_many_tries_need_more_evidence() -> None:
    """p = 0.01 says something of one fix, and nothing of the best of ten."""
    alone = judged([row("a", 1.0, -1.0)], {"a": {K3: 0.01}})
    assert alone[0].significant
    rows = [row(name, 1.0, -1.0) for name in "abcdefghij"]
    outcomes = judged(rows, {name: {K3: 0.01 if name == "a" else 0.5} for name in "abcdefghij"})
    assert not any(outcome.significant for outcome in outcomes)


def test_order_is_better_then_none_then_worse_then_not_measured() -> None:
    p = {"good": 0.001, "better": 0.001, "tie": 0.001, "low": 0.9, "bad": 0.001}
    rows = [
        FixOutcome("refused", "train", "", applies=False, reason="dense"),
        FixOutcome("failed", "train", "", reason="out of memory"),
        row("bad", 9.0, 1.0),
        row("low", 0.1, -1.0),
        row("tie", 1.0, -1.0, absolute=2.0),
        row("good", 1.0, -1.0, absolute=3.0),
        row("better", 0.5, -1.0),
    ]
    outcomes = ranked(judged(rows, {name: {K3: value} for name, value in p.items()}))
    assert [outcome.id for outcome in outcomes] == [
        *("better", "tie", "good", "low", "bad", "failed", "refused")
    ]
    assert best_of(outcomes) == ("better", "better")
    assert best_of([outcome for outcome in outcomes if outcome.outcome != "better"]) == (None, None)


def test_the_best_single_fix_is_no_combination() -> None:
    rows = [row("a+b", 0.1, -1.0), row("router-replay=ids+weights", 0.5, -1.0)]
    outcomes = ranked(judged(rows, {r.id: {K3: 0.001} for r in rows}))
    assert best_of(outcomes) == ("router-replay=ids+weights", "a+b")


def test_a_table_names_what_was_tried() -> None:
    table = FixTable((row("a", 1.0, 1.0),))
    assert table.outcome("a").id == "a"
    with pytest.raises(MismatchError, match="tried: a"):
        table.outcome("b")
