"""Faults of later turns: named with their turn where planted, and a clean run names none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mismatch.analysis.cause_results import Cause
from mismatch.analysis.diagnosis.case import Case
from mismatch.analysis.diagnosis.detector import detectors
from mismatch.analysis.diagnosis.pass_checks import turns_agree
from mismatch.analysis.diagnosis.ranking import TURNS, diagnose
from mismatch.analysis.diagnosis.semantics import missing_logprobs
from mismatch.types import CACHED, Check, Floats, Routing
from tests import drawn_pair as drawn
from tests.drawn_pair import scored
from tests.texts import numbers


def clean(seed: int = 0, **how: float) -> Case:
    return drawn.turned(drawn.draw(seed, **{"prompts": 32, **how}).case())  # type: ignore[arg-type]


def first(case: Case) -> Cause:
    result = diagnose(case, detectors())
    assert result.failures == ()
    return result.ranked[0]


def turns_of(cause: Cause) -> str:
    return next(str(item.value) for item in cause.evidence if item.what == TURNS)


def check(case: Case) -> Check:
    return turns_agree(case.rollout, case.engine, case.trainer, case.others)


@pytest.mark.parametrize("rounding", [0.005, 0.02, 0.08, 0.2])
def test_a_clean_run_names_none(rounding: float) -> None:
    for seed in range(2):
        case = clean(seed, rounding=rounding, sharpness=(1.5, 3.0, 5.0)[seed % 3])
        assert diagnose(case, detectors()).ranked == ()
        assert check(case).status == "passed"
        bare = replace(case, others={}, engine=replace(case.engine, fingerprint={}))
        assert diagnose(bare, detectors()).ranked == ()


def other_context(seed: int, side: str, turn: int = 2) -> Case:
    """From a turn on one side reads other tokens: its law there is a function of another kind."""
    pair = drawn.draw(seed)
    plain = drawn.turned(pair.case())
    odd = drawn.other_function(seed, 1.5)
    moved = np.where(plain.turn >= turn, odd.right - odd.left, 0.0)
    if side == "engine":
        return scored(plain, left=np.minimum(plain.left - moved, 0.0))
    return scored(plain, right=np.minimum(plain.right + moved, 0.0))


@pytest.mark.parametrize("side", ["engine", "trainer"])
@pytest.mark.parametrize("turn", [2, 3])
def test_another_context_from_a_turn_on(side: str, turn: int) -> None:
    case = other_context(0, side, turn)
    cause = first(case)
    assert (cause.id, cause.side) == ("turn-context", side)
    assert turns_of(cause).startswith(str(turn))
    assert check(case).status == "failed"
    cached = replace(case.engine, fingerprint=case.engine.fingerprint | {"prefix_caching": True})
    named = first(replace(case, engine=cached)).id
    assert named == ("prefix-cache-stale" if side == "engine" else "turn-context")
    assert check(replace(case, others={})).status == "warning"  # float32 does not say so


def reading(case: Case, read: Floats) -> Case:
    return replace(case, engine=replace(case.engine, extra={CACHED: read}))


def test_what_the_engine_read_decides_between_a_cache_and_another_context() -> None:
    """Also against what its settings say."""
    case = other_context(0, "engine")
    on = replace(case.engine, fingerprint=case.engine.fingerprint | {"prefix_caching": True})
    later = case.turn > 1
    for read, cause in ((0.0, "turn-context"), (48.0, "prefix-cache-stale")):
        assert first(reading(replace(case, engine=on), np.where(later, read, 0.0))).id == cause


@pytest.mark.parametrize("among", ["later", "first"])
def test_stale_blocks_are_found_among_turns_alike(among: str) -> None:
    """Every other sequence found its context in the cache, and only those are off."""
    pair = drawn.draw(0)
    plain = drawn.turned(pair.case())
    odd = drawn.other_function(0, 1.5)
    there = (plain.turn > 1) == (among == "later")
    read = np.where(there & (plain.sequence % 2 == 0), 32.0, 0.0)
    moved = np.where(read > 0, odd.right - odd.left, 0.0)
    case = reading(scored(plain, left=np.minimum(plain.left - moved, 0.0)), read)
    cause = first(case)
    assert (cause.id, cause.side) == ("prefix-cache-stale", "engine")
    assert diagnose(reading(plain, read), detectors()).ranked == ()
    trainer = reading(scored(plain, right=np.minimum(plain.right + moved, 0.0)), read)
    assert first(trainer).id != "prefix-cache-stale"


def test_few_tokens_of_later_turns_are_said_not_to_be_judged() -> None:
    case = other_context(0, "engine")
    few = np.cumsum(case.turn > 1) <= 57
    mask = case.rollout.action_mask.copy()
    mask[case.rollout.actions[(case.turn > 1) & ~few]] = False
    detail = check(masked(case, mask)).detail
    (sentence,) = [part for part in detail.split("; ") if "not tested" in part]
    assert numbers(sentence)[:2] == [60, 57]  # tokens that it needs, and has
    assert "not tested" not in check(clean()).detail


def test_a_fault_from_a_position_on_is_not_taken_for_one_of_a_turn() -> None:
    for seed in range(1):
        case = clean(seed, length=60, prompts=24)
        noise = 0.4 * np.random.default_rng(seed).standard_normal(len(case.left))
        left = np.where(case.position >= 50, np.minimum(case.left + noise, 0.0), case.left)
        assert first(scored(case, left=left)).id == "onset"


def test_a_list_that_counts_observations_is_shifted_from_the_second_turn_on() -> None:
    case = drawn.turned(drawn.draw(1, prompts=24, length=80).case(), turns=2)
    left = case.left.copy()
    for row in case.rows:
        start = row.start + int((case.turn[row] == 1).sum())
        left[start : row.stop] = np.concatenate([[-3.0] * 7, case.left[start : row.stop - 7]])
    cause = first(scored(case, left=left))
    assert cause.id == "misalignment"
    assert turns_of(cause) == "2"
    assert -7 in [item.value for item in cause.evidence]
    assert check(scored(case, left=left)).status == "failed"


def masked(case: Case, mask: np.ndarray, fill: float | None = None) -> Case:
    """The run under another mask; tokens that were not sampled have ``fill`` on the engine's side,
    and are unlikely on the trainer's. None: as unlikely on both."""
    rollout = case.rollout
    sides = []
    for side, value in ((case.engine, -5.0 if fill is None else fill), (case.trainer, -5.0)):
        whole = np.full(len(mask), value)
        whole[rollout.actions] = side.logprobs
        entropy = np.ones(len(mask))
        if side.entropy is not None:
            entropy[rollout.actions] = side.entropy
        sides.append(
            replace(
                side,
                token_ids=rollout.token_ids[mask],
                logprobs=whole[mask],
                entropy=None if side.entropy is None else entropy[mask],
            )
        )
    return Case.of(replace(rollout, action_mask=mask), sides[0], sides[1], {})


def moved(case: Case, by: int) -> np.ndarray:
    """The mask of the responses, shifted inside each sequence."""
    parts = np.split(case.rollout.action_mask, case.rollout.offsets[1:-1])
    shifted = [np.concatenate([[False], part[:-1]]) if by > 0 else np.append(part[1:], False)
               for part in parts]  # fmt: skip
    return np.concatenate(shifted)


@pytest.mark.parametrize("fill", [0.0, None])
@pytest.mark.parametrize("kind", ["right", "left", "observations"])
def test_a_mask_that_is_off(kind: str, fill: float | None) -> None:
    case = clean(2)
    whole = case.rollout.turn > 0
    masks = {"right": moved(case, 1), "left": moved(case, -1), "observations": whole}
    odd = masked(case, masks[kind], fill)
    cause = first(odd)
    assert cause.id == "action-mask"
    assert turns_of(cause)[0] in "01"
    assert check(odd).status in ("failed", "warning")
    assert check(masked(case, case.rollout.action_mask, fill)).status == "passed"


def lowered(case: Case, rows: int, tokens: int, by: float) -> Case:
    """Stretches of as many tokens, in so many rows, that neither side finds likely."""
    low = np.zeros(len(case.left))
    for row in case.rows[:rows]:
        low[row.start + 3 : row.start + 3 + tokens] = -by
    return scored(case, case.left + low, case.right + low)


def test_stretches_that_nobody_sampled_are_more_than_unlikely_tokens() -> None:
    case = drawn.draw(0).case()
    assert first(lowered(case, 20, 6, 6.0)).id == "action-mask"
    for rows, tokens, by in ((10, 6, 6.0), (20, 1, 36.0)):  # by chance few, or single tokens
        assert diagnose(lowered(case, rows, tokens, by), detectors()).ranked == ()


def test_observations_are_seen_where_no_end_token_is_known() -> None:
    case = clean(3)
    odd = masked(case, case.rollout.turn > 0)
    odd = replace(odd, engine=replace(odd.engine, fingerprint={"dtype": "bf16"}))
    assert first(odd).id == "action-mask"


def test_an_end_token_that_a_framework_appends_and_masks_is_no_fault() -> None:
    """As in SkyRL: turns end where a stop string was seen, and begin with one word or another."""
    case = clean(4)
    mask = case.rollout.action_mask & (case.rollout.token_ids != drawn.END)
    assert diagnose(masked(case, mask), detectors()).ranked == ()


def test_routes_that_are_another_turn_s() -> None:
    case, rng = clean(5), np.random.default_rng(6)
    scores = rng.standard_normal((len(case.rollout.token_ids), 3, 16))

    def routing(values: np.ndarray) -> Routing:
        order = np.argsort(-values, axis=2)[:, :, :2].astype(np.uint8)
        return Routing((0, 1, 2), 16, order, np.ones(len(values), bool))

    def with_routes(engine: np.ndarray) -> Case:
        return replace(
            case,
            engine=replace(case.engine, routing=routing(engine)),
            trainer=replace(case.trainer, routing=routing(scores)),
        )

    late = case.rollout.turn >= 2
    gone = np.where(late[:, None, None], np.roll(scores, 20, axis=0), scores)
    assert diagnose(with_routes(scores), detectors()).ranked == ()
    cause = first(with_routes(gone))
    assert cause.id == "shifted-route-capture"
    assert cause.evidence[0].value == "2, 3"


def test_a_missing_number_is_said_with_its_turn() -> None:
    case = clean(6)
    left = np.where(case.turn == 2, np.nan, case.left)
    odd = scored(case, left=left)
    check = missing_logprobs(odd.rollout, odd.engine, odd.trainer)
    assert check.status == "failed"
    assert "turn 2" in check.detail
