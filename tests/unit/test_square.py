"""The square: rounding gives an excess of 1, a fault on one side more, and that side is named.

Synthetic scorings with known roundings; real passes are in tests/integration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch.analysis.cause_results import Cause, Side
from mismatch.analysis.causes import of_sides_at_fault
from mismatch.analysis.displaced import LEVELS, Bound, excess_terms
from mismatch.analysis.levels import verdict
from mismatch.analysis.plugins import RunArtefacts
from mismatch.analysis.results import Square, check_id, sides_at_fault
from mismatch.analysis.square import SAME_FAULT, judged, measure, precision_of
from mismatch.analysis.square_checks import square_checks
from mismatch.codec import to_json
from mismatch.errors import MismatchError, WrongAnswer
from mismatch.experiments.scoring_passes import float32_engine, plain_of, training_passes
from mismatch.keys import Key
from mismatch.pipeline.build import build_report
from mismatch.pipeline.document import headline_of
from mismatch.processes.stages import LABEL, Room, score_in_float32
from mismatch.reports.sections.headline import answers
from mismatch.reports.sections.square import section
from mismatch.run import store
from mismatch.run.messages import pass_label, read_error, write_error
from mismatch.specs import CheckSpec, EngineSpec, Pass, RolloutSpec, TrainSpec
from mismatch.types import (
    WITHOUT_MLA,
    Check,
    Judgement,
    NotTested,
    Pair,
    Rollout,
    Routing,
    Sampling,
    Scoring,
)
from tests.checkpoints import make
from tests.made_run import make_run
from tests.made_run import spec as made_spec
from tests.reports_fixture import make_report
from tests.texts import numbers

NO_KERNELS = "no kernels for float32"

PROMPTS, SAMPLES, RESPONSE = 64, 2, 40
ENGINE = {"mode": "decode", "engine": "vllm", "dtype": "bf16", "kv_cache_dtype": "bf16"}
WEIGHTS = {"layers.0.w": [1, 2, 3, 4, 5], "layers.1.w": [6, 7, 8, 9, 10]}
COMMON = {"device": "cpu", "logprobs_temperature": 1.0, "model": "m", "weights": WEIGHTS}
SPEC = CheckSpec(rollout=RolloutSpec(engine=EngineSpec(model="m")), train=TrainSpec(model="m"))
NAMES = {
    "vllm:decode": ENGINE,
    "vllm:fp32": ENGINE | {"mode": "prefill", "dtype": "fp32", "kv_cache_dtype": "fp32"},
    "fsdp": {"mode": "train", "dtype": "bf16", "autocast": None},
    "reference:fp32": {"mode": "reference", "dtype": "fp32", "seconds": 2.5},
    "plain:bf16": {"mode": "plain", "dtype": "bf16", "seconds": 1.5},
    "fsdp:fp32": {"mode": "train", "dtype": "fp32", "autocast": None},
}


TRAINERS = ("excess-trainer", "gap-trainer")


def rollout() -> Rollout:
    n = PROMPTS * SAMPLES
    mask = np.tile(np.arange(RESPONSE + 1) > 0, n)
    return Rollout(
        token_ids=np.where(mask, 0, np.repeat(np.arange(PROMPTS), len(mask) // PROMPTS)),
        offsets=np.arange(n + 1) * (RESPONSE + 1),
        action_mask=mask,
        turn=mask.astype(np.int64),
        prompt_index=np.repeat(np.arange(PROMPTS), SAMPLES),
        finish_reason=("length",) * n,
        sampling=Sampling(),
        fingerprint={"engine": "vllm"},
    )


def run_of(
    size: dict[str, float] | None = None, facts: dict[str, dict[str, Any]] | None = None
) -> RunArtefacts:
    """A run whose scorings are float32 plus rounding of one size; bf16 sides share half of it.

    Args:
        size: scoring -> factor on its own rounding.
        facts: scoring -> further entries of its fingerprint.
    """
    sampled, rng = rollout(), np.random.default_rng(3)
    exact = -rng.gamma(0.5, 0.7, sampled.n_actions)
    shared = rng.standard_t(5, sampled.n_actions)
    scorings = {}
    for name, fingerprint in NAMES.items():
        own = rng.standard_t(5, sampled.n_actions)
        scale = 2e-7 if fingerprint["dtype"] == "fp32" else 0.005
        noise = scale * (size or {}).get(name, 1.0) * (shared + own)
        given = COMMON | fingerprint | (facts or {}).get(name, {})
        scorings[name] = Scoring(name, sampled.token_ids[sampled.actions], exact + noise, given)
    decode, train = scorings["vllm:decode"], scorings["fsdp"]
    return RunArtefacts(sampled, decode, train, None, scorings, {})  # type: ignore[arg-type]


def square(run: RunArtefacts, spec: CheckSpec = SPEC) -> Square:
    measured = measure(run, spec)
    assert isinstance(measured, Square)
    return measured


def standings(measured: Square) -> dict[str, str]:
    """By evidence and whose scoring it is, which is not always whose fault it is."""
    names = {"implementation-gap": "gap-engine", "implementation-gap-trainer": "gap-trainer"}
    ids = [(check_id(finding), finding.standing) for finding in measured.findings]
    return {names.get(id, id): standing for id, standing in ids}


def test_rounding_alone_is_within_on_both_sides() -> None:
    measured = square(run_of())
    assert standings(measured) == dict.fromkeys(
        ("excess-engine", "excess-trainer", "gap-engine", "gap-trainer"), "within"
    )
    for leg in measured.legs:
        assert leg.excess.value == pytest.approx(1.0, abs=0.06)
        assert leg.excess.low is not None
        assert leg.excess.low < 1.0 < (leg.excess.high or 0)
        assert leg.excess.n_prompts == PROMPTS
    assert {check.status for check in square_checks(measured)} == {"passed"}
    assert measured.correlation is not None
    assert measured.correlation.value == pytest.approx(0.5, abs=0.06)
    assert measured.seconds == {"reference:fp32": 2.5, "plain:bf16": 1.5}


def with_own_rounding(run: RunArtefacts) -> RunArtefacts:
    """The trainer rounds as much as before, and elsewhere than engine and plain forward."""
    right = run.usable["fsdp"].logprobs - run.usable["fsdp:fp32"].logprobs
    moved = np.random.default_rng(9).permutation(right)
    train = replace(run.train, logprobs=run.usable["fsdp:fp32"].logprobs + moved)
    return replace(run, train=train, usable={**run.usable, "fsdp": train})


@pytest.mark.parametrize(
    ("run", "status"),
    [
        (run_of(), "passed"),
        (with_own_rounding(run_of()), "inconclusive"),
        (with_own_rounding(run_of(facts={"fsdp": {"device": "NVIDIA H100"}})), None),
        (with_own_rounding(run_of(facts={"vllm:decode": {"adapter": {"as": "own"}}})), None),
        (with_own_rounding(run_of({"fsdp:fp32": 1e4})), None),  # another function: no rounding
    ],
)
def test_of_sides_that_round_as_much_and_not_alike_a_module_decides(
    run: RunArtefacts, status: str | None
) -> None:
    measured = square(run)
    found = {check.id: check.status for check in square_checks(measured)}
    assert found.get("rounding-alike") == status
    assert found.get("excess-trainer") == "passed" or status is None
    place = "input norm of layers 0 to 3 in fsdp"
    named = {check.id: check for check in square_checks(measured, {"trainer": place})}
    unlike = status == "inconclusive"
    assert sides_at_fault(measured) == [] or status is None  # rounding alone blames no side
    sides: tuple[Side, ...] = ("engine", "trainer")
    located = [Cause("rounding-differs", "confirmed", each, None, ()) for each in sides]
    assert (of_sides_at_fault(located, measured) == located) is unlike
    if unlike:
        assert named["rounding-alike"].status == "failed"
        assert place in named["rounding-alike"].detail


def test_what_the_engine_in_float32_did_not_run_is_not_tested() -> None:
    facts: dict[str, Any] = {"vllm:fp32": {"not_tested": [to_json(WITHOUT_MLA)]}}
    measured = square(run_of(facts=facts))
    assert measured.not_judged == (WITHOUT_MLA,)
    assert set(standings(measured).values()) == {"within"}


def of_first_layers(run: RunArtefacts, off: float = 0.0, **layers: list[int]) -> RunArtefacts:
    """The run of an engine whose first 2 of 24 layers alone fit in float32, ``off`` nats apart."""
    held = {}
    for name in ("vllm:fp32", "reference:fp32", "plain:bf16"):
        key, scoring = Key(name), run.usable[name]
        named = Key.of(key.side, "first-layers", key.precision)
        moved = 0.5 * scoring.logprobs + off * (name == "vllm:fp32")  # another model's
        facts = scoring.fingerprint | {"layers": layers.get(key.side, [2, 24])}
        held[named] = replace(scoring, name=named, logprobs=moved, fingerprint=facts)
    usable = {name: each for name, each in run.usable.items() if name != "vllm:fp32"}
    refused = {"vllm:fp32": "80.7 GiB needed"}
    return replace(run, usable=usable, refused=refused, first={str(n): s for n, s in held.items()})


def test_the_function_is_checked_on_the_first_layers_where_no_more_fit() -> None:
    measured = square(of_first_layers(run_of()))
    assert set(standings(measured).values()) == {"within"}
    assert measured.unmeasured == ()
    checks = {check.id: check for check in square_checks(measured)}
    assert {check.status for check in checks.values()} == {"passed"}
    assert numbers(checks["implementation-gap"].detail)[-2:] == [2, 24]
    assert numbers(checks["implementation-gap-trainer"].detail)[-2:] != [2, 24]
    assert [numbers(entry.reason) for entry in measured.not_judged] == [[2, 24]]
    gap = next(gap for gap in measured.gaps if "first-layers" in gap.left)
    assert (gap.right, gap.side) == ("reference:first-layers:fp32", "either")
    said = section(measured, make_report()).sentences[0]
    assert numbers(said)[-2:] == [2, 24]


def test_another_function_in_the_first_layers_fails() -> None:
    measured = square(of_first_layers(run_of(), off=0.01))
    assert standings(measured)["gap-engine"] == "beyond"
    failed = [check for check in square_checks(measured) if check.status == "failed"]
    assert [check.id for check in failed] == ["implementation-gap"]
    assert numbers(failed[0].detail)[-2:] == [2, 24]


def test_the_first_layers_are_judged_by_their_own_rounding() -> None:
    """Not by that of the whole model, which may cost a hundred times as much."""
    floors = {}
    for size in (1.0, 100.0):
        whole = run_of(size={"plain:bf16": size})
        run = replace(of_first_layers(run_of()), usable=of_first_layers(whole).usable)
        floors[size] = {gap.left: gap.floor for gap in square(run).gaps}
    own = [floor["vllm:first-layers:fp32"] for floor in floors.values()]
    assert own[0] == own[1]
    assert floors[100.0]["fsdp:fp32"] == pytest.approx(100 * floors[1.0]["fsdp:fp32"], rel=0.1)


def test_different_first_layers_and_a_missing_plain_forward_show_nothing() -> None:
    runs = [of_first_layers(run_of(), reference=[4, 24]), of_first_layers(run_of())]
    del runs[1].first["plain:first-layers:bf16"]
    for run in runs:
        measured = square(run)
        assert measured.unmeasured == ("implementation-gap",)
        check = next(c for c in square_checks(measured) if c.id == "implementation-gap")
        assert check.status == "inconclusive"
        assert "more memory" not in check.fix
        assert "80.7 GiB needed" in check.detail
    whole = run_of()
    both = replace(of_first_layers(whole), usable=whole.usable)
    assert [gap.left for gap in square(both).gaps] == ["vllm:fp32", "fsdp:fp32"]


def of_first_samples(run: RunArtefacts, off: float = 0.0, at: int | None = None) -> RunArtefacts:
    """The run whose sides in float32 scored first samples alone; the trainer is ``off`` nats."""
    part = run.rollout.only(run.rollout.first_samples)
    sequence = run.rollout.sequence_of_token[run.rollout.actions]
    kept = np.isin(sequence, run.rollout.first_samples)
    few = {}
    for name in ("vllm:fp32", "fsdp:fp32"):
        own = run.usable[name]
        logprobs = own.logprobs[kept] + (off if name == "fsdp:fp32" and at is None else 0.0)
        if name == "fsdp:fp32" and at is not None:
            logprobs[at] += off
        few[name] = replace(own, token_ids=part.token_ids[part.actions], logprobs=logprobs)
    usable = {name: each for name, each in run.usable.items() if name not in few}
    return replace(run, usable=usable, few=few)


def test_first_samples_show_what_all_samples_show() -> None:
    whole, few = square(run_of()), square(of_first_samples(run_of()))
    assert {gap.left for gap in few.gaps} == {gap.left for gap in whole.gaps}
    assert few.unmeasured == ()
    assert set(standings(few).values()) == {"within"}
    assert all(gap.size.n_tokens < whole.gaps[0].size.n_tokens for gap in few.gaps)
    assert len(few.not_judged) == len(whole.not_judged) + 2
    failed = square(of_first_samples(run_of(), off=0.01))
    assert standings(failed)["gap-trainer"] == "beyond"


def test_a_far_token_of_first_samples_is_named_by_its_place_in_the_run() -> None:
    run = run_of(facts={name: {"moe": False} for name in ("reference:fp32", "fsdp:fp32")})
    part = run.rollout.only(run.rollout.first_samples)
    place = part.n_actions - 1
    finding = next(
        each
        for each in square(of_first_samples(run, off=1.0, at=place)).findings
        if each.far is not None
    )
    token = finding.far.worst[0]
    assert token.sequence == run.rollout.first_samples[-1]
    assert run.rollout.sequences()[token.sequence][token.position] == token.token


@pytest.mark.parametrize("status", ["passed", "failed"])
def test_weights_that_differ_and_sides_that_agree_are_never_both_said(status: Any) -> None:
    measured, report = square(run_of()), make_report()
    checks = (Check("weights-as-loaded", status, "lm_head.weight"),)
    report = replace(report.with_analyses(square=measured), checks=checks)
    said = section(measured, report).sentences[0]
    assert ("agree" in said) == (status == "passed")
    both = next(each for each in answers(report) if each.question == "Both sides")
    assert ("agree" in both.text) == (status == "passed")


@pytest.mark.parametrize(
    ("name", "factor", "check"),
    [
        ("vllm:decode", 1.5, "excess-engine"),
        ("fsdp", 1.5, "excess-trainer"),
        ("vllm:fp32", 1000.0, "implementation-gap"),
    ],
)
def test_a_side_that_rounds_more_is_named_and_no_other(
    name: str, factor: float, check: str
) -> None:
    measured = square(run_of({name: factor}))
    failed = [check.id for check in square_checks(measured) if check.status == "failed"]
    assert failed == [check]
    beyond = next(f for f in measured.findings if f.standing == "beyond")
    assert beyond.scoring == name


def test_a_lower_yardstick_would_be_seen_as_both_sides_off() -> None:
    measured = square(run_of({"plain:bf16": 0.5}))
    assert standings(measured)["excess-engine"] == standings(measured)["excess-trainer"] == "beyond"


def test_the_gap_has_the_floor_that_rounding_predicts() -> None:
    run = run_of()
    gap, _ = square(run).gaps
    yardstick = run.usable["plain:bf16"].logprobs - run.usable["reference:fp32"].logprobs
    assert gap.floor == pytest.approx(np.abs(yardstick).mean() / 2**16)
    delta = run.usable["reference:fp32"].logprobs - run.usable["vllm:fp32"].logprobs
    assert gap.size.value == pytest.approx(np.abs(delta).mean())
    assert gap.largest.value == pytest.approx(np.abs(delta).max())


def test_the_level_of_the_gap_follows_what_rounding_costs_the_model() -> None:
    """Random Mixtral: bf16 costs 0.33 nats, float32 6e-6, which would be far off elsewhere."""
    same = {"vllm:fp32": 30.0}
    assert standings(square(run_of(same)))["gap-engine"] == "within"
    assert standings(square(run_of({"vllm:fp32": 100.0})))["gap-engine"] == "beyond"
    rough = dict.fromkeys(("vllm:decode", "fsdp", "plain:bf16"), 60.0)
    assert standings(square(run_of({"vllm:fp32": 100.0} | rough)))["gap-engine"] == "within"


@pytest.mark.parametrize("agrees", [None, "vllm:fp32", "reference:fp32"])
def test_a_gap_of_the_engine_names_a_side_only_where_a_third_implementation_votes(
    agrees: str | None,
) -> None:
    """The reference is the trainer's model code: either of the two may be wrong."""
    run = run_of({"vllm:fp32": 1e3})
    if agrees is not None:
        own = run.usable[agrees]
        facts = own.fingerprint | {"engine": "sglang", "mode": "prefill"}
        run.usable["sglang:prefill"] = replace(own, name="sglang:prefill", fingerprint=facts)
    measured = square(run)
    side = {None: "either", "vllm:fp32": "trainer", "reference:fp32": "engine"}[agrees]
    assert sides_at_fault(measured) == [side]
    (check,) = [check for check in square_checks(measured) if check.status == "failed"]
    assert check.id == "implementation-gap"
    assert not {"cache", "quantisation"} & set(check.fix.replace(",", "").split())
    text = " ".join(section(measured, make_report()).sentences)
    assert ("model code" in text) == (side == "either")
    headline = headline_of(make_report().with_analyses(square=measured))
    assert headline.side_at_fault == side


def with_second_engine(size: float, **facts: Any) -> RunArtefacts:
    """A run whose tokens a second engine has scored too, with this much rounding."""
    run = run_of()
    own = run_of({"vllm:decode": size}).usable["vllm:decode"]
    given = own.fingerprint | {"engine": "sglang", "mode": "prefill"} | facts
    run.usable["sglang:prefill"] = replace(own, name="sglang:prefill", fingerprint=given)
    return run


def test_another_engine_that_scored_the_tokens_is_judged_by_the_same_yardstick() -> None:
    status = {}
    for size in (1.0, 2.0):
        checks = {check.id: check for check in square_checks(square(with_second_engine(size)))}
        status[size] = checks["excess-other-engine"].status
        assert checks["excess-engine"].status == "passed"
    assert status == {1.0: "passed", 2.0: "failed"}
    other = square(with_second_engine(1.0, dtype="fp16"))
    assert "excess of sglang:prefill" in {entry.what for entry in other.not_judged}


def test_a_device_without_levels_of_its_own_is_judged_by_the_general_ones() -> None:
    gpu = {name: {"device": "NVIDIA H100"} for name in NAMES}
    clean = square(run_of(facts=gpu))
    assert not clean.calibrated
    assert set(standings(clean).values()) == {"within"}
    assert {check.status for check in square_checks(clean)} == {"passed"}
    faulty = square(
        run_of({"vllm:decode": 1.5, "fsdp": 2.5, "vllm:fp32": 2e4, "fsdp:fp32": 3e3}, gpu)
    )
    assert standings(faulty) == {  # the engine's float32 pass, which is wrong, gives no excess
        "excess-trainer": "beyond", "gap-engine": "beyond", "gap-trainer": "undecided",
    }  # fmt: skip


@pytest.mark.parametrize(("side", "exact"), [("engine", "vllm:fp32"), ("trainer", "fsdp:fp32")])
def test_next_to_a_float32_pass_with_the_same_fault_a_side_passes_no_check(
    side: str, exact: str
) -> None:
    measured = square(run_of({exact: 1e4}))
    ids = {check.id: check.status for check in square_checks(measured)}
    assert not ids.keys() & {f"excess-{side}", f"displaced-{side}"}
    assert "failed" in ids.values()
    assert "inconclusive" not in ids.values()  # nothing is missing
    assert [entry.reason for entry in measured.not_judged].count(SAME_FAULT) >= 1
    assert {leg.side for leg in measured.legs} == {"engine", "trainer"} - {side}


def test_a_trainer_that_is_off_in_float32_is_at_fault() -> None:
    measured = square(run_of({"fsdp:fp32": 1e3}))
    assert standings(measured)["gap-trainer"] == "beyond"
    assert sides_at_fault(measured) == ["trainer"]
    assert all(leg.exact == "fsdp:fp32" for leg in measured.legs if leg.side == "trainer")


def test_without_the_trainer_in_float32_a_run_is_not_healthy() -> None:
    run = run_of()
    fewer = {name: scoring for name, scoring in run.usable.items() if name != "fsdp:fp32"}
    measured = square(replace(run, usable=fewer, refused={"fsdp:fp32": "no memory"}))
    assert measured.unmeasured == ("implementation-gap-trainer",)
    assert verdict((), square_checks(measured), None).correctness.status == "inconclusive"


def test_a_value_above_its_level_within_its_interval_is_undecided() -> None:
    run = run_of({"vllm:decode": 1.23})
    few = replace(run.rollout, prompt_index=np.repeat(np.arange(4), PROMPTS * SAMPLES // 4))
    measured = square(replace(run, rollout=few))
    engine = next(f for f in measured.findings if f.side == "engine")
    checks = square_checks(measured)
    assert {check.id: check.status for check in checks}["excess-engine"] == "inconclusive"
    fit = Judgement("k3_kl", "healthy", 1e-4, 1e-3, 1e-2, "test")
    assert verdict([fit], checks, "bf16 dense").status == "inconclusive"
    assert engine.value.low is not None
    assert engine.value.low < LEVELS["cpu"].excess < engine.value.value
    assert engine.standing == "undecided"


def test_an_interval_that_reaches_beyond_its_level_excludes_no_fault() -> None:
    run = run_of({"vllm:decode": 1.15})
    few = replace(run.rollout, prompt_index=np.repeat(np.arange(4), PROMPTS * SAMPLES // 4))
    measured = square(replace(run, rollout=few))
    engine = next(f for f in measured.findings if f.side == "engine")
    assert engine.value.high is not None
    assert engine.value.value < LEVELS["cpu"].excess < engine.value.high
    assert engine.standing == "wide"
    assert {check.id: check.status for check in square_checks(measured)}[
        "excess-engine"
    ] == "warning"


@pytest.mark.parametrize(
    ("ends", "standing"),
    [
        ((1.0, 0.9, 1.1), "within"),
        ((1.0, 0.9, 1.3), "wide"),
        ((1.0, None, None), "wide"),  # one prompt
        ((1.3, 1.1, 1.5), "undecided"),
        ((math.nan, math.nan, math.nan), "undecided"),
        ((math.inf, None, None), "undecided"),
        ((1.5, 1.3, 1.7), "beyond"),
    ],
)
def test_a_value_is_within_its_level_only_with_its_interval(
    ends: tuple[float, float | None, float | None], standing: str
) -> None:
    value, low, high = ends
    leg = square(run_of()).legs[0]
    measured = replace(leg, excess=replace(leg.excess, value=value, low=low, high=high))
    finding = judged(measured, Bound(1.2, 1.2))
    assert finding.standing == standing


def test_a_constant_shift_is_an_excess() -> None:
    run = run_of()
    shifted = replace(run.decode, logprobs=run.decode.logprobs - 0.02)
    measured = square(replace(run, usable=run.usable | {"vllm:decode": shifted}))
    assert standings(measured)["excess-engine"] == "beyond"


@pytest.mark.parametrize(
    ("facts", "judged"),
    [
        ({"vllm:decode": {"logprobs_temperature": 0.7}}, {*TRAINERS, "gap-engine"}),
        ({"vllm:decode": {"logprobs_truncated": True}}, {*TRAINERS, "gap-engine"}),
        ({"vllm:decode": {"dtype": None}}, {*TRAINERS, "gap-engine"}),
        ({"vllm:decode": {"quantization": "fp8"}}, {*TRAINERS, "gap-engine"}),
        ({"vllm:fp32": {"weights_form": "mxfp4-rounded"}}, {*TRAINERS, "excess-engine"}),
        ({"vllm:fp32": {"logprobs_temperature": 0.7}}, {*TRAINERS}),
    ],
)
def test_what_has_no_yardstick_is_not_judged_and_not_healthy(
    facts: dict[str, dict[str, Any]], judged: set[str]
) -> None:
    measured = square(run_of(facts=facts))
    assert standings(measured).keys() == judged
    assert len(measured.not_judged) == 4 - len(judged)
    assert len(measured.unmeasured) == 4 - len(judged)
    checks = square_checks(measured)
    open_ = {check.id for check in checks if check.status == "inconclusive"}
    assert open_ == set(measured.unmeasured)
    assert verdict((), checks, None).correctness.status == "inconclusive"


def test_each_precision_has_its_own_yardstick() -> None:
    run = run_of(
        {"vllm:decode": 0.125}, {"vllm:decode": {"dtype": "fp16", "kv_cache_dtype": "fp16"}}
    )
    assert "excess-engine" not in standings(square(run))
    plain = run.usable["plain:bf16"]
    exact = run.usable["reference:fp32"].logprobs
    other = replace(plain, name="plain:fp16", logprobs=exact + (plain.logprobs - exact) / 8)
    measured = square(replace(run, usable=run.usable | {"plain:fp16": other}))
    leg = next(leg for leg in measured.legs if leg.side == "engine")
    assert leg.plain == "plain:fp16"
    assert leg.excess.value == pytest.approx(1.0, abs=0.06)


def test_a_float32_trainer_is_judged_by_its_gap() -> None:
    measured = square(run_of({"fsdp": 1.0}, {"fsdp": {"dtype": "fp32"}}))
    assert (
        standings(measured)["gap-trainer"] == "beyond"
    )  # it rounds as bf16 does, and says float32
    assert "excess-trainer" not in standings(measured)


def test_without_the_engine_in_float32_its_leg_starts_at_the_reference() -> None:
    run = run_of({"vllm:decode": 1.5})
    fewer = {name: scoring for name, scoring in run.usable.items() if name != "vllm:fp32"}
    measured = square(replace(run, usable=fewer, refused={"vllm:fp32": "no memory"}))
    assert next(leg for leg in measured.legs if leg.side == "engine").exact == "reference:fp32"
    assert standings(measured)["excess-engine"] == "beyond"
    assert [entry.reason for entry in measured.not_judged] == ["no memory"]


def plain_passes(spec: CheckSpec) -> list[Pass]:
    passes = [pass_ for pass_ in training_passes(spec) if not pass_.folder]
    return [pass_ for pass_ in passes if pass_.name.startswith("plain:")]


@pytest.mark.parametrize("change", [{"quick": True}, {"noise_floor": False}])
def test_what_was_switched_off_is_not_tested(change: dict[str, bool]) -> None:
    assert isinstance(measure(run_of(), replace(SPEC, **change)), NotTested)
    assert plain_passes(replace(SPEC, **change)) == []


def test_a_spike_is_cut_alike_on_both_sides() -> None:
    rng = np.random.default_rng(0)
    away, plain = rng.normal(size=(2, 4000))
    away[7] = 500.0
    means = excess_terms(away, plain).mean(axis=0)
    assert np.sqrt(means[0] / means[1]) == pytest.approx(1.0, abs=0.1)
    swapped = excess_terms(plain, away).mean(axis=0)
    np.testing.assert_allclose(swapped, means[[1, 0, 3, 2]])


# ---------------------------------------------------------------- passes


VLLM = {"dtype": "bf16", "quantization": "mxfp4", "kv_cache_dtype": "bf16"}
MXFP8 = {
    "dtype": "bf16",
    "quantization": "mxfp4",
    "moe_runner_backend": "flashinfer_mxfp4",
    "flashinfer_mxfp4_moe_precision": "default",
}


@pytest.mark.parametrize(
    ("facts", "precision"),
    [
        ({"dtype": "bf16"}, "bf16"),
        ({"dtype": "torch.float16", "kv_cache_dtype": "auto"}, "fp16"),
        ({"dtype": "fp32", "autocast": "bf16"}, "bf16"),
        ({"dtype": "bf16", "kv_cache_dtype": "fp8"}, "bf16-fp8kv"),
        ({"dtype": "bf16", "kv_cache_dtype": "fp8_e5m2"}, None),
        ({"dtype": "bf16", "quantization": "mxfp4"}, "bf16"),
        ({"dtype": "bf16", "quantization": "fp8"}, None),
        (MXFP8 | {"flashinfer_mxfp4_moe_precision": "default"}, None),
        (MXFP8 | {"flashinfer_mxfp4_moe_precision": "bf16"}, "bf16"),
        (VLLM | {"moe_backend": "TrtLlmExperts (FLASHINFER_TRTLLM_MXFP4_MXFP8)"}, None),
        (VLLM | {"moe_backend": "TrtLlmExperts (FLASHINFER_TRTLLM_MXFP4_BF16)"}, "bf16"),
        (MXFP8 | {"moe_runner_backend": "triton"}, "bf16"),
        ({"dtype": None}, None),
    ],
)
def test_precision_of_a_side(facts: dict[str, Any], precision: str | None) -> None:
    assert precision_of(facts) == precision


def test_one_plain_pass_for_each_precision_in_use() -> None:
    engine = replace(SPEC.rollout.engine, dtype="fp16", args=(("kv-cache-dtype", "fp8"),))
    spec = replace(SPEC, rollout=replace(SPEC.rollout, engine=engine))
    specs = {pass_.name: pass_.spec for pass_ in plain_passes(spec)}
    assert specs.keys() == {"plain:bf16", "plain:fp16-fp8kv"}
    assert (specs["plain:bf16"].dtype, specs["plain:bf16"].master_dtype) == ("bf16", "auto")
    assert specs["plain:bf16"].attention == "plain"
    assert specs["plain:fp16-fp8kv"].attention == "plain-fp8-kv"
    assert [pass_.name for pass_ in training_passes(SPEC)].count("plain:bf16") == 1


def test_a_plain_forward_undoes_whatever_the_trainer_does() -> None:
    odd = TrainSpec(
        model="m", dtype="fp32", autocast="bf16", head_dtype="fp32", router_dtype="fp32",
        layout="packing", temperature_in="logits", logprobs_dtype="bf16", replay_routing="ids",
        attention="no-sinks", grad=True, inject=(("router-noise", 0.1),),
    )  # fmt: skip
    assert plain_of(odd, "bf16") == plain_of(TrainSpec(model="m"), "bf16")


DECLARED = {"temperature_in": "logits", "autocast": "bf16", "head_dtype": "fp32"}


@pytest.mark.parametrize("declared", [{}, *({name: DECLARED[name]} for name in DECLARED)])
def test_a_trainer_that_declares_how_it_rounds_has_a_yardstick_of_its_own(
    declared: dict[str, Any],
) -> None:
    sampling = Sampling(temperature=0.7)
    spec = replace(
        SPEC,
        rollout=replace(SPEC.rollout, sampling=sampling),
        train=replace(SPEC.train, **declared),
    )
    passes = {pass_.name: pass_.spec for pass_ in plain_passes(spec)}
    assert ("plain:trainer" in passes) == bool(declared)
    assert passes["plain:bf16"] == plain_passes(SPEC)[0].spec
    for name, value in declared.items():
        assert getattr(passes["plain:trainer"], name) == value


def test_what_a_trainer_declares_is_no_excess() -> None:
    run = run_of({"fsdp": 1.5})
    assert standings(square(run))["excess-trainer"] == "beyond"
    own = run_of({"plain:bf16": 1.5}).usable["plain:bf16"]
    run.usable["plain:trainer"] = replace(own, name="plain:trainer")
    measured = square(run)
    assert set(standings(measured).values()) == {"within"}
    assert measured.declared is not None
    assert measured.declared.value == pytest.approx(1.5, rel=0.1)


def test_equal_prompts_are_one_for_every_interval() -> None:
    run = run_of()
    copies = replace(run.rollout, token_ids=np.zeros_like(run.rollout.token_ids))
    assert {leg.excess.n_prompts for leg in square(replace(run, rollout=copies)).legs} == {1}
    pair = Pair.of(copies, run.decode, run.train)
    assert len(np.unique(pair.prompt)) == 1


def test_the_engine_in_float32_keeps_all_but_its_precision() -> None:
    args = (("kv_cache_dtype", "fp8"), ("hf_overrides", {"rms_norm_eps": 1e-3}))
    engine = replace(SPEC.rollout.engine, args=args, routing=True)
    exact = float32_engine(replace(SPEC.rollout, engine=engine))
    assert exact is not None
    assert exact.engine.dtype == "fp32"
    # A fault in a setting stays, and shows in the gap; graphs serve no step of scoring.
    assert exact.engine.args == (*args[1:], ("enforce_eager", True))
    assert exact.sampling == SPEC.rollout.sampling


@pytest.mark.parametrize("own", ["--enforce-eager", "compilation_config"])
def test_what_the_user_says_of_graphs_holds_in_float32_too(own: str) -> None:
    engine = replace(SPEC.rollout.engine, args=((own, True),))
    exact = float32_engine(replace(SPEC.rollout, engine=engine))
    assert exact is not None
    assert exact.engine.args == engine.args


def test_an_engine_in_float32_is_not_started_twice_and_servers_not_at_all() -> None:
    engine = replace(SPEC.rollout.engine, dtype="fp32")
    assert float32_engine(replace(SPEC.rollout, engine=engine)) is None
    served = replace(SPEC.rollout.engine, servers=("http://localhost:1",))
    with pytest.raises(MismatchError):
        float32_engine(replace(SPEC.rollout, engine=served))


def test_the_reason_why_the_engine_did_not_start_in_float32_is_in_the_report(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "run")
    sampled = store.load_rollout(run)
    for name, dtype in (("reference:fp32", "fp32"), ("plain:bf16", "bf16")):
        base = store.load_scoring(run, "fsdp")
        noise = 0.002 * np.random.default_rng(len(name)).normal(size=len(base.logprobs))
        facts = base.fingerprint | {"dtype": dtype, "mode": name.partition(":")[0]}
        scoring = replace(base, name=name, logprobs=base.logprobs + noise, fingerprint=facts)
        store.save_scoring(run, scoring, sampled)
    write_error(run, LABEL, MismatchError(NO_KERNELS))
    report, _ = build_report(run, replace(made_spec(), noise_floor=True))
    reasons = {entry.what: entry.reason for entry in report.result("square").not_judged}
    assert [why for what, why in reasons.items() if what.endswith(" gap of transformers")] == [
        NO_KERNELS
    ]
    assert any(NO_KERNELS in entry.reason for entry in report.not_tested)
    assert "excess-engine" in {check.id for check in report.checks}
    pairs = [(comparison.rollout, comparison.train) for comparison in report.comparisons]
    assert not any("plain" in name for pair in pairs for name in pair)


@pytest.mark.parametrize("label", [LABEL, pass_label("fsdp:fp32")])
@pytest.mark.parametrize("kind", [MismatchError, WrongAnswer])
def test_a_pass_that_is_missing_for_what_it_answered_is_a_failed_check(
    tmp_path: Path, label: str, kind: type[MismatchError]
) -> None:
    run = make_run(tmp_path / "run")
    write_error(run, label, kind("scored 3 other tokens"))
    report, _ = build_report(run, replace(made_spec(), noise_floor=True))
    found = [check.status for check in report.checks if check.id == "passes-answered"]
    assert found == (["failed"] if kind is WrongAnswer else [])


# ---------------------------------------------------------------- single tokens in float32


DENSE, MOE = {"reference:fp32": {"moe": False}}, {"reference:fp32": {"moe": True}}
IN_FLOAT32 = {"vllm:fp32": "gap-engine", "fsdp:fp32": "gap-trainer"}


def shifted(run: RunArtefacts, names: tuple[str, ...], nats: float, *tokens: int) -> RunArtefacts:
    """Change single action tokens of scorings, in place."""
    for name in names:
        run.usable[name].logprobs[list(tokens)] += nats
    return run


@pytest.mark.parametrize("names", [("vllm:decode", "vllm:fp32"), ("fsdp", "fsdp:fp32")])
@pytest.mark.parametrize("nats", [0.1, -0.1, 2e-3])
def test_one_token_of_a_dense_model_that_float32_moves_fails(
    names: tuple[str, ...], nats: float
) -> None:
    run = run_of(facts=DENSE)
    token = run.rollout.actions[1234]
    run = shifted(run, names, nats, 1234)
    run.rollout.token_ids[token] = 77
    measured = square(run)
    found = standings(measured)
    gap = IN_FLOAT32[names[1]]
    assert (found.pop(gap), found.pop({*IN_FLOAT32.values()}.difference({gap}).pop())) == (
        "beyond",
        "within",
    )
    (far,) = [finding.far for finding in measured.findings if finding.far]
    (worst,) = far.worst
    place = divmod(int(token), RESPONSE + 1)
    assert (worst.token, worst.sequence, worst.position) == (77, *place)
    assert worst.nats == pytest.approx(abs(nats), rel=0.02)
    side = "trainer" if names[0] == "fsdp" else "either"
    assert sides_at_fault(measured) == [side]
    (failed,) = [check for check in square_checks(measured) if check.status == "failed"]
    assert numbers(failed.detail)[-4:-1] == [77, place[1], place[0]]


@pytest.mark.parametrize("size", [None, {"plain:bf16": 300.0}])
def test_of_many_tokens_the_three_farthest_are_named(size: dict[str, float] | None) -> None:
    """A model whose precision costs much is given 50 times what float32 costs it."""
    run = run_of(size, facts=DENSE)
    for number in range(5):
        shifted(run, ("fsdp:fp32",), 0.002 * (1 + number), 1000 * number)
    run.usable["fsdp:fp32"].logprobs[4500] += 1.0
    far = {finding.scoring: finding.far for finding in square(run).findings}["fsdp:fp32"]
    assert far is not None
    assert far.count == (6 if size is None else 1)
    assert far.bound == (1e-3 if size is None else pytest.approx(0.015, rel=0.9))
    assert [each.nats for each in far.worst] == sorted((t.nats for t in far.worst), reverse=True)
    assert len(far.worst) == min(3, far.count)


@pytest.mark.parametrize("seed", range(20))
def test_float32_noise_with_heavy_tails_fails_no_token(seed: int) -> None:
    run, rng = run_of(facts=DENSE), np.random.default_rng(seed)
    for name in ("vllm:fp32", "fsdp:fp32", "reference:fp32"):
        values = run.usable[name].logprobs
        values += 2e-7 * rng.standard_t(2.5, len(values)) * np.exp(rng.normal(0, 1.5, len(values)))
    assert not [finding for finding in square(run).findings if finding.far]


def routes(run: RunArtefacts, *changed: int) -> Routing:
    """Return two layers' experts; other ones in some tokens."""
    n = len(run.rollout.token_ids)
    ids = np.tile(np.array([[0, 1], [2, 3]]), (n, 1, 1))
    ids[list(changed), 1] = (4, 5)
    return Routing((0, 1), 8, ids, np.ones(n, bool))


@pytest.mark.parametrize(
    ("before", "known", "found"),
    [(None, True, True), (0, True, False), (3, True, False), (-1, True, True), (41, True, True),
     (None, False, False)],
)  # fmt: skip
def test_a_token_of_a_moe_fails_only_where_no_route_explains_it(
    before: int | None, known: bool, found: bool
) -> None:
    """Its own route, or an earlier one of its sequence, may have moved it; a later one may not."""
    run = shifted(run_of(facts=MOE), ("fsdp:fp32",), 0.1, 1234)
    row = int(run.rollout.actions[1234]) - 1  # that predicts it
    changed = () if before is None else (row - before,)
    if known:
        for name, given in (("fsdp:fp32", changed), ("reference:fp32", ())):
            run.usable[name] = replace(run.usable[name], routing=routes(run, *given))
    assert [finding.scoring for finding in square(run).findings if finding.far] == (
        ["fsdp:fp32"] if found else []
    )


@pytest.mark.parametrize("prompts", [1, 2, 4])
def test_a_wrong_row_of_the_embedding_is_found_in_few_prompts(tmp_path: Path, prompts: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    rare, n, length = 7, 2 * PROMPTS, RESPONSE + 1
    ids = torch.from_numpy(np.random.default_rng(0).integers(8, 300, (n, length)))
    ids[: 2 * prompts : 2, 20] = rare

    def scored(dtype: torch.dtype, factor: float, batch: int) -> np.ndarray:
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
        with torch.no_grad():
            model.model.embed_tokens.weight[rare] *= factor
            logits = torch.cat([model(input_ids=part).logits for part in ids.split(batch)])
        logprobs = logits[:, :-1].double().log_softmax(-1).gather(2, ids[:, 1:, None])
        return np.asarray(logprobs.flatten())

    checkpoint = make("llama", tmp_path / "model")
    run = run_of(facts=DENSE)
    exact = scored(torch.float32, 1.0, 128)
    of_bf16 = scored(torch.bfloat16, 1.0, 128)
    given = dict.fromkeys(run.usable, of_bf16) | {
        "reference:fp32": exact,
        "vllm:fp32": scored(torch.float32, 1.0, 16),
        "fsdp:fp32": scored(torch.float32, 1.3, 16),
        "fsdp": scored(torch.bfloat16, 1.3, 16),
    }
    for name, values in given.items():
        run.usable[name].logprobs[:] = values
    run.rollout.token_ids[:] = ids.flatten()
    found = {finding.scoring: finding.far for finding in square(run).findings if finding.far}
    assert list(found) == ["fsdp:fp32"]
    assert {each.sequence for each in found["fsdp:fp32"].worst} <= set(range(0, 2 * prompts, 2))


# ---------------------------------------------------------------- the engine in float32


class Starter:
    """Starts no engine; notes what would be started, and fails where it is told to."""

    def __init__(self, run_dir: Path, spec: CheckSpec, error: MismatchError | None = None) -> None:
        self.run_dir, self.spec, self.error = run_dir, spec, error
        self.started: list[RolloutSpec] = []
        self.room = Room()
        self.notes: list[str] = []
        self.tasks: tuple[Any, ...] = ()
        self.narrator = self

    def note(self, text: str) -> None:
        self.notes.append(text)

    @contextmanager
    def engine(self, spec: RolloutSpec, label: str, *tasks: Any) -> Iterator[Any]:
        self.started.append(spec)
        self.tasks = tasks
        yield None

    def wait(self, worker: Any, key: str, title: str, *beside: Any) -> None:
        if self.error is not None:
            raise self.error


def test_an_engine_that_cannot_run_in_float32_is_no_failure_of_the_check(tmp_path: Path) -> None:
    starter = Starter(tmp_path, SPEC, MismatchError(NO_KERNELS))
    score_in_float32(starter)
    assert [spec.engine.dtype for spec in starter.started] == ["fp32"]
    left = read_error(tmp_path, LABEL)
    assert left is not None
    assert left.message == NO_KERNELS
    starter.error = None
    score_in_float32(starter)
    assert read_error(tmp_path, LABEL) is None  # an earlier reason is forgotten


def test_what_is_scored_in_float32_already_starts_no_engine(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    spec = replace(made_spec(), noise_floor=True)
    exact = float32_engine(spec.rollout)
    assert exact is not None
    scoring = replace(store.load_scoring(run, "fsdp"), name="transformers:fp32")
    store.save_scoring(run, scoring, store.load_rollout(run), made_by=exact)
    starter = Starter(run, spec)
    score_in_float32(starter)
    assert starter.started == []
    other = replace(spec.rollout, engine=replace(spec.rollout.engine, model="other"))
    again = Starter(run, replace(spec, rollout=other))
    score_in_float32(again)
    assert len(again.started) == 1


def test_too_little_memory_starts_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    monkeypatch.setattr("mismatch.processes.stages.local_gpus", lambda: 0)
    monkeypatch.setattr("mismatch.processes.stages.RESERVE", 1 << 60)
    engine = replace(SPEC.rollout.engine, model=str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    starter = Starter(tmp_path, replace(SPEC, rollout=replace(SPEC.rollout, engine=engine)))
    score_in_float32(starter)
    assert starter.started == []
    assert read_error(tmp_path, LABEL) is not None


def test_a_float32_pass_that_a_framework_computed_in_bf16_is_no_corner() -> None:
    """TRL under transformers 4 kept the autocast of its first trainer; its gap would be a fault."""
    own = {"fsdp:fp32": {"dtype": "bf16", "autocast": "bf16"}}
    measured = square(run_of({"fsdp:fp32": 30.0}, own))
    assert [gap.left for gap in measured.gaps] == ["vllm:fp32"]
    assert any("bf16" in entry.reason for entry in measured.not_judged)
    assert "implementation-gap-trainer" in measured.unmeasured
    legs = {leg.scoring: leg.exact for leg in measured.legs}
    assert legs["fsdp"] == "reference:fp32"
