"""Planted routing differences come out as the numbers that they are."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch.errors import MismatchError
from mismatch.metrics import METRICS
from mismatch.metrics.estimate import Estimator
from mismatch.metrics.routing import (
    action_rows,
    load_variation,
    pair_routing,
    shared_experts,
    top_expert,
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
    assert got["routing_layers_per_token"] == pytest.approx(3 / 5)
    assert got["routing_overlap"] == pytest.approx(1 - 3 * 0.5 / 10)
    pair = pair_routing(ROLLOUT, routing(base()), routing(flipped((1, 0), (1, 1), (3, 0))))
    assert pair.flips.tolist() == [2, 0, 1, 0, 0]


def test_identical_routing_is_exactly_zero():
    got = numbers(routing(base()), routing(base()))
    for name in ("disagree_layer", "disagree_any", "layers_per_token"):
        assert got[f"routing_{name}"] == 0.0
    assert got["routing_overlap"] == 1.0
    assert got["experts_load_tv"] == 0.0


def test_slot_order_is_no_disagreement():
    weights = np.tile(np.array([0.7, 0.3], np.float32), (8, 2, 1))
    swapped = base()
    swapped[2, 1] = swapped[2, 1, ::-1].copy()
    got = numbers(routing(base(), weights=weights), routing(swapped, weights=weights))
    assert got["routing_disagree_layer"] == 0.0
    assert got["routing_order_only"] == pytest.approx(1 / 10)
    assert got["routing_top1_disagree"] == pytest.approx(1 / 10)  # by weight, and that moved too


def test_order_is_not_reported_where_a_kernel_does_not_sort():
    sorted_weights = np.tile(np.array([0.7, 0.3], np.float32), (8, 2, 1))
    unsorted = sorted_weights[:, :, ::-1]
    got = numbers(routing(base(), weights=sorted_weights), routing(base(), weights=unsorted))
    assert "routing_order_only" not in got
    assert got["routing_top1_disagree"] == 1.0  # slot 0 agrees everywhere, the weights nowhere
    # Ids only on one side: its order counts if it follows the other side's, and not otherwise.
    assert (
        numbers(routing(base()), routing(base(), weights=sorted_weights))["routing_order_only"] == 0
    )
    by_id = numbers(routing(base()[:, :, ::-1]), routing(base(), weights=sorted_weights))
    assert "routing_order_only" not in by_id
    assert "routing_top1_disagree" not in by_id
    assert "routing_order_only" not in numbers(routing(base()), routing(base()))


def test_top_expert_is_by_weight_and_ties_go_to_the_lower_id():
    ids = np.array([[[5, 2]], [[5, 2]]])
    weights = np.array([[[0.4, 0.6]], [[0.5, 0.5]]])
    assert top_expert(ids, weights).tolist() == [[2], [2]]
    assert top_expert(ids[:, :, ::-1], weights).tolist() == [[5], [2]]


def test_margins_overall_and_where_experts_differ():
    margin = np.full((8, 2), 1.0, np.float32)
    margin[1, 0], margin[3, 0] = 0.01, 0.03
    got = numbers(routing(base()), routing(flipped((1, 0), (3, 0)), margin=margin))
    assert got["routing_margin"] == pytest.approx((8 + 0.04) / 10)
    assert got["routing_margin_flipped"] == pytest.approx(0.02)
    calm = numbers(routing(base()), routing(base(), margin=margin))
    assert "routing_margin_flipped" not in calm  # undefined without a flip, not 0


def test_only_common_layers_are_compared_and_by_their_number():
    wide = np.concatenate([flipped(), base()], axis=1)[:, [0, 2, 1, 3]]  # layers 0, 1, 2, 3
    wide[:, [0, 2]] = (wide[:, [0, 2]] + 3) % 8
    pair = pair_routing(ROLLOUT, routing(base()), routing(wide, layers=(0, 1, 2, 3)))
    assert pair.layers == (1, 3)
    assert pair.flips.tolist() == [0, 0, 0, 0, 0]
    with pytest.raises(MismatchError, match="no MoE layer in common"):
        pair_routing(ROLLOUT, routing(base()), routing(base(), layers=(0, 2)))
    with pytest.raises(MismatchError, match="top-2 of 8 experts against top-2 of 16"):
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
    got = shared_experts(left.astype(np.uint8), right.astype(np.uint8))
    want = (left[..., :, None] == right[..., None, :]).any(axis=3).mean(axis=2)
    assert np.array_equal(got, want)


def test_load_variation():
    left = np.zeros((10, 1, 1), np.uint8)
    right = left.copy()
    right[:3] = 4  # 3 of 10 tokens moved from expert 0 to expert 4
    assert load_variation(left, right).tolist() == [pytest.approx(0.3)]
    crossed = np.concatenate([left, right], axis=1), np.concatenate([left, left], axis=1)
    assert load_variation(*crossed).tolist() == [0.0, pytest.approx(0.3)]
