"""Causes beside rounding: sides in float32, few tokens, sides that are lost."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest

from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.detectors import packs
from mismatch.keys import REFERENCE
from mismatch.types import Bools, NotTested, Scoring
from tests import drawn_pair as drawn
from tests.diagnosed import causes, first, healthy, stating
from tests.drawn_pair import scored

# ---------------------------------------------------------------- the engine in float32


def in_float32(strength: float, kv_noise: float = 0.0, at: int | None = None) -> Case:
    """The engine computes another function (from a position on), and rounds ``kv_noise`` more."""
    draw = drawn.draw(7, length=60)
    odd = strength * draw.rng.standard_normal(draw.logits.shape)
    odd = odd if at is None else odd * (draw.position >= at)[:, None]
    exact = draw.logits + odd
    draw.engine = draw.engine + odd + kv_noise * draw.rng.standard_normal(draw.logits.shape)
    case = stating(draw.case(), {"device": "cpu"}, {"device": "cpu"})
    ids = case.engine.token_ids
    logprobs = drawn.log_law(exact)[np.arange(len(ids)), ids]
    other = Scoring("vllm:fp32", ids, logprobs, {})
    return replace(case, others=case.others | {other.name: other})


@pytest.mark.parametrize("strength", [0.02, 0.1, 0.5])
def test_a_gap_in_float32_is_named_even_below_the_rounding(strength: float) -> None:
    leading = first(in_float32(strength))
    assert (leading.id, leading.side) == ("side-off", "either")
    assert leading.effect is not None
    assert leading.effect.low is not None
    assert leading.effect.low > 0


def test_equal_implementations_have_no_gap() -> None:
    assert causes(in_float32(0.0)).ranked == ()


def test_a_gap_that_begins_somewhere_is_an_onset() -> None:
    case = in_float32(0.3, at=40)
    assert first(stating(case, {"sliding_window": 40}, {})).id == "sliding-window"
    assert first(case).id == "onset"


def test_a_gap_is_named_on_a_device_without_levels_of_its_own() -> None:
    case = stating(in_float32(0.5), {"device": "H100"}, {"device": "H100"})
    assert (first(case).id, first(case).side) == ("side-off", "either")


def test_a_trainer_that_is_off_in_float32_is_named() -> None:
    """It shares its model code with the reference, so that the gap is its own."""
    case = in_float32(0.3)
    exact = case.others["vllm:fp32"].logprobs
    off = replace(case.others[REFERENCE], name="fsdp:fp32", logprobs=exact)
    others = {name: case.others[name] for name in (REFERENCE, "plain:bf16")} | {off.name: off}
    leading = first(scored(replace(case, others=others), case.right, case.left))
    assert (leading.id, leading.side) == ("function-differs", "trainer")


@pytest.mark.parametrize(("agrees", "side"), [("engine", "trainer"), ("reference", "engine")])
def test_a_third_implementation_says_which_side_of_a_gap_is_off(agrees: str, side: str) -> None:
    case = in_float32(0.3)
    exact = case.others["vllm:fp32" if agrees == "engine" else REFERENCE]
    third = replace(exact, name="sglang:prefill", fingerprint={"dtype": "fp32"})
    assert first(case).side == "either"
    assert first(replace(case, others=case.others | {third.name: third})).side == side


@pytest.mark.parametrize("in_memory", [True, False])
def test_weights_that_are_equal_in_memory_leave_the_function(in_memory: bool) -> None:
    held = {"weights": {"norm.weight": [1, 2, 3, 4]}}
    case = stating(in_float32(0.3), held | {"weights_in_memory": in_memory}, held)
    assert first(case).id == ("function-differs" if in_memory else "side-off")


# ---------------------------------------------------------------- beside rounding, and destroyed


@pytest.mark.parametrize("offset", [-0.05, 0.05, -0.5])
@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_a_constant_is_a_law_that_does_not_sum_to_one(offset: float, side: str) -> None:
    case = healthy(1)
    moved = (
        scored(case, case.left + offset)
        if side == "engine"
        else scored(case, None, case.right + offset)
    )
    assert [(c.id, c.side) for c in causes(moved).ranked] == [("unnormalised-law", side)]
    assert first(moved).status == "suspected"
    if offset > 0:
        return  # seen in probabilities above 1
    name = "vllm:fp32" if side == "engine" else "fsdp:fp32"
    exact = replace(case.others[REFERENCE], name=name)
    assert first(replace(moved, others=moved.others | {name: exact})).status == "confirmed"


@pytest.mark.parametrize("scale", [1.02, 0.9])
def test_a_nearly_deterministic_policy_of_other_weights_is_no_other_sum(scale: float) -> None:
    """Its tokens all lack as much to certainty, so that a scale moves all of them alike."""
    draw = drawn.draw(1)
    certain = np.zeros_like(draw.logits)
    certain[:, 0] = 9.0
    most = np.arange(len(certain)) % 10 > 0
    for name in ("logits", "engine", "trainer"):
        whole = getattr(draw, name)
        whole[most] = certain[most] + 0.01 * (whole - draw.logits)[most]
    draw.trainer = draw.trainer * scale
    ranked = causes(draw.case()).ranked
    assert "unnormalised-law" not in {cause.id for cause in ranked}


def test_a_side_of_which_nothing_is_left_is_given_no_temperature_and_no_place() -> None:
    case = healthy(2)
    rng = np.random.default_rng(2)
    for level in (-1.0, -5.0):
        lost = scored(case, None, level - rng.exponential(1.0, len(case.right)))
        assert {c.id for c in causes(lost).ranked} <= {"side-off"}
        assert first(lost).side == "trainer"


@pytest.mark.parametrize("rounding", [0.02, 0.3])
def test_faults_of_single_tokens_are_named_beside_large_rounding(rounding: float) -> None:
    case = healthy(3, rounding=rounding)
    last = np.zeros(len(case.right), bool)
    last[[row.stop - 1 for row in case.rows]] = True
    exact = case.others["reference:fp32"]
    exact = replace(exact, logprobs=exact.logprobs - last)  # unlikely in float32 as well
    ended = scored(replace(case, others={exact.name: exact}), None, case.right - last)
    assert [(c.id, c.side) for c in causes(ended).ranked] == [("appended-eos", "engine")]
    mantissa, exponent = np.frexp(case.right)
    rounded = scored(case, None, np.ldexp(np.round(mantissa * 2**8) / 2**8, exponent))
    assert [(c.id, c.side) for c in causes(rounded).ranked] == [("bf16-logprobs", "trainer")]


def test_two_rows_in_a_noisy_run_are_paired_again() -> None:
    case = healthy(4, rounding=0.3)
    right, rows = case.right.copy(), case.rows
    for row, other in ((3, 40), (40, 77), (77, 3)):
        length = min(rows[row].stop - rows[row].start, rows[other].stop - rows[other].start)
        start, its = rows[row].start, rows[other].start
        right[start : start + length] = case.right[its : its + length]
    assert first(scored(case, None, right)).id == "row-pairing"


def test_a_small_cause_behind_a_shift_is_named() -> None:
    """A tenth of a nat of the shift's whole nat: 4 % of the mismatch, and half of what is left."""
    plain = drawn.other_weights(2, 3)
    edges = np.cumsum([row.stop - row.start for row in plain.rows])[:-1]
    right = np.concatenate([np.roll(row, -1) for row in np.split(plain.right, edges)])
    ranked = causes(replace(plain, right=right)).ranked
    assert [cause.id for cause in ranked] == ["misalignment", "side-off"]
    assert ranked[1].effect is not None
    assert ranked[1].effect.value < 0.05


def in_dtypes(engine: str, trainer: str, fault: float = 0.0, seed: int = 0) -> Case:
    """A pair of which a side in "fp32" does not round; the trainer's function may be another."""
    draw = drawn.draw(seed)
    confident = np.exp(drawn.log_law(draw.logits)).max(axis=1, keepdims=True) ** 3
    draw.engine = draw.logits.copy() if engine == "fp32" else draw.engine
    draw.trainer = draw.logits.copy() if trainer == "fp32" else draw.trainer
    draw.trainer += fault * confident * draw.rng.standard_normal(draw.logits.shape)
    return stating(draw.case(), {"dtype": engine}, {"dtype": trainer})


def test_in_float32_small_faults_are_named_on_their_side() -> None:
    assert causes(in_dtypes("fp32", "fp32")).ranked == ()
    leading = first(in_dtypes("fp32", "fp32", fault=0.05))
    assert (leading.id, leading.side) == ("side-off", "trainer")


@pytest.mark.parametrize(("engine", "trainer"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_a_side_that_alone_rounds_is_the_precision(engine: str, trainer: str) -> None:
    coarse = "engine" if trainer == "fp32" else "trainer"
    (only,) = causes(in_dtypes(engine, trainer)).ranked
    assert (only.id, only.side) == ("precision", coarse)
    assert only.effect is not None
    assert only.effect.value > 0.95


def test_a_fault_in_float32_is_told_from_the_rounding_of_the_other_side() -> None:
    leading = first(in_dtypes("bf16", "fp32", fault=0.2))
    assert (leading.id, leading.side) == ("side-off", "trainer")


def test_autocast_around_float32_is_named_where_it_is_stated() -> None:
    case = stating(in_dtypes("fp32", "bf16"), {"dtype": "fp32"}, {"dtype": "fp32"})
    assert first(case).id in ("precision", "side-off")
    stated = stating(case, {}, {"autocast": "bf16"})
    assert [(c.id, c.side) for c in causes(stated).ranked] == [("trainer-autocast", "trainer")]


def leaking(seed: int, budget: int) -> Case:
    """Rows in packs of so many tokens; all but the first row of a pack are far off."""
    case = healthy(seed)
    right, rng, used = case.right.copy(), np.random.default_rng(seed), budget
    for row, length in zip(case.rows, np.diff(case.rollout.offsets), strict=True):
        used += int(length)
        if used > budget:
            used = int(length)
            continue
        right[row] -= rng.exponential(1.0, row.stop - row.start)
    return scored(case, None, right)


@pytest.mark.parametrize("seed", [0, 1])
def test_rows_of_a_pack_that_see_each_other_are_named(seed: int) -> None:
    (only,) = causes(leaking(seed, 1200)).ranked
    assert (only.id, only.side) == ("packing-leak", "trainer")
    # Rows that agree at places of no order are no packs.
    case, right = healthy(seed), healthy(seed).right.copy()
    for number, row in enumerate(case.rows):
        if number not in (0, 3, 40, 44, 90):
            right[row] -= np.random.default_rng(number).exponential(1.0, row.stop - row.start)
    assert "packing-leak" not in {cause.id for cause in causes(scored(case, None, right)).ranked}


def test_rows_of_few_tokens_tell_nothing_of_packs() -> None:
    case = drawn.draw(0, length=4).case()
    assert len(case.rows) > packs.MIN_ROWS
    with warnings.catch_warnings(action="error"):
        assert isinstance(packs.packs(case), NotTested)


def rolled(case: Case, by: int) -> Case:
    """The trainer's numbers of every row are those of ``by`` tokens further on."""
    return scored(case, None, np.concatenate([np.roll(case.right[row], -by) for row in case.rows]))


@pytest.mark.parametrize("by", [1, -2])
def test_a_shift_of_rows_that_see_each_other_is_seen_in_the_rows_that_open_packs(by: int) -> None:
    ranked = {cause.id: cause for cause in causes(rolled(leaking(0, 1200), by)).ranked}
    assert set(ranked) == {"packing-leak", "misalignment"}
    assert ranked["packing-leak"].side == "trainer"
    assert ("best lag", -by) in [
        (each.what, each.value) for each in ranked["misalignment"].evidence
    ]


def test_rows_that_are_paired_and_rows_of_others_show_no_lag() -> None:
    for case in (leaking(0, 1200), leaking(1, 1200), drawn.swapped_rows(0, 128)):
        assert "misalignment" not in {cause.id for cause in causes(case).ranked}


def test_a_lag_with_few_partners_is_not_taken_before_one_with_many() -> None:
    """Rolled rows of one length fit at their length minus one as well, in one token each."""
    draw = drawn.draw(3)
    count, length = len(draw.logits) // 100 * 2, 50
    for name in ("logits", "engine", "trainer", "position"):
        setattr(draw, name, getattr(draw, name)[: count * length])
    draw.lengths, draw.prompt = np.full(count, length), np.repeat(np.arange(count // 2), 2)
    confident = np.exp(drawn.log_law(draw.logits)).max(axis=1, keepdims=True) ** 3
    draw.trainer = draw.trainer + confident * draw.rng.standard_normal(draw.logits.shape)
    ranked = causes(rolled(draw.case(), 1)).ranked
    assert [cause.id for cause in ranked] == ["misalignment", "side-off"]
    assert ("best lag", -1) in [(each.what, each.value) for each in ranked[0].evidence]


def moved(case: Case, where: Bools, times: float) -> Case:
    """The engine's rounding so many times as large in some tokens."""
    reference = case.others[REFERENCE].logprobs
    left = np.where(where, reference + (case.left - reference) * times, case.left)
    return scored(case, np.minimum(left, -1e-6))


@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_that_open_blocks_are_not_scattered_and_no_onset(seed: int) -> None:
    case = healthy(seed, rounding=0.12, length=60)
    for times in (8, 30):
        (only,) = causes(moved(case, (case.position - 1) % 16 == 0, times)).ranked
        assert (only.id, only.side) == ("kv-block", "engine"), times
        (length,) = [e.value for e in only.evidence if e.what.startswith("block length")]
        assert length == 16


@pytest.mark.parametrize("seed", [0, 1])
def test_an_onset_has_the_side_that_is_off_behind_it(seed: int) -> None:
    case = healthy(seed, rounding=0.08, length=60)
    leading = first(moved(case, case.position >= 70, 5))
    assert (leading.id, leading.side) == ("onset", "engine")


def test_a_decode_that_flipped_in_a_few_prompts_is_no_path_of_its_own() -> None:
    case = healthy(6)
    for rows, named in ((case.prompt < 4, []), (case.prompt % 2 == 0, ["decode-vs-prefill"])):
        rng = np.random.default_rng(6)
        left = case.left + rows * rng.uniform(-0.4, 0.4, len(case.left))
        prefill = Scoring("vllm:prefill", case.engine.token_ids, case.right.copy(), {})
        others = {**case.others, "vllm:prefill": prefill}
        moved = scored(replace(case, others=others), np.minimum(left, -1e-6))
        ids = [cause.id for cause in causes(moved).ranked]
        assert [id for id in ids if id == "decode-vs-prefill"] == named


def test_other_weights_are_not_named_that_the_float32_passes_exclude() -> None:
    """The engine started in float32 agrees with the reference: its weights are no cause."""
    case = healthy(7)
    assert case.reference is not None
    blind = scored(case, np.minimum(case.reference + 4 * (case.left - case.reference), -1e-6))
    assert [(c.id, c.side) for c in causes(blind).ranked] == [("side-off", "either")]
    exact = Scoring("vllm:fp32", case.engine.token_ids, case.reference, {})
    seen = replace(blind, others={**blind.others, exact.name: exact})
    assert [(c.id, c.side) for c in causes(seen).ranked] == [("side-off", "engine")]


def test_noise_from_pass_to_pass_is_the_trainers_own() -> None:
    """Both passes are as far from float32 as from each other: a plain forward is the yardstick."""
    case, rng = healthy(8), np.random.default_rng(8)
    noisy = [np.minimum(case.right + 0.1 * rng.standard_normal(len(case.right)), -1e-6)
             for _ in range(2)]  # fmt: skip
    again = replace(case.trainer, name="fsdp:repeated", logprobs=noisy[1])
    case = scored(replace(case, others={**case.others, again.name: again}), None, noisy[0])
    leading = first(case)
    assert (leading.id, leading.side, leading.status) == ("nondeterminism", "trainer", "confirmed")


def test_what_float32_is_certain_of_may_be_exactly_0() -> None:
    case = healthy(9)
    assert case.reference is not None
    certain = case.reference > np.log(0.99)
    exact = replace(
        case.others["reference:fp32"], logprobs=np.where(certain, -1e-7, case.reference)
    )
    case = replace(case, others={**case.others, exact.name: exact})
    rng = np.random.default_rng(9)
    lower = np.where(certain, case.right - rng.uniform(0, 0.5, len(certain)), case.right)
    off = scored(case, np.where(certain, 0.0, case.left), lower)
    assert "appended-eos" not in {cause.id for cause in causes(off).ranked}


def test_an_engine_that_is_nearer_to_float32_than_the_trainer_has_cut_no_law() -> None:
    """A trainer whose law is lower where it is open looks as if the engine's had been cut."""
    case = healthy(2)
    assert case.entropy is not None
    case = scored(case, None, case.right - 0.2 * case.entropy)
    ranked = [cause.id for cause in causes(case).ranked]
    assert ranked
    assert "sampling-truncation" not in ranked
    assert first(replace(case, others={})).id == "sampling-truncation"
    assert first(drawn.top_k(2, 8)).id == "sampling-truncation"
