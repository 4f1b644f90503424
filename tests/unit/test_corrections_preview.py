"""What a preview says: known truths, the ranking, and what cannot be said."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from mismatch.codec import from_json, to_json
from mismatch.errors import EmptyComparison, MismatchError
from mismatch.features.corrections import section as words
from mismatch.features.corrections.preview import (
    NEGLIGIBLE,
    NOT_LAWFUL,
    ONE_PROMPT,
    preview,
)
from mismatch.features.corrections.results import Corrections
from mismatch.metrics.importance_weights import (
    CORRECTIONS,
    NONE,
    OVERRIDE,
    Settings,
    group_advantages,
)
from mismatch.types import Rollout, Sampling, Scoring
from tests.tables import values
from tests.texts import numbers

PROMPTS, SAMPLES, LENGTH = 32, 4, 20


def rollout(rewards=True, length=LENGTH):
    n = PROMPTS * SAMPLES
    mask = np.tile(np.arange(length + 1) > 0, n)
    drawn = np.random.default_rng(1).integers(0, 2, n).astype(float)
    return Rollout(
        token_ids=np.repeat(np.arange(PROMPTS), SAMPLES * (length + 1)),
        offsets=np.arange(n + 1) * (length + 1),
        action_mask=mask,
        turn=mask.astype(np.int64),
        prompt_index=np.repeat(np.arange(PROMPTS), SAMPLES),
        finish_reason=("length",) * n,
        sampling=Sampling(),
        fingerprint={},
        rewards=drawn if rewards else None,
    )


def scorings(sampled, delta, logprob=-30.0):
    ids, left = sampled.token_ids[sampled.actions], np.full(sampled.n_actions, logprob)
    return Scoring("e:decode", ids, left, {}), Scoring("fsdp", ids, left + delta, {})


def noise(sampled, scale, seed=0):
    return scale * np.random.default_rng(seed).standard_normal(sampled.n_actions) - scale**2 / 2


def tried(delta=None, sampled=None, lawful=True, logprob=-30.0, **options):
    sampled = sampled or rollout()
    delta = np.zeros(sampled.n_actions) if delta is None else delta
    return preview(sampled, *scorings(sampled, delta, logprob), sampled_by_left=lawful, **options)


def rows(result):
    return values(words.shown(result).tables[0])


def test_sides_that_agree_need_no_correction():
    result = tried()
    assert result.favoured == NONE
    assert numbers(result.reason) == [1]  # every weight
    for row in result.previews:
        assert (row.kept_tokens, row.kept_sequences, row.ess.value) == (1.0, 1.0, 1.0)
        assert (row.weight_mean, row.weight_std, row.weight_max) == (1.0, 0.0, 1.0)
        bias = row.token.bias
        assert (bias.value, bias.low, bias.high, row.token.distance.value) == (0, 0, 0, 0)
        assert row.token.error == pytest.approx(1 / math.sqrt(PROMPTS * SAMPLES))


def test_every_figure_by_its_definition():
    sampled = rollout()
    delta = noise(sampled, 0.4)
    result = tried(delta, sampled, batch=50)
    sequence = sampled.sequence_of_token[sampled.actions]
    rho = np.exp(delta)
    product = np.exp(np.bincount(sequence, weights=delta))[sequence]
    advantage = group_advantages(sampled.rewards, sampled.prompt_index)[sequence]
    cases = {
        "icepop": (np.where((rho >= 0.5) & (rho <= 5), rho, 0.0), None),
        "tis-sequence": (np.minimum(product, 2), np.minimum(product, 2)[::LENGTH]),
    }
    for id, (w, per_sequence) in cases.items():
        row = result.named(id)
        assert row.kept_tokens == pytest.approx((w > 0).mean())
        assert (row.weight_mean, row.weight_std, row.weight_max) == pytest.approx(
            (w.mean(), w.std(), w.max())
        )
        units = w if per_sequence is None else per_sequence
        assert row.ess.value == pytest.approx(units.sum() ** 2 / len(units) / (units**2).sum())
        assert row.ess.n_tokens == sampled.n_actions
        size = np.abs(advantage)
        distance = (np.abs(w - rho) * size).sum() / size.sum()
        second = (w**2 * advantage**2).sum() / (advantage**2).sum()
        assert row.token.bias.value == pytest.approx((w - rho).mean())
        assert row.token.bias.low < row.token.bias.value < row.token.bias.high
        assert row.token.distance.value == pytest.approx(distance)
        assert row.token.error == pytest.approx(math.sqrt(distance**2 + second / 50))


def test_effective_size_counts_sequences_where_they_share_a_weight():
    """One prompt token each; a sequence of 9 tokens is dropped, one of 1 token is kept."""
    mask = np.array([0, *[1] * 9, 0, 1], dtype=bool)
    sampled = Rollout(
        token_ids=np.zeros(12, dtype=np.int64),
        offsets=np.array([0, 10, 12]),
        action_mask=mask,
        turn=mask.astype(np.int64),
        prompt_index=np.array([0, 1]),
        finish_reason=("stop",) * 2,
        sampling=Sampling(),
        fingerprint={},
    )
    result = tried(np.array([*[0.1] * 9, 0.0]), sampled)
    assert result.named("geometric").ess.value == pytest.approx(1 / 2)
    assert result.named("geometric-token").ess.value == pytest.approx(1 / 10)
    assert result.named("geometric").kept_tokens == pytest.approx(1 / 10)


def test_the_upper_end_of_the_interval_decides():
    """A distance that may be larger than it looks is not waved through."""
    delta = noise(rollout(), 0.05)
    distance = tried(delta).named(NONE).token.distance
    middle = (distance.value + distance.high) / 2
    batch = round(1 / (3 * middle) ** 2)
    bound = 1 / (3 * math.sqrt(batch))
    assert distance.value < bound < distance.high
    assert tried(delta, batch=batch).favoured == "tis-token"
    assert tried(delta, batch=round(1 / (3.1 * distance.high) ** 2)).favoured == NONE


def test_a_truncation_that_binds_nowhere_is_exact():
    row = tried(noise(rollout(), 0.05)).named("tis-token")
    assert row.token.bias.value == row.token.distance.value == 0.0


def test_a_planted_spread_calls_for_a_correction_and_a_small_one_does_not():
    small, large = tried(noise(rollout(), 0.01)), tried(noise(rollout(), 0.3))
    assert small.favoured == NONE
    assert small.named(NONE).token.distance.high < NEGLIGIBLE / math.sqrt(small.batch)
    assert large.favoured == large.best == "tis-token"
    assert large.named("tis-token").token.error < large.named(NONE).token.error
    assert large.named(NONE).token.distance.high > NEGLIGIBLE / math.sqrt(large.batch)


def test_a_larger_batch_makes_the_same_bias_matter():
    delta = noise(rollout(), 0.02)
    assert tried(delta, batch=64).favoured == NONE
    assert tried(delta, batch=6400).favoured == "tis-token"


def test_none_helps_where_every_correction_is_worse():
    """Ratios of 50, from 0.018 to 0.9, on one sample of each prompt: all is cut or dropped."""
    sampled = rollout(rewards=False, length=1)
    delta = np.where(np.arange(sampled.n_actions) % SAMPLES == 0, math.log(50.0), 0.0)
    settings = Settings(cap=1.0, band=(0.5, 1.5), mask_cap=1.0, cis_lambda=0.0)
    result = tried(delta, sampled, settings=settings, logprob=-4.0)
    assert result.favoured == NONE
    assert result.named(NONE).token.tied
    assert result.named(NONE).token.distance.high > NEGLIGIBLE / math.sqrt(result.batch)
    assert result.best is not None


@pytest.mark.parametrize("scale", [0.0, 0.01, 0.3, 3.0])
def test_the_override_is_never_favoured_and_never_ranked(scale):
    result = tried(noise(rollout(), scale))
    row = result.named(OVERRIDE)
    assert row.token.rank is None
    assert OVERRIDE not in (result.favoured, result.best)
    assert row.same_as == NONE
    assert rows(result)[-1]["name"] == OVERRIDE
    assert words.HIDES in words.shown(result).parts[0].sentences[-1]


def test_equal_weights_share_a_rank_and_name_their_twin():
    result = tried(noise(rollout(), 0.05))
    first, second = result.named("tis-token"), result.named("icepop")
    assert second.same_as == "tis-token"
    assert first.same_as is None
    assert first.token.rank == second.token.rank == 1
    assert first.token.tied
    assert second.token.tied


def test_a_difference_within_a_percent_is_as_good():
    """One token per sequence just over the cap: IcePop is exact there, and TIS as good."""
    delta = noise(rollout(), 0.1)
    delta[::LENGTH] = math.log(2.02)
    result = tried(delta, batch=8000)
    exact, cut = result.named("icepop").token, result.named("tis-token").token
    assert exact.distance.value == 0.0 < cut.distance.low
    assert (exact.rank, cut.tied, result.favoured) == (1, True, "tis-token")
    assert "IcePop" in result.reason


def test_ranks_follow_the_error():
    result = tried(noise(rollout(), 0.4))
    ranked = [row.token for row in result.previews if row.token.rank]
    assert len(ranked) == len(CORRECTIONS) - 1
    for row in ranked:
        assert row.rank == 1 + sum(other.error < row.error * (1 - 1e-12) for other in ranked)
    assert not result.named("geometric").token.tied
    shown = [int(row["rank"].split()[0]) for row in rows(result)[:-1]]
    assert shown == sorted(row.rank for row in ranked)


def test_all_tokens_dropped_is_no_effective_size():
    result = tried(np.full(rollout().n_actions, 0.5))
    none = result.named("geometric")
    assert (none.kept_tokens, none.kept_sequences, none.ess) == (0, 0, None)
    row = next(row for row in rows(result) if row["name"] == "geometric")
    assert row["ESS"] is None


def test_without_a_sampling_law_nothing_is_ranked():
    result = tried(noise(rollout(), 0.3), lawful=False)
    assert result.favoured is result.best is None
    assert result.reason == NOT_LAWFUL
    assert result.not_tested == (NOT_LAWFUL,)
    assert all(row.token is None for row in result.previews)
    assert 0 < result.named("tis-token").ess.value < 1
    assert [part.id for part in words.shown(result).parts] == ["corrections-effects"]
    assert {row["rank"] for row in rows(result)} == {None}


@pytest.mark.parametrize("rewards", [None, np.nan, 1.0], ids=["none", "unknown", "equal"])
def test_without_advantages_all_tokens_weigh_alike(rewards):
    sampled = rollout()
    given = None if rewards is None else np.full(sampled.n_sequences, rewards)
    sampled = replace(sampled, rewards=given)
    delta = noise(sampled, 0.3)
    result = tried(delta, sampled)
    assert result.favoured == "tis-token"
    assert result.named(NONE).token.distance.value == pytest.approx(
        np.abs(np.exp(delta) - 1.0).mean()
    )


def test_advantages_decide_which_tokens_count():
    """Only prompt 0 has a signal; the mismatch of all others cannot do harm."""
    sampled = rollout()
    sampled = replace(sampled, rewards=np.where(np.arange(sampled.n_sequences) == 0, 1.0, 0.0))
    delta = noise(sampled, 0.5)
    delta[sampled.prompt_index[sampled.sequence_of_token[sampled.actions]] == 0] = 0.0
    result = tried(delta, sampled)
    assert result.named(NONE).token.distance.value == 0.0
    assert result.favoured == NONE


def test_one_prompt_is_ranked_but_nothing_is_favoured():
    sampled = replace(rollout(), prompt_index=np.zeros(PROMPTS * SAMPLES, dtype=np.int64))
    result = tried(noise(sampled, 0.4), sampled)
    assert result.named("tis-token").token.bias.low is None
    assert result.favoured is None
    assert result.best == "tis-token"
    assert result.reason == ONE_PROMPT
    calm = tried(noise(sampled, 1e-4), sampled)
    assert calm.favoured is None  # "at most" would be said of one prompt's value
    assert tried(np.zeros(sampled.n_actions), sampled).favoured == NONE
    assert [row.id for row in result.previews if row.token.tied] == ["tis-token"]


def test_bad_input_is_refused():
    sampled = rollout()
    left, right = scorings(sampled, np.zeros(sampled.n_actions))
    broken = replace(right, logprobs=right.logprobs * np.nan)
    with pytest.raises(MismatchError, match="not finite"):
        preview(sampled, left, broken, sampled_by_left=True)
    with pytest.raises(MismatchError, match="--batch"):
        preview(sampled, left, right, sampled_by_left=True, batch=0)
    bare = replace(sampled, action_mask=np.zeros_like(sampled.action_mask))
    with pytest.raises(EmptyComparison):
        preview(bare, left, right, sampled_by_left=True)


@pytest.mark.parametrize("lawful", [True, False])
def test_round_trip_through_strict_json(lawful):
    result = tried(noise(rollout(), 5.0), lawful=lawful, settings=Settings(band=(0.2, 4.0)))
    text = json.dumps(to_json(result), allow_nan=False)
    assert from_json(Corrections, json.loads(text)) == result
    assert bool(json.loads(text)["recipes"]) == lawful


def test_clamped_log_ratios_are_said():
    sampled = rollout()
    delta = noise(sampled, 0.01)
    delta[0] = -25.0
    result = tried(delta, sampled)
    assert result.clamped == 2  # the token and its sequence
    assert any("±20" in remark for remark in words.remarks(result))
