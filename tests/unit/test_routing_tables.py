"""Planted flips come out in the right layer, place, expert and price; the noise is what it says."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from mismatch.analysis.comparison import compare, paired_routing
from mismatch.analysis.routing_tables import flipped_layers
from mismatch.metrics.inference import group_means
from mismatch.metrics.routing_pairs import (
    RouterNoise,
    other_rows,
    pair_routing,
    router_noise,
    with_noise,
)
from mismatch.types import Routing, Scoring
from tests.routing_fixture import rollout_of, routing_pair
from tests.texts import numbers

SEQUENCES, LENGTH, PROMPT, LAYERS, EXPERTS, TOP_K = 48, 40, 6, 4, 16, 2
A = SEQUENCES * LENGTH
PLACE = np.tile(np.arange(LENGTH), SEQUENCES)


def tokens_table() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "sequence": np.repeat(np.arange(SEQUENCES), LENGTH),
            "position": PROMPT + PLACE,
            "token_id": rng.integers(1, 50, A),
        }
    )


ROLLOUT = rollout_of(tokens_table())


def sides(differs, delta=None, **options) -> tuple[Scoring, Scoring]:
    left, right = routing_pair(ROLLOUT, np.asarray(differs, bool), **options)
    ids = ROLLOUT.token_ids[ROLLOUT.actions]
    rollout = -np.random.default_rng(1).exponential(1.0, A)
    train = rollout + (0.01 * np.random.default_rng(2).normal(size=A) if delta is None else delta)
    return (
        Scoring("vllm:decode", ids, rollout, {"mode": "decode"}, routing=left),
        Scoring("fsdp", ids, train, {"mode": "train", "dtype": "bf16"}, routing=right),
    )


def compared(differs, delta=None, noise: RouterNoise | None = None, **options):
    return compare(ROLLOUT, *sides(differs, delta, **options), sampled_by_left=True, noise=noise)


def planted(layer: int, places, layers: int = LAYERS) -> np.ndarray:
    differs = np.zeros((A, layers), bool)
    differs[np.isin(PLACE, list(places)), layer] = True
    return differs


def test_layer_and_position_are_found():
    tables = compared(planted(2, range(8, 12))).breakdowns
    heat = pd.DataFrame(tables["routing_layer_position"])
    hot = heat[heat["disagree"] > 0]
    assert set(hot["layer"]) == {2}
    assert (hot["start"].min(), hot["end"].max()) == (8, 12)
    assert (hot["disagree"] == 1.0).all()
    layers = tables["routing_by_layer"]
    assert layers["disagree"] == pytest.approx([0, 0, 4 / LENGTH, 0])
    places = pd.DataFrame(tables["routing_by_position"])
    inside = places["start"].between(8, 11)
    assert (places["disagree"] == np.where(inside, 1 / LAYERS, 0.0)).all()
    assert (places["any"] == np.where(inside, 1.0, 0.0)).all()
    assert places["count"].sum() == A


def test_near_ties_are_margins_within_the_noise():
    differs = planted(0, range(10)) | planted(2, range(10))
    left, right = sides(differs)
    margin = np.full(right.routing.margin.shape, 1.0, np.float32)
    rows = ROLLOUT.actions - 1
    margin[rows[PLACE < 4], 0] = 0.05  # 4 of 10 flips of layer 0
    margin[rows[PLACE == 20], 0] = 0.05  # a near-tie that did not flip
    margin[rows[PLACE < 10], 2] = 0.05  # within the noise of layer 0, not of layer 2
    right = replace(right, routing=replace(right.routing, margin=margin))
    noise = RouterNoise({0: 0.1, 1: 0.1, 2: 0.01, 3: 0.1}, "fsdp:regrouped")
    got = compare(ROLLOUT, left, right, sampled_by_left=True, noise=noise)
    assert got.routing["routing_near_tie_flipped"].value == pytest.approx(4 / 20)
    layers = got.breakdowns["routing_by_layer"]
    assert layers["near_tie"] == pytest.approx([0.4, None, 0.0, None])
    assert layers["noise"] == [0.1, 0.1, 0.01, 0.1]
    assert layers["margin_flipped"][2] == pytest.approx(0.05)
    margins = pd.DataFrame(got.breakdowns["routing_by_margin"]).set_index("from")
    assert margins.loc[0.5, "disagree"] == pytest.approx(4 / 5)  # 0.05 / 0.1 in layer 0
    assert margins.loc[4.0, "disagree"] == 1.0  # 0.05 / 0.01: the ten of layer 2
    assert margins.loc[8.0, "count"] == A * 3 - 5 * SEQUENCES  # 1 / 0.1, layers 0, 1 and 3
    assert margins["count"].sum() == A * LAYERS
    without = compare(ROLLOUT, left, right, sampled_by_left=True)
    assert "routing_near_tie_flipped" not in without.routing


def moved_pass(train: Scoring, step: float, name: str) -> Scoring:
    """The same pass with every 50th margin off by a lot and the others by ``step`` at most."""
    routing = train.routing
    move = np.linspace(0, step, routing.margin.size, dtype=np.float32).reshape(routing.margin.shape)
    move[::50] = 7.0 if step else 0.0
    return replace(train, name=name, routing=replace(routing, margin=routing.margin + move))


def test_noise_is_how_far_the_trainers_own_margins_move():
    _, train = sides(np.zeros((A, LAYERS)))
    rows = ROLLOUT.actions - 1
    regrouped = moved_pass(train, 0.02, "fsdp:regrouped")
    noise = router_noise(ROLLOUT, train, [regrouped])
    assert noise.source == "fsdp:regrouped"
    for layer, level in noise.level.items():
        gap = np.abs(regrouped.routing.margin - train.routing.margin)[rows, layer]
        assert (gap <= level).mean() >= 0.99 > (gap < level).mean()


def test_where_no_pass_moves_the_next_one_speaks_and_rounding_last():
    _, train = sides(np.zeros((A, LAYERS)))
    still = moved_pass(train, 0.0, "fsdp:regrouped")
    reference = moved_pass(train, 0.5, "reference:fp32")
    assert router_noise(ROLLOUT, train, [still, reference]).source == "reference:fp32"
    assumed = router_noise(ROLLOUT, train, [still])
    assert assumed.source == "rounding"
    largest = train.routing.margin[ROLLOUT.actions - 1].max(axis=0)
    assert list(assumed.level.values()) == pytest.approx(largest / 256)  # bf16
    fp32 = replace(train, fingerprint={"dtype": "bf16", "autocast": "fp32"})
    assert router_noise(ROLLOUT, fp32, []).level[0] == pytest.approx(largest[0] / 2**24)
    assert router_noise(ROLLOUT, replace(train, fingerprint={"dtype": "fp8"}), []) is None
    dumb = replace(train, routing=replace(train.routing, margin=None))
    assert router_noise(ROLLOUT, dumb, [reference]) is None
    fewer = reference.routing
    fewer = Routing((0, 1, 2), EXPERTS, fewer.ids[:, :3], fewer.present, None, fewer.margin[:, :3])
    other = replace(reference, routing=fewer)
    assert router_noise(ROLLOUT, train, [other]).source == "rounding"


def test_noise_of_other_layers_says_nothing():
    left, right = sides(planted(0, range(3)))
    routes = pair_routing(ROLLOUT, left.routing, right.routing)
    assert "near_tie" not in with_noise(routes, RouterNoise({0: 1.0}, "x")).arrays
    assert "near_tie" not in with_noise(routes, None).arrays


def test_prompt_rows_are_reported_apart():
    left, right = sides(np.zeros((A, LAYERS)))
    rows = other_rows(ROLLOUT, left.routing, right.routing)
    first = ROLLOUT.offsets[:-1]
    # The last prompt row predicts the first action; the last row of all predicts nothing.
    assert len(rows) == SEQUENCES * PROMPT
    assert set(first) <= set(rows)
    assert not set(first + PROMPT - 1) & set(rows)
    ids = right.routing.ids.copy()
    ids[first, 0, 1] = (ids[first, 0, 1] + 1) % EXPERTS  # the first prompt row only
    right = replace(right, routing=replace(right.routing, ids=ids))
    got = compare(ROLLOUT, left, right, sampled_by_left=True).routing
    assert got["routing_disagree_any"].value == 0.0
    assert got["routing_prompt_disagree_any"].value == pytest.approx(1 / PROMPT)
    assert got["routing_prompt_disagree_layer"].value == pytest.approx(1 / PROMPT / LAYERS)
    assert got["routing_prompt_disagree_any"].n_tokens == SEQUENCES * PROMPT
    blind = replace(right.routing, present=ROLLOUT.action_mask | np.roll(ROLLOUT.action_mask, -1))
    shown = compare(ROLLOUT, left, replace(right, routing=blind), sampled_by_left=True).routing[
        "routing_prompt_disagree_any"
    ]
    assert shown.n_tokens == SEQUENCES  # only the row of the last token is left


def test_notes_say_what_was_replayed_left_out_and_not_measured():
    left, right = sides(np.zeros((A, LAYERS)))
    r = right.routing
    part = Routing((1, 2, 3), EXPERTS, r.ids[:, 1:], r.present, None, None)
    facts = right.fingerprint | {"replay": {"mode": "ids", "source": "vllm:decode"}}
    right = replace(right, routing=part, fingerprint=facts)
    tables = compare(ROLLOUT, left, right, sampled_by_left=True).breakdowns
    notes = list(zip(*tables["routing_notes"].values(), strict=True))
    replayed, left_out, *unmeasured = [value for _, value in notes]
    assert [fact for fact, _ in notes] == ["replayed", "layers left out", *["not measured"] * 2]
    assert re.findall(r"fsdp|ids|vllm:decode", replayed) == ["fsdp", "ids", "vllm:decode"]
    assert (numbers(left_out), "vllm:decode" in left_out) == ([0], True)
    assert all(part in unmeasured[0] for part in ("routing_weight_l1", "vllm:decode"))
    assert right.name in unmeasured[1]  # gave no scores
    assert tables["routing_by_layer"]["layer"] == [1, 2, 3]
    assert tables["routing_by_layer"]["margin"] == [None] * 3
    assert "routing_by_margin" not in tables


def test_no_flip_and_all_flips():
    calm = compared(np.zeros((A, 1)))
    assert calm.breakdowns["routing_by_layer"]["near_tie"] == [None]
    assert calm.breakdowns["routing_by_layer"]["high"] == [0.0]
    full = compared(np.ones((A, 1)))
    assert full.routing["routing_disagree_layer"].value == 1.0


def test_one_prompt_has_no_interval():
    left, right = sides(planted(1, range(4)))
    single = replace(ROLLOUT, prompt_index=np.zeros(SEQUENCES, np.int64))
    tables = compare(single, left, right, sampled_by_left=True).breakdowns
    for name in ("routing_by_layer", "routing_by_position"):
        assert set(tables[name]["low"]) == {None}, name


def test_flipped_layers_by_the_models_own_numbers():
    differs = np.zeros((A, LAYERS), bool)
    differs[1, 2] = True
    differs[2, [0, 1, 3]] = True
    left, right = sides(differs)
    named = (4, 5, 7, 8)  # layer 6 is dense
    left, right = (
        replace(side, routing=replace(side.routing, layers=named)) for side in (left, right)
    )
    layers, offsets = flipped_layers(paired_routing(ROLLOUT, left, right))
    rows = [row.tolist() for row in np.split(layers, offsets[1:-1])]
    assert rows == [[], [7], [4, 5, 8], *([[]] * (A - 3))]


def test_intervals_over_prompts_cover():
    """Shares that vary between prompts: the interval holds the truth about as often as it says."""
    rng = np.random.default_rng(4)
    prompts, tokens, hits, runs = 40, 50, 0, 400
    for _ in range(runs):
        share = rng.beta(2, 18, prompts)
        sums = rng.binomial(tokens, share)[:, None].astype(float)
        means = group_means(sums, np.full((prompts, 1), float(tokens)), (0.0, 1.0))
        hits += means.low[0] <= 0.1 <= means.high[0]
    assert 0.91 < hits / runs < 0.98


def test_a_group_without_tokens_is_unknown():
    means = group_means(np.array([[1.0, 0.0], [2.0, 0.0]]), np.array([[4.0, 0], [4.0, 0]]), (0, 1))
    assert means.mean[0] == pytest.approx(3 / 8)
    assert np.isnan(means.mean[1])
    assert (means.low[1], means.high[1]) == (None, None)
