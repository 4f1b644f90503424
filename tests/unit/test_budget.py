"""The error budget adds up, shares may be negative, and what was not run says why."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.metrics.budget import Budget, error_budget
from mismatch.pipeline.build import build_report
from mismatch.reports.section import cell_text
from mismatch.reports.sections import passes as shown
from mismatch.run import store
from mismatch.specs import CheckSpec
from tests.made_run import make_run, rollout, scoring, spec
from tests.reports_fixture import budget_of, make_report, make_tokens
from tests.texts import numbers

PROMPTS, TOKENS = 48, 50
SEQUENCE, PROMPT = np.repeat(np.arange(PROMPTS), TOKENS), np.arange(PROMPTS)


def chain(*steps: np.ndarray) -> list[tuple[str, np.ndarray]]:
    names = ("vllm:decode", "vllm:prefill", "reference:fp32", "fsdp")
    levels = np.cumsum([-1.0 + 0.0 * steps[0], *steps], axis=0)
    return list(zip(names, levels, strict=True))


def chained(*steps: np.ndarray, beside: tuple = ()) -> Budget:
    return error_budget(chain(*steps), beside, sequence=SEQUENCE, prompt=PROMPT)


def draws(*scales: float, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [scale * rng.normal(size=len(SEQUENCE)) for scale in scales]


def test_mean_delta_adds_up_and_the_shares_sum_to_one() -> None:
    first, second, third = draws(0.001, 0.02, 0.03)
    got = chained(first + 0.01, second - 0.002, third)
    assert sum(step.mean.value for step in got.steps) == pytest.approx(got.mean.value, abs=1e-15)
    assert got.mean.value == pytest.approx(0.008, abs=3e-3)
    assert sum(step.share.value for step in got.steps) == pytest.approx(1.0, abs=1e-12)
    assert got.steps[0].mean.value == pytest.approx((first + 0.01).mean(), abs=1e-12)
    # Mean |delta| does not add up: were it shown as a sum, this would fail.
    assert sum(step.size.value for step in got.steps) > got.steps[2].size.value + 0.01


def test_the_shares_are_the_known_ones() -> None:
    """Independent steps of variance 1, 4 and 4 carry 1/9, 4/9 and 4/9."""
    got = chained(*draws(0.01, 0.02, 0.02))
    for step, share in zip(got.steps, (1 / 9, 4 / 9, 4 / 9), strict=True):
        assert step.share.low < share < step.share.high
        assert step.share.high - step.share.low < 0.1
    assert got.spread.value == pytest.approx(0.03, rel=0.05)


def test_a_step_that_undoes_another_has_a_negative_share() -> None:
    error, own = draws(0.01, 0.02)
    got = chained(error, -error, own)
    first, second, third = (step.share for step in got.steps)
    assert first.value == pytest.approx(-second.value)
    assert third.value == pytest.approx(1.0)
    got = chained(own + 2 * error, -error, 0 * own)
    assert got.steps[1].share.high < 0


def test_beside_the_chain_spreads_are_compared() -> None:
    first, second, third, again = draws(0.001, 0.02, 0.03, 0.009)
    links = chain(first, second, third)
    repeated = ("fsdp:repeated", links[3][1] + again)
    got = error_budget(links, [(links[3], repeated)], sequence=SEQUENCE, prompt=PROMPT)
    (side,) = got.beside
    delta = first + second + third
    assert side.share.value == pytest.approx(again.std() / delta.std(), rel=1e-9)
    assert side.size.value == pytest.approx(np.abs(again).mean())
    assert side.mean.value == pytest.approx(again.mean(), abs=1e-12)


def test_intervals_are_by_prompt() -> None:
    """A shift shared by a prompt: 50 tokens of it are hardly more than one."""
    rng = np.random.default_rng(1)
    shared = np.repeat(0.02 * rng.normal(size=PROMPTS), TOKENS)
    got = chained(shared, *draws(0.001, 0.001))
    arm = (got.steps[0].mean.high - got.steps[0].mean.low) / 2
    assert arm == pytest.approx(2 * 0.02 / PROMPTS**0.5, rel=0.35)


def test_the_share_of_a_step_that_one_prompt_carries_has_an_interval_of_sane_width() -> None:
    """Resamples without that prompt have no spread to speak of: bootstrap-t gave up to 12,960."""
    rng = np.random.default_rng(0)
    prompts, tokens = 6, 50
    first = 1e-6 * rng.normal(size=(prompts, tokens))
    first[0, :3] += 0.05 * rng.normal(size=3)
    second, third = rng.normal(size=(2, prompts, tokens)) * np.array([1e-3, 3e-4])[:, None, None]
    got = error_budget(
        chain(first.ravel(), second.ravel(), third.ravel()),
        ((("fsdp", first.ravel()), ("fsdp:regrouped", 0.0 * first.ravel())),),
        sequence=np.repeat(np.arange(prompts), tokens),
        prompt=np.arange(prompts),
    )
    for step in (*got.steps, *got.beside):
        assert step.share.low <= step.share.value <= step.share.high
        assert max(-step.share.low, step.share.high) < 5.0
    assert "heavy-tail" in got.steps[0].share.flags
    assert got.steps[0].share.high - got.steps[0].share.low > 0.2


def test_identical_scorings_have_no_share_of_nothing() -> None:
    zero = np.zeros(len(SEQUENCE))
    got = chained(zero, zero, zero)
    assert [step.share for step in got.steps] == [None] * 3
    assert (got.mean.value, got.mean.low, got.mean.high, got.spread.value) == (0.0,) * 4


def test_bad_input_is_named() -> None:
    links = chain(*draws(0.1, 0.1, 0.1))
    with pytest.raises(MismatchError, match="two scorings"):
        error_budget(links[:1], [], sequence=SEQUENCE, prompt=PROMPT)
    with pytest.raises(MismatchError, match=r"fsdp .*\b3 .*\b2400"):
        error_budget([*links[:3], ("fsdp", np.zeros(3))], [], sequence=SEQUENCE, prompt=PROMPT)
    broken = links[3][1].copy()
    broken[5] = np.nan
    with pytest.raises(MismatchError, match=r"fsdp: 1 .*finite"):
        error_budget([*links[:3], ("fsdp", broken)], [], sequence=SEQUENCE, prompt=PROMPT)
    none = np.array([], dtype=np.int64)
    with pytest.raises(EmptyComparison):
        error_budget(
            [("a", none * 1.0), ("b", none * 1.0)], [], sequence=none, prompt=np.array([0])
        )


# ------------------------------------------------------------ in a run


def add(run: Path, name: str, shift: float, **facts: object) -> None:
    scores = scoring(name, rollout(), shift=shift, seed=7)
    mode = {"prefill": "prefill", "fp32": "reference"}.get(name.partition(":")[2], "train")
    store.save_scoring(
        run, replace(scores, fingerprint=scores.fingerprint | {"mode": mode} | facts), rollout()
    )


def full_spec() -> CheckSpec:
    base = spec()
    engine = replace(base.rollout.engine, prefill=True)
    return replace(base, rollout=replace(base.rollout, engine=engine), noise_floor=True)


def budget_in(run: Path, wanted: CheckSpec) -> Budget:
    budget = build_report(run, wanted)[0].result("budget")
    assert budget is not None
    return budget


def reasons(budget: Budget) -> dict[str, str]:
    return {gap.step: gap.reason for gap in budget.gaps}


def links(budget: Budget) -> list[str]:
    return [budget.steps[0].left, *(step.right for step in budget.steps)]


def test_a_run_with_everything_has_the_whole_chain(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add(run, "transformers:prefill", 0.002)
    add(run, "reference:fp32", 0.004)
    for variant in ("repeated", "regrouped", "grad", "replayed"):
        add(run, f"fsdp:{variant}", 0.01)
    budget = budget_in(run, full_spec())
    assert links(budget) == [
        "transformers:decode",
        "transformers:prefill",
        "reference:fp32",
        "fsdp",
    ]
    assert [step.right for step in budget.beside] == [
        "fsdp:repeated",
        "fsdp:regrouped",
        "fsdp:grad",
        "fsdp:replayed",
    ]
    assert list(reasons(budget)) == ["engine decode repeated"]


def test_every_step_that_was_not_run_says_why(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    bare = reasons(budget_in(run, spec()))
    assert "--no-prefill" in bare["step through transformers:prefill"]
    assert "--no-noise-floor" in bare["step through reference:fp32"]
    assert "--no-noise-floor" in bare["trainer regrouped"]
    assert any("replayed" in why for what, why in bare.items() if what.startswith("trainer"))
    assert links(budget_in(run, spec())) == ["transformers:decode", "fsdp"]
    fp32 = full_spec()
    fp32 = replace(fp32, train=replace(fp32.train, dtype="fp32", grad=True))
    reason_of = reasons(budget_in(run, fp32))
    assert "its own reference" in reason_of["step through reference:fp32"]
    assert "gradients on" in reason_of["trainer with gradients"]
    assert "no prefill" in reason_of["step through transformers:prefill"]


def test_a_prefill_at_another_temperature_is_no_link(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add(run, "transformers:prefill", 0.002, logprobs_temperature=0.7)
    budget = budget_in(run, full_spec())
    assert links(budget) == ["transformers:decode", "fsdp"]
    assert "temperature 0.7" in reasons(budget)["step through transformers:prefill"]


def test_a_scoring_that_is_not_finite_is_left_out_with_its_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add(run, "transformers:prefill", 0.002)
    add(run, "reference:fp32", np.nan)
    budget = budget_in(run, full_spec())
    assert links(budget) == ["transformers:decode", "transformers:prefill", "fsdp"]
    assert numbers(reasons(budget)["step through reference:fp32"]) == [96, 96]


def test_a_cut_law_is_noted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    decode = store.load_scoring(run, "transformers:decode")
    facts = decode.fingerprint | {"logprobs_truncated": True}
    store.save_scoring(run, replace(decode, fingerprint=facts), rollout())
    (note,) = budget_in(run, full_spec()).notes
    assert "kept mass" in note
    assert "fsdp" in note


# ------------------------------------------------------------ as it is shown


def test_rows_and_sentence_name_the_largest_step() -> None:
    report = make_report()
    view = shown.budget(report.result("budget"), report)
    (chain,) = view.tables
    rows = chain.cells()
    assert [re.findall("decode|prefill|float32|trainer", row[0].value) for row in rows] == [
        ["decode", "prefill"],
        ["prefill", "float32"],
        ["float32", "trainer"],
        [],
    ]
    assert cell_text(rows[-1][3], chain.columns[3]) == "100.0 %"
    assert view.short.startswith(rows[2][0].value)
    assert numbers(view.short)[0] == 60
    assert "replayed" in view.notes[0]


def test_a_step_that_few_tokens_carry_is_cautioned() -> None:
    report = make_report()
    caution = "engine: decode → prefill: heavy-tailed"
    for flags in ((), ("heavy-tail",)):
        steps = [
            replace(s, share=replace(s.share, flags=())) for s in report.result("budget").steps
        ]
        steps[0] = replace(steps[0], share=replace(steps[0].share, flags=flags))
        remarks = shown.remarks(replace(report.result("budget"), steps=tuple(steps)))
        assert sum(remark.startswith(caution) for remark in remarks) == len(flags)


def test_a_chain_of_one_step_has_no_picture_and_no_largest_step() -> None:
    whole = budget_of(make_tokens())
    step = replace(whole, steps=(replace(whole.steps[0], right="fsdp"),))
    view = shown.budget(step, make_report())
    assert view.figures == ()
    assert view.sentences == ()
    assert view.short
