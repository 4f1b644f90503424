"""Which cause comes first, with which share and how sure: properties over generated findings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch.analysis.cause_results import KINDS, LEADS, MODULE, Cause, Causes, Evidence, Side
from mismatch.analysis.causes import led_by
from mismatch.analysis.diagnosis.case import Case, Repair
from mismatch.analysis.diagnosis.detector import Detector, Finding, Look
from mismatch.analysis.diagnosis.legs import gap_of
from mismatch.analysis.diagnosis.loaded_weights import NOT_OF_CHECKPOINT
from mismatch.analysis.diagnosis.possible import impossible
from mismatch.analysis.diagnosis.ranking import OF_WEIGHTS, diagnose, in_order
from mismatch.keys import TRAINER_FLOAT32
from mismatch.types import Estimate
from tests import drawn_pair as drawn
from tests.diagnosed import stating

CASE = drawn.other_weights(0, 5)
SIDES: st.SearchStrategy[Side] = st.sampled_from(["engine", "trainer", "either"])
IDS = (*KINDS, "attention-sinks", "rope-config", "row-pairing", "weights-differ", "lora-scale")
SHARES = st.none() | st.floats(0.0, 1.0)


def estimate(value: float | None) -> Estimate | None:
    return None if value is None else Estimate(value, value, value, 9, 9, 9)


@st.composite
def found(draw: st.DrawFn) -> Cause:
    status = draw(st.sampled_from(["suspected", "confirmed"]))
    id, side = draw(st.sampled_from(IDS)), draw(SIDES)
    effect = estimate(draw(SHARES))
    return Cause(id, status, side, effect, (), fact=draw(st.booleans()))  # type: ignore[arg-type]


@given(st.lists(found(), max_size=6))
def test_the_larger_share_comes_first_among_causes_that_are_equally_sure(
    causes: list[Cause],
) -> None:
    ordered = in_order(causes)
    assert sorted(map(id, ordered)) == sorted(map(id, causes))
    left = 1.0 - sum(c.effect.value for c in causes if c.effect)
    shares = [c.effect.value if c.effect else max(0.0, left) for c in ordered]
    leads = [
        (c.status == "confirmed" or c.fact) and share >= LEADS
        for c, share in zip(ordered, shares, strict=True)
    ]
    assert leads == sorted(leads, reverse=True)
    for flag in (True, False):
        own = [share for share, lead in zip(shares, leads, strict=True) if lead == flag]
        assert own == sorted(own, reverse=True)


@st.composite
def findings(draw: st.DrawFn) -> list[Finding]:
    """Two gaps in float32, repaired by any part, and differences that sides state."""
    parts = draw(st.lists(st.floats(-0.5, 1.5), min_size=1, max_size=2))
    gaps: list[Finding] = []
    for side, part in zip(("either", "trainer"), parts, strict=False):
        repair = Repair(CASE.left, CASE.right - part * CASE.delta)
        name = CASE.float32_name if side == "either" else TRAINER_FLOAT32
        evidence = (Evidence(gap_of(name), 1.0),)
        gone = CASE.gone(repair)
        effect = gone if gone.value > 0 else None
        cause = "side-off" if side == "either" else "function-differs"
        gaps.append(Finding(cause, side, effect, evidence,  # type: ignore[arg-type]
                            alike=("attention-sinks", "rope-config"), repair=repair))  # fmt: skip
    stated = [
        Finding(
            cause,
            side,
            None,
            (Evidence("stated", cause),),
            certain=True,
            stated=True,
            fact=cause in OF_WEIGHTS,
        )
        for cause, side in draw(
            st.lists(
                st.tuples(st.sampled_from(["weights-differ", "attention-sinks", "fp8-kv"]), SIDES),
                max_size=3,
                unique_by=lambda pair: pair[0],
            )
        )
    ]
    return [*gaps, *stated]


def causes_of(case: Case, given: list[Finding]) -> Causes:
    """What these findings become, each the result of a detector of its own."""
    ids = {"side-off": "implementation", "function-differs": "implementation-trainer"}
    detectors = [
        Detector(ids.get(f.cause, f.cause), "function", (f.cause,),
                 lambda _, f=f: Look(f.evidence, (f,)), order=39 if f.repair else 60)
        for f in given
    ]  # fmt: skip
    return diagnose(case, detectors)


@settings(deadline=None, max_examples=150)
@given(findings())
def test_shares_are_shares_and_no_difference_takes_the_gap_of_a_side_that_it_cannot_be_on(
    given: list[Finding],
) -> None:
    facts = {NOT_OF_CHECKPOINT: []}
    result = causes_of(stating(CASE, facts, facts), given)
    assert not result.failures
    engines, trainers = gap_of(CASE.float32_name), gap_of(TRAINER_FLOAT32)
    for cause in result.ranked:
        assert cause.effect is None or cause.effect.value <= 1.0
        assert cause.status == "suspected"  # no experiment was part of these
        of = {item.what for item in cause.evidence}
        assert not {engines, trainers} <= of  # one difference is not both sides'
        if cause.fact and cause.id in OF_WEIGHTS and cause.effect is not None:
            assert trainers not in of  # the trainer holds what its files do
        if engines in of and "stated" in of:
            assert cause.side != "trainer"  # the reference has none of the trainer's settings
    assert len({id(cause) for cause in result.ranked}) == len(result.ranked)


@given(st.lists(found(), max_size=4), st.lists(st.tuples(SIDES, SHARES), max_size=2))
def test_a_module_confirms_only_what_it_can_be_on_its_side(
    causes: list[Cause], modules: list[tuple[Side, float | None]]
) -> None:
    given = [replace(cause, status="suspected") for cause in causes]
    place = (Evidence(MODULE, "attention of layer 0 in x"),)
    located = [
        Cause("function-differs", "confirmed", side, None, place, ("attention-sinks",), fact=True)
        for side, _ in modules
    ]
    after = led_by(Causes(tuple(given), (), (), (), 0.01, 0.0), located).ranked
    for cause in after:
        here = any(item.what == MODULE for item in cause.evidence)
        assert (cause.status == "confirmed") <= here
        if here and cause.id not in KINDS:
            assert cause.id == "attention-sinks"
            assert any(cause.side in (m.side, "either") or m.side == "either" for m in located)
    kept = {"row-pairing", "rope-config", "lora-scale"}
    names = [cause.id for cause in given if cause.id in kept]
    assert sorted(names) == sorted(cause.id for cause in after if cause.id in kept)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "moe": st.booleans(),
            "layout": st.sampled_from(["padding", "packing"]),
            "honours_sinks": st.none() | st.booleans(),
            "prefix_caching": st.booleans(),
            "config": st.fixed_dictionaries(
                {}, optional={"sliding_window": st.lists(st.none() | st.integers(1, 9), max_size=2)}
            ),
        },
    )
)
def test_what_a_side_leaves_open_rules_nothing_out(stated: dict[str, object]) -> None:
    facts: dict[str, object] = stated
    cannot = impossible({}, {})
    assert cannot == frozenset()
    cannot = impossible(facts, facts)  # type: ignore[arg-type]
    config = facts.get("config") or {}
    assert isinstance(config, dict)
    if any(config.get("sliding_window") or ()):
        assert "sliding-window" not in cannot
    if facts.get("moe", True):
        assert "experts-differ" not in cannot
    if facts.get("honours_sinks", True) is not None:
        assert "attention-sinks" not in cannot
    assert np.all([isinstance(name, str) for name in cannot])
