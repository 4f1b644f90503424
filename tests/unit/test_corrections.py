"""Weights and advantages against numbers worked out by hand."""

import math
import re

import numpy as np
import pytest

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.experiments.fixes.guides import recipes
from mismatch.metrics.importance_weights import (
    BY_ID,
    CORRECTIONS,
    NONE,
    OVERRIDE,
    Ratios,
    Settings,
    group_advantages,
    per_token,
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
    ],
)
def test_bounds_that_drop_agreement_are_refused(bad, bounds):
    with pytest.raises(MismatchError, match=f" of {re.escape(bounds)} "):
        Settings(**bad)


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
        areal = ["AReaL"] if correction.id == "cis" else []
        assert [r.framework for r in entries] == ["verl", "TRL", "NeMo-RL", "prime-rl", *areal]
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


def test_token_loss_divides_by_all_tokens_and_sequence_loss_by_each_samples() -> None:
    lengths = np.array([2, 4, 3, 1])
    advantage, sequence = np.array([1.0, -1.0, 0.5, 2.0]), np.repeat(np.arange(4), lengths)
    member = sequence != 2
    token = per_token(advantage, member, sequence, "token")
    assert token == pytest.approx(np.where(member, advantage[sequence] / 7, 0.0))
    each = per_token(advantage, member, sequence, "sequence")
    assert each == pytest.approx(np.where(member, (advantage / (3 * lengths))[sequence], 0.0))
