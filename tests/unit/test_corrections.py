"""Weights and advantages against numbers worked out by hand."""

import math
import re

import numpy as np
import pytest

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.metrics.correction_settings import recipes
from mismatch.metrics.importance_weights import (
    BY_ID,
    CORRECTIONS,
    NONE,
    OVERRIDE,
    Ratios,
    Settings,
    group_advantages,
)

RATIOS = [1.0, 2.5, 0.4, 1.1, 0.00005]
SEQUENCE = np.array([0, 0, 3, 3, 7])  # numbers with gaps: sequences without action tokens
DELTA = np.log(RATIOS)
TRAIN = np.log([0.999, 0.5, 0.02, 0.9999, 1e-6])
FIRST, SECOND, THIRD = 2.5, 0.44, 0.00005  # products


def weights(id, settings=Settings()):  # noqa: B008
    return BY_ID[id].weights(Ratios.of(DELTA, SEQUENCE, TRAIN), settings)


@pytest.mark.parametrize(
    ("id", "expected"),
    [
        ("none", [1, 1, 1, 1, 1]),
        ("override", [1, 1, 1, 1, 1]),
        ("tis-token", [1, 2, 0.4, 1.1, 0.00005]),
        ("cis", [1, 1 + 2.3 * 0.5, 0.4, 1 + 2.3 * 0.005, 0.00005]),
        ("icepop", [1, 2.5, 0, 1.1, 0]),
        ("mis-token", [1, 0, 0.4, 1.1, 0.00005]),
        ("tis-sequence", [2, 2, SECOND, SECOND, THIRD]),
        ("mis-sequence", [0, 0, SECOND, SECOND, THIRD]),
        ("trl-sequence-mask", [FIRST, FIRST, SECOND, SECOND, THIRD]),
        ("geometric", [0, 0, 0, 0, 0]),
        ("geometric-token", [0, 0, 0, 0, 0]),
        ("veto", [1, 1, 1, 1, 0]),
    ],
)
def test_weights_by_hand(id, expected):
    assert weights(id) == pytest.approx(expected, rel=1e-12)


# ---- of 2026: p = 0.6, 0.2, 0.5, 0.1 where q = 0.2, 0.6, 0.45, 0.1 ----

P, Q = np.array([0.6, 0.2, 0.5, 0.1]), np.array([0.2, 0.6, 0.45, 0.1])
UP, DOWN = np.ones(4), -np.ones(4)


def moved(id, advantage=None, **bounds):
    ratios = Ratios.of(np.log(P / Q), np.arange(4), np.log(P), advantage)
    return BY_ID[id].weights(ratios, Settings(**bounds))


def test_ipo_drops_large_differences_either_way():
    """|p - q| is 0.4, 0.4, 0.05, 0."""
    for advantage in (None, UP, DOWN):
        assert moved("ipo", advantage) == pytest.approx([0, 0, 10 / 9, 1])
        assert moved("ipo", advantage, ipo=0.41) == pytest.approx([3, 1 / 3, 10 / 9, 1])
        assert moved("ipo", advantage, ipo=0.04) == pytest.approx([0, 0, 0, 1])


@pytest.mark.parametrize("id", ["dppo-tv", "dppo-kl"])
def test_dppo_drops_what_the_update_pushes_further(id):
    assert moved(id, UP) == pytest.approx([0, 1 / 3, 10 / 9, 1])
    assert moved(id, DOWN) == pytest.approx([3, 0, 10 / 9, 1])
    assert moved(id, 0 * UP) == pytest.approx(P / Q)  # no update
    assert moved(id) == pytest.approx([0, 0, 10 / 9, 1])


def test_dppos_thresholds():
    """KL of 0.2 and 0.8 from 0.6 and 0.4: 0.2 ln(1/3) + 0.8 ln 2 = 0.3348."""
    assert moved("dppo-tv", UP, dppo_tv=0.41)[0] == pytest.approx(3)
    assert moved("dppo-tv", UP, dppo_tv=0.39)[0] == 0
    assert moved("dppo-kl", UP, dppo_kl=0.3349)[0] == pytest.approx(3)
    assert moved("dppo-kl", UP, dppo_kl=0.3347)[0] == 0
    # Of 0.6 and 0.4 from 0.2 and 0.8: 0.6 ln 3 + 0.4 ln(1/2) = 0.3819.
    assert moved("dppo-kl", DOWN, dppo_kl=0.3820)[1] == pytest.approx(1 / 3)
    assert moved("dppo-kl", DOWN, dppo_kl=0.3818)[1] == 0


def test_gspo_weighs_by_the_geometric_mean_where_the_clip_keeps_a_gradient():
    """Geometric means: sqrt(1.21) = 1.1, sqrt(2 / 2) = 1, 0.8."""
    delta, sequence = np.log([1.21, 1.0, 2.0, 0.5, 0.8]), np.array([0, 0, 1, 1, 2])
    expected = {1: [0, 0, 1, 1, 0.8], -1: [1.1, 1.1, 1, 1, 0], 0: [1.1, 1.1, 1, 1, 0.8]}
    for sign, hand in expected.items():
        ratios = Ratios.of(delta, sequence, np.full(5, -9.0), np.full(5, float(sign)))
        got = BY_ID["gspo"].weights(ratios, Settings(gspo=(0.9, 1.05)))
        assert got == pytest.approx(hand)
    unknown = Ratios.of(delta, sequence, np.full(5, -9.0))
    got = BY_ID["gspo"].weights(unknown, Settings(gspo=(0.9, 1.05)))
    assert got == pytest.approx([0, 0, 1, 1, 0])


@pytest.mark.parametrize(
    ("bound", "kept"),
    [(0.005, 0), (0.02, 1), (0.04, 2), (0.05, 3), (0.284, 3), (0.286, 4)],
)
def test_m2po_drops_the_largest_until_the_mean_of_squares_is_small(bound, kept):
    """Squares 0.01, 0.04, 0.09 and 1; means of the least: 0.01, 0.025, 0.0467, 0.285."""
    delta = np.array([-0.2, 1.0, 0.1, -0.3])
    got = BY_ID["m2po"].weights(
        Ratios.of(delta, np.zeros(4, int), np.full(4, -9.0)), Settings(m2po=bound)
    )
    least = np.argsort(np.abs(delta))[:kept]
    expected = np.zeros(4)
    expected[least] = np.exp(delta[least])
    assert got == pytest.approx(expected)


@pytest.mark.parametrize("id", list(BY_ID))
def test_sides_that_agree_weigh_one(id):
    train, sequence = np.log(np.random.default_rng(3).random(60)), np.repeat(np.arange(6), 10)
    for advantage in (None, np.random.default_rng(4).standard_normal(60)):
        ratios = Ratios.of(np.zeros(60), sequence, train, advantage)
        assert (BY_ID[id].weights(ratios, Settings()) == 1.0).all()


def test_cis_cuts_a_constant_displacement_of_the_log_odds():
    p, shift = np.array([0.01, 0.5, 0.9]), math.log(1 + 2.3)
    q = 1 / (1 + (1 - p) / p * math.exp(shift))
    for beyond in (-1e-6, 1e-6):
        ratio = p / q * (1 + beyond)
        cut = BY_ID["cis"].weights(
            Ratios.of(np.log(ratio), np.arange(3), np.log(p)), Settings()
        ) < ratio * (1 - 1e-9)
        assert cut.all() == (beyond > 0)


def test_bounds_are_the_users():
    wide = Settings(cap=2.4, mask_cap=2.6, band=(0.3, 1.05), geometric=(0.6, 1.6), veto=1e-5)
    assert weights("tis-token", wide).max() == pytest.approx(2.4)
    assert weights("mis-token", wide)[1] == pytest.approx(2.5)
    assert weights("icepop", wide) == pytest.approx([1, 0, 0.4, 0, 0])
    # geometric means: sqrt(2.5) = 1.58, sqrt(0.44) = 0.66
    assert weights("geometric", wide) == pytest.approx([1, 1, 1, 1, 0])
    assert weights("geometric-token", wide) == pytest.approx([1, 2.5, 0.4, 1.1, 0])
    assert weights("veto", wide).all()
    assert not weights("trl-sequence-mask", Settings(sequence_cap=2.0))[0]


def test_one_token_vetoes_its_whole_sequence():
    ratios = Ratios.of(np.log([1e-5, 900.0, 900.0, 2e-4]), np.array([0, 0, 0, 1]), np.full(4, -9.0))
    assert BY_ID["veto"].weights(ratios, Settings()) == pytest.approx([0, 0, 0, 1])


def test_log_ratios_are_clamped_and_counted():
    ratios = Ratios.of(
        np.array([30.0, -25.0, 15.0, 15.0]), np.array([0, 1, 2, 2]), np.full(4, -50.0)
    )
    assert ratios.token == pytest.approx(np.exp([20, -20, 15, 15]))
    assert ratios.sequence == pytest.approx(np.exp([20, -20, 20]))
    assert ratios.clamped == 2 + 3


def test_no_token_is_an_error():
    with pytest.raises(EmptyComparison):
        Ratios.of(np.empty(0), np.empty(0, dtype=int), np.empty(0))


@pytest.mark.parametrize(
    ("bad", "bounds"),
    [
        ({"cap": 0.9}, "0 to 0.9"),
        ({"cap": math.inf}, "0 to inf"),
        ({"mask_cap": math.nan}, "0 to nan"),
        ({"band": (5.0, 0.5)}, "5 to 0.5"),
        ({"band": (1.0, 1.0)}, "1 to 1"),
        ({"geometric": (1.001, 1.002)}, "1.001 to 1.002"),
        ({"veto": -1.0}, "-1 to 1"),
        ({"veto": 1.5}, "1.5 to 1"),
        ({"sequence_cap": 0.0}, "0 to 0"),
        ({"cis_lambda": -0.1}, "0 to 0.9"),
        ({"cis_kappa": 1.5}, "1.5 to 1"),
        ({"gspo": (1.0, 1.0)}, "1 to 1"),
    ],
)
def test_bounds_that_drop_agreement_are_refused(bad, bounds):
    with pytest.raises(MismatchError, match=f" of {re.escape(bounds)} "):
        Settings(**bad)


@pytest.mark.parametrize("name", ["ipo", "dppo_tv", "dppo_kl", "m2po"])
@pytest.mark.parametrize("bad", [0.0, -0.1, math.inf, math.nan])
def test_a_distance_is_finite_and_over_nothing(name, bad):
    with pytest.raises(MismatchError, match=f" {name} is {bad:g}"):
        Settings(**{name: bad})


def test_advantages_by_hand():
    rewards = np.array([1.0, 0.0, 0.0, 5.0, 5.0, 3.0, np.nan, 2.0, 4.0])
    prompt = np.array([0, 0, 0, 1, 1, 2, 3, 3, 3])
    spread = math.sqrt((4 / 9 + 1 / 9 + 1 / 9) / 2)
    got = group_advantages(rewards, prompt)
    third = spread + 1e-6
    assert got[:3] == pytest.approx([2 / 3 / third, -1 / 3 / third, -1 / 3 / third])
    assert (got[3:7] == 0.0).all()  # equal, alone, unrewarded
    assert got[7:] == pytest.approx([-1 / (math.sqrt(2) + 1e-6), 1 / (math.sqrt(2) + 1e-6)])


def test_rounding_of_a_mean_makes_no_advantage():
    assert not group_advantages(np.full(3, 0.1), np.zeros(3, dtype=int)).any()
    assert not group_advantages(np.full(2, np.nan), np.zeros(2, dtype=int)).any()


def test_groups_need_not_be_in_order():
    rewards, prompt = np.array([1.0, 7.0, 0.0, 9.0]), np.array([5, 2, 5, 2])
    got = group_advantages(rewards, prompt)
    assert got[0] == -got[2] > 0
    assert got[3] == -got[1] > 0


# ---- recipes ----


def text(id, framework, settings=Settings()):  # noqa: B008
    return next(r for r in recipes(id, settings) if r.framework == framework)


def test_every_ranked_correction_has_a_recipe_or_a_reason_in_every_framework():
    for correction in CORRECTIONS:
        if correction.id in (NONE, OVERRIDE):
            continue
        entries = recipes(correction.id, Settings())
        assert [r.framework for r in entries][:4] == ["verl", "TRL", "NeMo-RL", "prime-rl"]
        assert {r.framework for r in entries[4:]} <= {"SkyRL", "slime", "AReaL"}
        assert all(r.lines or r.remark for r in entries)


def test_recipes_carry_the_users_bounds():
    settings = Settings(cap=5, band=(0.25, 4), sequence_cap=7, geometric=(0.98, 1.03))
    assert "    rollout_is_threshold: 5" in text("tis-token", "verl", settings).lines
    assert '    rollout_is_threshold: "0.25_4"' in text("icepop", "verl", settings).lines
    trl = text("icepop", "TRL", settings).lines
    assert "    vllm_importance_sampling_clip_max=4," in trl
    assert "    vllm_importance_sampling_clip_min=0.25," in trl
    assert '    vllm_importance_sampling_mode="token_mask",' in trl
    mask = text("trl-sequence-mask", "TRL", settings).lines
    assert '    vllm_importance_sampling_mode="sequence_mask",' in mask
    assert "    vllm_importance_sampling_clip_max=7," in mask
    nemo = text("geometric-token", "NeMo-RL", settings).lines
    assert "  truncated_importance_sampling_type: seq-mask-tis" in nemo
    assert "  truncated_importance_sampling_ratio_min: 0.98" in nemo
    assert "ratio_low = 0.25" in text("icepop", "prime-rl", settings).lines


def test_corrections_of_2026_have_the_keys_of_the_frameworks_that_have_them():
    settings = Settings(ipo=0.1, dppo_tv=0.15, gspo=(0.99, 1.02), m2po=0.05)
    lines = {
        (id, recipe.framework): recipe.lines
        for id in ("ipo", "dppo-tv", "dppo-kl", "gspo", "m2po")
        for recipe in recipes(id, settings)
        if recipe.lines
    }
    assert set(lines) == {
        ("ipo", "prime-rl"),
        *(("dppo-tv", name) for name in ("verl", "prime-rl", "SkyRL")),
        *(("dppo-kl", name) for name in ("verl", "SkyRL")),
        *(("gspo", name) for name in ("verl", "slime", "AReaL")),
        ("m2po", "AReaL"),
    }
    assert "eps = 0.1" in lines["ipo", "prime-rl"]
    assert "      loss_mode: dppo_tv" in lines["dppo-tv", "verl"]
    assert "    clip_ratio_low: 0.15" in lines["dppo-tv", "verl"]
    assert "      dppo_type: binary_kl" in lines["dppo-kl", "SkyRL"]
    assert "    clip_ratio_low: 0.01" in lines["gspo", "verl"]
    assert "--eps-clip-high 0.02" in lines["gspo", "slime"]
    assert "  m2_threshold: 0.05" in lines["m2po", "AReaL"]
    assert "sequence_level_importance_ratios" in text("gspo", "NeMo-RL").remark


@pytest.mark.parametrize("framework", ["TRL", "NeMo-RL", "prime-rl"])
def test_what_a_framework_lacks_is_not_replaced(framework):
    assert text("geometric", framework).lines == ()
    assert text("veto", "verl").lines == ()


def test_verls_inverse_bounds_keep_our_sequences():
    """verl keeps a sequence if log(low) <= mean of -delta <= log(high)."""
    settings = Settings(geometric=(0.9, 1.3))
    thresholds = [
        line for line in text("geometric", "verl", settings).lines if "rs_threshold" in line
    ]
    low, high = map(float, thresholds[0].split(": ")[1].strip('"').split("_"))
    delta, sequence = np.linspace(-0.4, 0.4, 161), np.arange(161)
    verls = (-delta >= math.log(low)) & (-delta <= math.log(high))
    ours = (
        BY_ID["geometric"].weights(Ratios.of(delta, sequence, np.full(len(delta), -1.0)), settings)
        > 0
    )
    assert np.array_equal(verls, ours)
    assert 0 < ours.sum() < 161
    assert ours[:80].sum() != ours[81:].sum()  # the band is lopsided: the other way round differs
