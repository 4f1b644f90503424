"""Planted routing differences come out as the numbers that they are."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from mismatch.errors import MismatchError
from mismatch.metrics import METRICS, routing_pairs
from mismatch.metrics.estimator import Estimator
from mismatch.metrics.routing_pairs import (
    action_rows,
    in_other,
    load_variation,
    pair_routing,
    top_expert,
    weight_distance,
)
from mismatch.types import Rollout, Routing, Sampling

# Two sequences: prompt of 2 + 3 actions, prompt of 1 + 2 actions. Experts: 2 of 8, layers 1 and 3.
MASK = np.array([0, 0, 1, 1, 1, 0, 1, 1], bool)
ROLLOUT = Rollout(
    token_ids=np.arange(8),
    offsets=np.array([0, 5, 8]),
    action_mask=MASK,
    turn=MASK.astype(np.int64),
    prompt_index=np.array([0, 1]),
    finish_reason=("stop", "stop"),
    sampling=Sampling(),
    fingerprint={},
)


def routing(ids, *, layers=(1, 3), weights=None, margin=None, experts=8) -> Routing:
    present = np.ones(len(ids), bool)
    return Routing(layers, experts, np.asarray(ids, np.uint8), present, weights, margin)


def base() -> np.ndarray:
    """[8, 2, 2]: row t goes to experts (t, t + 1) modulo 8 in both layers."""
    first = np.arange(8)[:, None].repeat(2, axis=1)
    return np.stack([first, (first + 1) % 8], axis=2)


def flipped(*places: tuple[int, int], to: int = 7) -> np.ndarray:
    """The second expert replaced at (row, layer)."""
    ids = base()
    for row, layer in places:
        ids[row, layer, 1] = (ids[row, layer, 0] + to) % 8
    return ids


def numbers(left: Routing, right: Routing) -> dict[str, float]:
    arrays = pair_routing(ROLLOUT, left, right).arrays
    routing_metrics = [m for m in METRICS.values() if m.name.startswith(("routing", "experts"))]
    actions = ROLLOUT.actions
    estimator = Estimator(ROLLOUT.sequence_of_token[actions], ROLLOUT.prompt_index)
    return {name: e.value for name, e in estimator.all(routing_metrics, arrays).items()}


def test_row_rule_an_action_token_uses_the_row_before_it():
    assert ROLLOUT.actions.tolist() == [2, 3, 4, 6, 7]
    assert action_rows(ROLLOUT).tolist() == [1, 2, 3, 5, 6]
    for row, seen in enumerate([0, 1, 1, 1, 0, 1, 1, 0]):  # rows 0, 4 and 7 predict no action
        got = numbers(routing(base()), routing(flipped((row, 0))))
        assert got["routing_disagree_any"] == pytest.approx(seen / 5), row


def test_planted_flips_are_counted():
    got = numbers(routing(base()), routing(flipped((1, 0), (1, 1), (3, 0))))
    assert got["routing_disagree_layer"] == pytest.approx(3 / 10)
    assert got["routing_disagree_any"] == pytest.approx(2 / 5)
    assert got["routing_overlap"] == pytest.approx(1 - 3 * 0.5 / 10)
    pair = pair_routing(ROLLOUT, routing(base()), routing(flipped((1, 0), (1, 1), (3, 0))))
    assert pair.flips.tolist() == [2, 0, 1, 0, 0]


def test_identical_routing_is_exactly_zero():
    got = numbers(routing(base()), routing(base()))
    for name in ("disagree_layer", "disagree_any"):
        assert got[f"routing_{name}"] == 0.0
    assert got["routing_overlap"] == 1.0


def test_slot_order_is_no_disagreement():
    weights = np.tile(np.array([0.7, 0.3], np.float32), (8, 2, 1))
    swapped = base()
    swapped[2, 1] = swapped[2, 1, ::-1].copy()
    got = numbers(routing(base(), weights=weights), routing(swapped, weights=weights))
    assert got["routing_disagree_layer"] == 0.0
    assert got["routing_top1_disagree"] == pytest.approx(1 / 10)  # by weight, and that moved too


def test_the_first_expert_is_the_heaviest_where_a_kernel_does_not_sort():
    sorted_weights = np.tile(np.array([0.7, 0.3], np.float32), (8, 2, 1))
    unsorted = sorted_weights[:, :, ::-1]
    got = numbers(routing(base(), weights=sorted_weights), routing(base(), weights=unsorted))
    assert got["routing_top1_disagree"] == 1.0  # slot 0 agrees everywhere, the weights nowhere
    by_id = numbers(routing(base()[:, :, ::-1]), routing(base(), weights=sorted_weights))
    assert "routing_top1_disagree" not in by_id


def test_top_expert_is_by_weight_and_ties_go_to_the_lower_id():
    ids = np.array([[5, 5], [2, 2]])  # [K, tokens]
    weights = np.array([[0.4, 0.5], [0.6, 0.5]])
    assert top_expert(ids, weights).tolist() == [2, 2]
    assert top_expert(ids[::-1], weights).tolist() == [5, 2]


def test_margins():
    margin = np.full((8, 2), 1.0, np.float32)
    margin[1, 0], margin[3, 0] = 0.01, 0.03
    got = numbers(routing(base()), routing(flipped((1, 0), (3, 0)), margin=margin))
    assert got["routing_margin"] == pytest.approx((8 + 0.04) / 10)


def test_only_common_layers_are_compared_and_by_their_number():
    wide = np.concatenate([flipped(), base()], axis=1)[:, [0, 2, 1, 3]]  # layers 0, 1, 2, 3
    wide[:, [0, 2]] = (wide[:, [0, 2]] + 3) % 8
    pair = pair_routing(ROLLOUT, routing(base()), routing(wide, layers=(0, 1, 2, 3)))
    assert pair.layers == (1, 3)
    assert pair.flips.tolist() == [0, 0, 0, 0, 0]
    with pytest.raises(MismatchError, match=r"\(1, 3\).*\(0, 2\)"):
        pair_routing(ROLLOUT, routing(base()), routing(base(), layers=(0, 2)))
    with pytest.raises(MismatchError, match=r"\b8 experts.*\b16"):
        pair_routing(ROLLOUT, routing(base()), routing(base(), experts=16))


def test_weights_and_margins_follow_their_layer():
    """The right side lists its layers in another order; per layer both sides are the same."""
    weights = np.tile(np.array([0.7, 0.3], np.float32), (8, 2, 1))
    weights[:, 1] = [0.4, 0.6]  # in layer 3 the second slot is the heavier
    margin = np.tile(np.array([0.1, 0.9], np.float32), (8, 1))
    left = routing(base(), weights=weights)
    turned = routing(
        base()[:, ::-1], layers=(3, 1), weights=weights[:, ::-1], margin=margin[:, ::-1]
    )
    pair = pair_routing(ROLLOUT, left, turned)
    assert np.array_equal(pair.arrays["rollout_top_expert"], pair.arrays["train_top_expert"])
    assert pair.arrays["margin"][0] == pytest.approx([0.1, 0.9])


def test_overlap_does_not_depend_on_slot_order():
    rng = np.random.default_rng(0)
    left = np.argsort(rng.random((200, 3, 16)), axis=2)[..., :4]
    right = np.argsort(rng.random((200, 3, 16)), axis=2)[..., :4]
    slots = [np.moveaxis(side.astype(np.uint8), 2, 0) for side in (left, right)]
    got = in_other(*slots).mean(axis=0)
    want = (left[..., :, None] == right[..., None, :]).any(axis=3).mean(axis=2)
    assert np.array_equal(got, want)


def test_load_variation():
    left = np.array([[10, 0, 0, 0, 0], [5, 5, 0, 0, 0]])
    right = np.array([[7, 0, 0, 0, 3], [5, 5, 0, 0, 0]])  # 3 of 10 moved from expert 0 to 4
    assert load_variation(left, right).tolist() == [pytest.approx(0.3), 0.0]


def test_loads_count_the_choices_of_each_side():
    pair = pair_routing(ROLLOUT, routing(base()), routing(flipped((1, 0))))
    rows = base()[action_rows(ROLLOUT)]
    want = np.stack([np.bincount(rows[:, layer].ravel(), minlength=8) for layer in (0, 1)])
    assert np.array_equal(pair.arrays["rollout_load"], want)
    moved = np.zeros((2, 8))
    moved[0, 2], moved[0, 0] = -1, 1  # row 1: experts 1 and 2 became 1 and 0
    assert np.array_equal(pair.arrays["train_load"], want + moved)
    turned = pair_routing(ROLLOUT, routing(base()), routing(flipped((1, 0))[:, :, ::-1]))
    assert np.array_equal(turned.arrays["train_load"], pair.arrays["train_load"])


def test_weight_distance_is_that_of_whole_vectors():
    rng = np.random.default_rng(1)
    ids = [np.argsort(rng.random((50, 2, 16)), axis=2)[..., :4] for _ in range(2)]
    weights = [rng.random((50, 2, 4)) for _ in range(2)]
    full = [np.zeros((50, 2, 16)) for _ in range(2)]
    for array, chosen, values in zip(full, ids, weights, strict=True):
        np.put_along_axis(array, chosen, values, axis=2)
    slots = [np.moveaxis(array, 2, 0) for pair in zip(ids, weights, strict=True) for array in pair]
    assert weight_distance(*slots) == pytest.approx(np.abs(full[0] - full[1]).sum(axis=2))


def test_weight_l1_known_values():
    weights = np.tile(np.array([0.7, 0.3], np.float32), (8, 2, 1))
    moved = weights.copy()
    moved[1, 0] = [0.6, 0.4]  # same experts, 0.1 moved: distance 0.2
    same = numbers(routing(base(), weights=weights), routing(base(), weights=moved))
    assert same["routing_weight_l1"] == pytest.approx(0.2 / 10)
    other = numbers(routing(base(), weights=weights), routing(flipped((1, 0)), weights=weights))
    assert other["routing_weight_l1"] == pytest.approx(0.6 / 10)  # 0.3 gone, 0.3 new
    assert "routing_weight_l1" not in numbers(routing(base()), routing(base(), weights=weights))


def test_chunks_change_nothing(monkeypatch):
    weights = np.random.default_rng(2).random((8, 2, 2)).astype(np.float32)
    sides = routing(base(), weights=weights), routing(flipped((1, 0), (3, 1)), weights=weights)
    whole = pair_routing(ROLLOUT, *sides).arrays
    monkeypatch.setattr(routing_pairs, "CHUNK", 8)  # two tokens at a time
    pieces = pair_routing(ROLLOUT, *sides).arrays
    assert set(whole) == set(pieces)
    for name, array in whole.items():
        assert np.array_equal(array, pieces[name]), name


def test_one_expert_per_token_and_wide_ids():
    ids = (np.arange(8)[:, None, None] * 37 % 256).repeat(2, axis=1)
    other = ids.copy()
    other[1, 0] = 255 - other[1, 0]
    got = numbers(routing(ids, experts=256), routing(other, experts=256))
    assert got["routing_disagree_layer"] == pytest.approx(1 / 10)
    assert got["routing_overlap"] == pytest.approx(9 / 10)


def harm_of(differs, delta):
    names = ["harm_factor", "delta2_share"]
    arrays = {"differs": np.asarray(differs, bool)[:, None], "delta": np.asarray(delta, float)}
    metrics = [METRICS[f"routing_{name}"] for name in names]
    tokens = len(delta)
    estimator = Estimator(np.arange(tokens), np.arange(tokens) // 2)
    return {name: e.value for name, e in estimator.all(metrics, arrays).items()}


def test_harm_known_values():
    delta = np.array([0.1, -0.1, 0.3, -0.3])
    got = harm_of([0, 0, 1, 1], delta)
    assert got["routing_harm_factor"] == pytest.approx(3.0)
    assert got["routing_delta2_share"] == pytest.approx(0.9)
    mixed = harm_of([0, 1, 0, 1], delta)  # the groups are alike
    assert mixed["routing_harm_factor"] == pytest.approx(1.0)
    assert mixed["routing_delta2_share"] == pytest.approx(0.5)


def test_harm_without_a_contrast_is_absent():
    delta = np.array([0.1, -0.1, 0.3, -0.3])
    none, every = harm_of([0] * 4, delta), harm_of([1] * 4, delta)
    assert "routing_harm_factor" not in {*none, *every}
    assert none["routing_delta2_share"] == 0.0
    assert every["routing_delta2_share"] == 1.0
    assert harm_of([0, 1, 0, 1], np.zeros(4)) == {}  # no mismatch: nothing to share out


def test_a_large_pairing_takes_a_few_bytes_per_token_and_layer():
    tokens, layers, k = 50_000, 24, 8
    mask = np.arange(tokens + 1) > 0
    rollout = Rollout(
        token_ids=np.zeros(tokens + 1, np.int64),
        offsets=np.array([0, tokens + 1]),
        action_mask=mask,
        turn=mask.astype(np.int64),
        prompt_index=np.array([0]),
        finish_reason=("stop",),
        sampling=Sampling(),
        fingerprint={},
    )
    first = np.arange(tokens + 1)[:, None, None] + np.arange(k) * 31
    ids = np.broadcast_to(first % 256, (tokens + 1, layers, k)).astype(np.uint8)
    left = right = routing(ids, layers=tuple(range(layers)), experts=256)
    tracemalloc.start()
    pair = pair_routing(rollout, left, right)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not pair.differs.any()
    assert peak < 40e6  # the ids alone, as int64 and side by side, would be 154 MB
