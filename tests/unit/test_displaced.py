"""Displaced prompts: faults of few tokens, small shifts and single responses do not pass.

Synthetic scorings with heavy tails; planted on either side, and silent where nothing is planted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import planted_arrays
from benchmarks.planted_arrays import Tokens
from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.detector import detectors
from mismatch.analysis.diagnosis.ranking import diagnose
from mismatch.analysis.displaced import LEVELS, displaced, levels_for, sign_test
from mismatch.analysis.levels import verdict
from mismatch.analysis.plugins import RunArtefacts
from mismatch.analysis.results import sides_at_fault
from mismatch.analysis.square import measure
from mismatch.analysis.square_checks import square_checks
from mismatch.reports.sections import square as section
from mismatch.types import Floats
from tests.unit.test_square import SPEC, run_of, square

CPU = LEVELS["cpu"]


def with_fault(
    fault: str | Callable[[Tokens], Floats], side: str, run: RunArtefacts | None = None
) -> RunArtefacts:
    """A run with a fault of benchmarks/planted_arrays.py, or another one, in one side."""
    run = run or run_of()
    sequence = run.rollout.sequence_of_token[run.rollout.actions]
    scoring = run.usable[side]
    plant = planted_arrays.FAULTS[fault] if isinstance(fault, str) else fault
    tokens = Tokens(
        scoring.logprobs,
        scoring.logprobs - run.usable["reference:fp32"].logprobs,
        sequence,
        run.rollout.prompt_index[sequence],
    )
    faulty = replace(scoring, logprobs=plant(tokens))
    return replace(run, usable=run.usable | {side: faulty},
                   decode=faulty if side == run.decode.name else run.decode,
                   train=faulty if side == run.train.name else run.train)  # fmt: skip


@pytest.mark.parametrize("side", ["vllm:decode", "fsdp"])
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("every 200th token off by 1 nat", "rare"),
        ("every 200th token off by 0.3 nats", "rare"),
        ("all tokens off by 0.005 nats", "shift"),
        ("half of the prompts 0.01 nats up, half down", "shift"),
    ],
)
def test_a_fault_that_the_excess_may_hide_is_beyond_on_its_side(
    fault: str, kind: str, side: str
) -> None:
    measured = square(with_fault(fault, side))
    beyond = {(d.scoring, d.kind) for d in measured.displaced if d.standing == "beyond"}
    assert (side, kind) in beyond
    assert {scoring for scoring, _ in beyond} == {side}
    twice = replace(measured, displaced=measured.displaced * 2)
    assert section.sentences(twice) == section.sentences(measured)  # a sentence a side
    assert set(sides_at_fault(measured)) == {"engine" if side == "vllm:decode" else "trainer"}
    assert verdict((), square_checks(measured), None).status == "broken"


@pytest.mark.parametrize("side", ["vllm:decode", "fsdp"])
@pytest.mark.parametrize(
    ("fault", "status"),
    [("one response wholly wrong", "inconclusive"),
     ("one prompt's tokens off by 0.3 nats", "broken")],
)  # fmt: skip
def test_a_single_prompt_does_not_pass(fault: str, status: str, side: str) -> None:
    """The excess may call it broken; that one prompt lies beyond, alone, does not."""
    measured = square(with_fault(fault, side))
    (only,) = (only for only in measured.displaced if only.standing != "within")
    assert (only.scoring, only.kind, only.beyond, only.plain_beyond) == (side, "response", 1, 0)
    assert only.standing == "undecided"
    assert verdict((), square_checks(measured), None).status == status


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (planted_arrays.every(199, 1.0), "side-off"),
        (planted_arrays.shift(0.005), "unnormalised-law"),
        (planted_arrays.last_token, "appended-eos"),
    ],
)
def test_a_fault_of_few_tokens_or_of_all_by_one_constant_is_named(
    fault: Callable[[Tokens], Floats], cause: str
) -> None:
    """And not other weights, nor another function; with the engine in float32 or without."""
    run = with_fault(fault, "vllm:decode", run_of({"vllm:decode": 0.1, "fsdp": 0.1}))
    others = {name: each for name, each in run.usable.items() if name != "vllm:fp32"}
    for passes, side in ((run.usable, "engine"), (others, "either")):
        ranked = diagnose(Case.of(run.rollout, run.decode, run.train, passes), detectors()).ranked
        assert [each.id for each in ranked] == [cause]
        assert ranked[0].side == (side if cause == "side-off" else "engine")


def test_rounding_with_heavy_tails_is_within() -> None:
    """Tails of index 1.5, blown up on single tokens of either side."""
    standings = set()
    for seed in range(60):
        draw = np.random.default_rng(seed)
        away, plain = 0.01 * draw.standard_t(1.5, (2, 64 * 30))
        prompt = np.repeat(np.arange(64), 30)
        rows = displaced("engine", "e", away, plain, prompt, prompt, CPU)
        standings |= {row.standing for row in rows}
    assert standings == {"within"}


def test_the_law_of_the_side_that_sampled_is_no_shift() -> None:
    """Over its own samples an engine lies above float32 by a KL, half of its variance."""
    draw = np.random.default_rng(0)
    plain = draw.normal(0, 0.5, 64 * 400)
    away = draw.normal(0.125, 0.5, 64 * 400)
    prompt = np.repeat(np.arange(64), 400)
    by_kind = {d.kind: d for d in displaced("engine", "e", away, plain, prompt, prompt, CPU)}
    assert by_kind["shift"].standing == "within"
    further = displaced("engine", "e", away + 0.4, plain, prompt, prompt, CPU)
    assert {d.kind: d.standing for d in further}["shift"] == "beyond"


@pytest.mark.parametrize(
    ("prompts", "standing"), [(64, "beyond"), (14, "beyond"), (10, "undecided"), (5, "undecided")]
)
def test_few_prompts_leave_it_open(prompts: int, standing: str) -> None:
    draw = np.random.default_rng(0)
    prompt = np.repeat(np.arange(prompts), 40)
    away, plain = 0.01 * draw.normal(size=(2, len(prompt)))
    away[::40] += 1.0
    by_kind = {d.kind: d for d in displaced("engine", "e", away, plain, prompt, prompt, CPU)}
    assert by_kind["rare"].standing == standing
    assert by_kind["rare"].chance == pytest.approx(0.5**prompts)
    assert (by_kind["rare"].beyond, by_kind["rare"].plain_beyond) == (prompts, 0)


def test_general_levels_let_a_factor_of_two_pass() -> None:
    draw = np.random.default_rng(0)
    prompt = np.repeat(np.arange(64), 40)
    away, plain = 0.01 * draw.normal(size=(2, len(prompt)))

    def standings(values: Floats) -> dict[str, str]:
        rows = displaced("engine", "e", values, plain, prompt, prompt, levels_for("some GPU"))
        return {row.kind: row.standing for row in rows}

    assert set(standings(away).values()) == {"within"}
    assert standings(1.8 * away)["rare"] == "within"
    assert standings(away + 0.5 * (np.arange(len(away)) % 40 == 0))["rare"] == "beyond"


def test_the_sign_test_counts_discordant_units() -> None:
    plain = np.arange(20.0)
    same = sign_test(plain, plain)
    assert same.chance == 1.0
    above = sign_test(plain + np.where(np.arange(20) < 10, 100, 0), plain)
    assert (above.beyond, above.other_beyond, above.bound) == (10, 0, 19.0)
    assert above.chance == pytest.approx(2**-10)
    largest = sign_test(np.array([5.0, 0.0, 0.0]), np.array([1.0, 2.0, 3.0]), only_largest=True)
    assert (largest.bound, largest.beyond, largest.chance) == (3.0, 1, 0.5)


def test_a_second_engine_is_looked_at_as_well() -> None:
    from tests.unit.test_square import with_second_engine

    run = with_second_engine(1.0)
    name = next(name for name in run.usable if name.startswith("sglang"))
    faulty = with_fault("every 200th token off by 1 nat", name, run)
    measured = measure(faulty, SPEC)
    assert {check.id: check.status for check in square_checks(measured)}[  # type: ignore[arg-type]
        "displaced-other-engine"
    ] == "failed"
    assert measure(run, SPEC) is not None


def test_without_the_engine_in_float32_the_side_is_not_certain_on_the_page_either() -> None:
    run = with_fault("all tokens off by 0.002 nats", "vllm:decode")
    usable = {name: scoring for name, scoring in run.usable.items() if name != "vllm:fp32"}
    measured = square(replace(run, usable=usable))
    measured = replace(
        measured, findings=tuple(f for f in measured.findings if f.standing != "beyond")
    )
    assert set(sides_at_fault(measured)) == {"either"}
    assert "model code" in section.sentences(measured)[0]
