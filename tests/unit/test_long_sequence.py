"""One long sequence: how long, of which tokens, and a fault from some position on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch.analysis.long_sequence import ROUNDING, TIMES, checks, of_run
from mismatch.analysis.results import Block, LongGap, LongSequence
from mismatch.experiments.beyond import DEFAULT, LONGEST, length_of, prepare
from mismatch.experiments.scoring_passes import training_passes, wants_long
from mismatch.keys import FLOAT32, Key
from mismatch.models.config import ModelConfig
from mismatch.pipeline.build import build_report
from mismatch.pipeline.document import headline_of
from mismatch.reports.sections.headline import answers
from mismatch.reports.sections.long_sequence import section
from mismatch.run import store
from mismatch.run.long_rollout import FOLDER, long_rollout
from mismatch.specs import CheckSpec, EngineSpec, RolloutSpec, TrainSpec
from mismatch.types import Floats, Rollout, Sampling, Scoring
from tests.made_run import PROMPT, RESPONSE, make_run, rollout, spec

TOKENS = 400
CONFIG = ModelConfig("qwen3", layers=2, heads=4, context=4096)
MUCH = 1 << 40


@pytest.mark.parametrize(
    ("asked", "tokens", "free", "length", "why"),
    [
        (None, MUCH, MUCH, DEFAULT, ""),
        (None, 900, MUCH, 900, ""),  # nobody asked for more
        (3000, MUCH, MUCH, 3000, ""),
        (3000, 900, MUCH, 900, "the run has no more tokens"),
        (8192, MUCH, MUCH, 4095, "the model was made for no more"),
        # 12 bytes x 4 heads x 1000², in half of the memory
        (4000, MUCH, 96 * 1000**2, 1000, "attention scores"),
    ],
)
def test_it_is_as_long_as_model_memory_and_run_allow(
    asked: int | None, tokens: int, free: int, length: int, why: str
) -> None:
    check = CheckSpec(context_length=asked)
    found, reason = length_of(check, CONFIG, tokens, free)
    assert found == length
    assert why in reason
    assert bool(why) == bool(reason)


@pytest.mark.parametrize(
    ("planned", "length", "why"),
    [(128, DEFAULT, ""), (3000, 3000, ""), (8000, 4095, "the model was made for no more")],
)
def test_it_reaches_as_far_as_the_responses_that_are_planned(
    planned: int, length: int, why: str
) -> None:
    sampling = Sampling(max_tokens=planned)
    check = CheckSpec(RolloutSpec(sampling=sampling))
    assert length_of(check, CONFIG, MUCH, MUCH) == (length, why)
    longest = CheckSpec(RolloutSpec(sampling=Sampling(max_tokens=10**6)))
    assert length_of(longest, replace(CONFIG, context=None), MUCH, 1 << 60) == (LONGEST, "")


def test_no_longer_one_than_the_most_is_made() -> None:
    endless = replace(CONFIG, context=None)
    assert length_of(CheckSpec(context_length=10**6), endless, MUCH, 1 << 60)[0] == LONGEST


def test_only_a_check_with_float32_passes_and_a_whole_distribution_has_it() -> None:
    check = CheckSpec()
    assert wants_long(check)
    assert not wants_long(replace(check, context_length=0))
    assert not wants_long(replace(check, quick=True))
    cut = replace(check.rollout.sampling, top_p=0.9)
    assert not wants_long(replace(check, rollout=replace(check.rollout, sampling=cut)))


def test_it_is_made_of_the_runs_own_tokens_all_of_them_scored() -> None:
    own = rollout()
    long = long_rollout(own, TOKENS)
    assert (long.n_sequences, long.n_actions) == (1, TOKENS - 1)
    np.testing.assert_array_equal(long.token_ids[: len(own.token_ids)], own.token_ids[:TOKENS])
    assert not long.sampling.truncates


def scoring(name: str, long: Rollout, logprobs: Floats, dtype: str, **more: Any) -> Scoring:
    facts = {"dtype": dtype, "device": "cpu", "logprobs_temperature": 1.0, **more}
    return Scoring(name, long.token_ids[long.actions], logprobs, facts)


def run_with(
    directory: Path,
    off: float,
    start: int,
    tokens: int = TOKENS,
    as_run_off: float = 0.0,
    every: int = 1,
    **engine: Any,
) -> Path:
    """A run whose engine in float32, or whose trainer as it runs, is off from a position on."""
    run = make_run(directory)
    own = store.load_rollout(run)
    kept = np.full(own.n_actions, -1.0)
    for name, values, dtype in (("reference:fp32", kept, "fp32"), ("plain:bf16", kept, "bf16")):
        store.save_scoring(run, scoring(name, own, values, dtype), own)
    long = long_rollout(own, TOKENS)
    (run / FOLDER).mkdir()
    store.save_rollout(run / FOLDER, long)
    draw = np.random.default_rng(0)
    exact = -draw.exponential(1.0, long.n_actions)
    places = np.arange(1, TOKENS)
    off_places = (places >= start) & (places < start + tokens) & ((places - start) % every == 0)
    moved = exact - off * off_places
    rough = exact + 0.004 * draw.standard_normal(long.n_actions)
    off_as_run = exact + 0.004 * draw.standard_normal(long.n_actions)
    off_as_run -= as_run_off * (places >= start)
    for name, values, dtype in (
        ("reference:long", exact, "fp32"),
        ("transformers:long", moved, "fp32"),
        ("fsdp:long", exact, "fp32"),
        ("plain:bf16:long", rough, "bf16"),
        (Key("fsdp").over_long(), off_as_run, "bf16"),
    ):
        more = engine if name.startswith("transformers") else {}
        store.save_scoring(run / FOLDER, scoring(name, long, values, dtype, **more), long)
    return run


def long_of(run: Path) -> LongSequence:
    result = of_run(run, spec())
    assert result is not None
    return result


def test_a_fault_from_a_position_on_fails_and_is_placed(tmp_path: Path) -> None:
    result = long_of(run_with(tmp_path / "run", off=0.05, start=256))
    assert (result.tokens, result.reached) == (TOKENS, PROMPT + RESPONSE)
    found = {check.id: check for check in checks(result)}
    assert found["long-sequence-engine"].status == "failed"
    assert found["long-sequence-trainer"].status == "passed"
    gap = next(gap for gap in result.gaps if gap.scoring == "transformers:long")
    worst = max(gap.blocks[1:], key=lambda block: block.off)
    assert worst.low >= 200
    assert worst.nats == pytest.approx(0.05, rel=0.2)
    said = section(result).sentences
    assert said[0].startswith("From position 2")
    assert f" at all {TOKENS} positions: " in said[1]
    assert not section(result).folded


def test_the_first_screen_names_the_side_and_not_that_all_agree(tmp_path: Path) -> None:
    report, _ = build_report(run_with(tmp_path / "run", off=0.05, start=256), spec())
    (said,) = [each.text for each in answers(report) if each.question == "Both sides"]
    assert said.startswith("From position 2")
    assert "transformers computes the wrong function: in float32" in said
    assert headline_of(report).side_at_fault == "either"
    clean, _ = build_report(run_with(tmp_path / "clean", off=0.0, start=0), spec())
    assert not [each for each in answers(clean) if "wrong function" in each.text]


def test_scorings_of_other_tokens_are_deleted(tmp_path: Path) -> None:
    """The run was sampled again: its long sequence is made of the new tokens."""
    run = run_with(tmp_path / "run", off=0.0, start=0)
    prepare(run, spec())
    assert store.scoring_names(run / FOLDER)  # of the same tokens: kept
    other = store.load_rollout(run)
    store.save_rollout(run, replace(other, token_ids=other.token_ids[::-1].copy()))
    prepare(run, spec())
    assert not (run / FOLDER / "scores").exists()


@pytest.mark.parametrize("engine", [{"weights_form": "fp8"}, {"logprobs_temperature": 0.7}])
def test_other_values_or_another_distribution_are_no_fault(
    tmp_path: Path, engine: dict[str, Any]
) -> None:
    """They differ as they were asked to: nothing is said of the engine's function."""
    result = long_of(run_with(tmp_path / "run", 0.05, 0, **engine))
    assert [gap.scoring for gap in result.gaps] == ["fsdp:long", Key("fsdp").over_long()]
    assert result.tested == 0


def test_one_token_whose_experts_changed_places_is_no_fault(tmp_path: Path) -> None:
    result = long_of(run_with(tmp_path / "run", off=2.5, start=300, tokens=1))
    assert {check.status for check in checks(result)} == {"passed"}


@pytest.mark.parametrize("every", [12, 16, 32])
def test_one_token_in_many_that_is_another_function_fails(tmp_path: Path, every: int) -> None:
    """As of a cache whose blocks begin wrong: no median and no mean shows it."""
    result = long_of(run_with(tmp_path / "run", off=2.0, start=PROMPT + RESPONSE, every=every))
    found = {check.id: check for check in checks(result)}
    assert found["long-sequence-engine"].status == "failed"
    assert "is 2 nats" in found["long-sequence-engine"].detail
    assert found["long-sequence-trainer"].status == "passed"


def test_a_number_that_is_none_fails(tmp_path: Path) -> None:
    result = long_of(run_with(tmp_path / "run", off=float("nan"), start=399))
    found = {check.id: check.status for check in checks(result)}
    assert found.pop("long-sequence-engine") == "failed"
    assert found == {"long-sequence-trainer": "passed", ROUNDING: "passed"}


def test_a_sequence_without_a_fault_passes_and_counts_as_seen(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", off=0.0, start=0)
    assert {check.status for check in checks(long_of(run))} == {"passed"}
    report, _ = build_report(run, spec())
    assert report.result("long_sequence") == long_of(run)
    assert f"positions beyond {TOKENS}" in {entry.what for entry in report.not_tested}


def test_a_run_without_one_has_no_result(tmp_path: Path) -> None:
    assert of_run(make_run(tmp_path / "run"), spec()) is None


def test_a_kernel_that_is_wrong_only_as_it_runs_fails(tmp_path: Path) -> None:
    """It refuses float32, or another kernel takes its place there."""
    result = long_of(run_with(tmp_path / "run", off=0.0, start=256, as_run_off=0.05))
    found = {check.id: check.status for check in checks(result)}
    assert found.pop(ROUNDING) == "failed"
    assert set(found.values()) == {"passed"}
    own = result.gaps[-1]
    assert own.blocks[0].off < 2 < 5 < max(block.off for block in own.blocks[1:])
    assert section(result).sentences[-1].startswith("From position 2")


@pytest.mark.parametrize(
    ("times", "status"),
    [
        ((4.7, 3.6, 1.5, 1.3, 0.9, 1.1, 1.0, 0.9, 0.8), "passed"),  # experts changed places early
        ((1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0), "passed"),
        ((1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.5, 9.0), "inconclusive"),
        ((1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 9.0), "failed"),  # from the last blocks on
        ((1.0, 1.0, 1.0, 4.0, 4.0, 4.0, 4.0, 4.0, 1.0), "failed"),
        ((1.0, float("nan"), *[1.0] * 7), "failed"),
    ],
)
def test_a_side_as_it_runs_fails_where_it_stays_off(times: tuple[float, ...], status: str) -> None:
    blocks = tuple(Block(n, n + 1, off, plain=1.0) for n, off in enumerate(times))
    gap = LongGap(Key("vllm").over_long(), "engine", blocks, *TIMES)
    assert gap.status == status
    assert checks(LongSequence(9, 1, (gap,)))[0].status == status


def test_a_number_that_is_none_as_it_runs_fails_too(tmp_path: Path) -> None:
    result = long_of(run_with(tmp_path / "run", off=0.0, start=399, as_run_off=float("nan")))
    assert {check.id for check in checks(result) if check.status == "failed"} == {ROUNDING}


def test_with_a_fix_the_trainer_is_that_with_the_fix(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", off=0.0, start=0)
    long = store.load_rollout(run / FOLDER)
    exact = store.load_scoring(run / FOLDER, "reference:long")
    in_float32, rounded = Key("fix:some").over_long(FLOAT32), Key("fix:some").over_long()
    store.save_scoring(
        run / FOLDER, replace(exact, name=in_float32, logprobs=exact.logprobs - 1.0), long
    )
    fixed = of_run(run, spec(), "fix:some")
    assert fixed is not None
    assert [gap.scoring for gap in fixed.gaps] == ["transformers:long", in_float32]
    assert [check.status for check in checks(fixed)] == ["passed", "failed"]
    assert rounded == "fix:some:long"


def test_the_engine_as_it_runs_is_looked_at_too(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", off=0.0, start=0)
    own = store.load_scoring(run / FOLDER, Key("fsdp").over_long())
    wrong = own.logprobs - 0.05 * (np.arange(1, TOKENS) >= 256)
    long = store.load_rollout(run / FOLDER)
    engine = replace(own, name=Key("transformers").over_long(), logprobs=wrong)
    store.save_scoring(run / FOLDER, engine, long)
    failed = [check.id for check in checks(long_of(run)) if check.status == "failed"]
    assert failed == ["long-sequence-engine-rounding"]
    tempered = replace(engine, fingerprint={**engine.fingerprint, "logprobs_temperature": 0.7})
    store.save_scoring(run / FOLDER, tempered, long)
    assert Key("transformers").over_long() not in [gap.scoring for gap in long_of(run).gaps]


def test_an_engine_in_bf16_has_its_plain_forward_where_the_trainer_is_in_float32() -> None:
    engine, train = EngineSpec(model="m", dtype="bf16"), TrainSpec(model="m", dtype="fp32")
    check = CheckSpec(rollout=RolloutSpec(engine), train=train)
    names = [pass_.name for pass_ in training_passes(check) if pass_.folder == FOLDER]
    assert names == ["reference:long", "fsdp:long", "plain:bf16:long"]
