"""Coefficients of the policy gradient, against values worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.experiments.gradients.coefficients import choose_batch, normalised, unclipped
from mismatch.experiments.gradients.types import REWARDS
from mismatch.training.gradients import GROUPS, group_of
from mismatch.types import Rollout
from tests.checkpoints import rollout

# Two samples of 2 and 4 action tokens, then two of 3 and 1.
LENGTHS = ((2, 2), (2, 4), (3, 3), (3, 1))
SIGN = 1.0 / (np.sqrt(0.5) + 1e-6) / 2.0  # rewards 1 and 0: (1 - 1/2) / (std + 1e-6)


def rollout_of(rewards: list[float] | None = None) -> Rollout:
    base = rollout(LENGTHS)
    return replace(base, rewards=None if rewards is None else np.array(rewards))


def sequences(rollout: Rollout) -> np.ndarray:
    return rollout.sequence_of_token[rollout.actions]


def test_token_loss_divides_by_all_tokens_and_sequence_loss_by_each_samples() -> None:
    rollout = rollout_of([1.0, 0.0, 0.0, 1.0])
    batch = choose_batch(rollout, 16, 0)
    assert batch.source == REWARDS
    assert batch.deciding == 2
    signs = np.repeat([SIGN, -SIGN, -SIGN, SIGN], [2, 4, 3, 1])
    assert normalised(batch, sequences(rollout), "token") == pytest.approx(signs / 10)
    lengths = np.repeat([2, 4, 3, 1], [2, 4, 3, 1])
    assert normalised(batch, sequences(rollout), "sequence") == pytest.approx(signs / (4 * lengths))


def test_prompts_that_decide_come_first_and_normalise_alone() -> None:
    rollout = rollout_of([1.0, 1.0, 0.0, 1.0])  # only the second prompt decides
    for seed in range(4):
        batch = choose_batch(rollout, 1, seed)
        assert batch.prompts.tolist() == [1]
        assert batch.deciding == 1
        token = normalised(batch, sequences(rollout), "token")
        assert token == pytest.approx(np.repeat([0, 0, -SIGN, SIGN], [2, 4, 3, 1]) / 4)
    both = choose_batch(rollout, 16, 0)
    assert both.prompts.tolist() == [1, 0]
    assert both.deciding == 1
    token = normalised(both, sequences(rollout), "token")
    assert token == pytest.approx(np.repeat([0, 0, -SIGN, SIGN], [2, 4, 3, 1]) / 10)


def test_the_seed_chooses_the_prompts() -> None:
    many = replace(rollout(((2, 2),) * 40), rewards=np.tile([0.0, 1.0], 20))
    chosen = [choose_batch(many, 5, seed).prompts.tolist() for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert all(len(set(prompts)) == 5 for prompts in chosen)


@pytest.mark.parametrize("rewards", [None, [1.0, 1.0, 0.0, 0.0], [np.nan] * 4])
def test_without_deciding_rewards_advantages_are_centred_signs(rewards: list[float] | None) -> None:
    batch = choose_batch(rollout_of(rewards), 16, 0)
    assert batch.source != REWARDS
    assert batch.deciding == 2
    assert sorted(batch.advantage[:2]) == sorted(batch.advantage[2:]) == [-1.0, 1.0]
    odd = replace(rollout(((2, 2),) * 3), prompt_index=np.zeros(3, np.int64))
    assert choose_batch(odd, 16, 0).advantage.sum() == pytest.approx(0.0)
    assert np.abs(choose_batch(odd, 16, 0).advantage).max() == pytest.approx(4 / 3)
    alone = replace(rollout(((2, 2),) * 3), prompt_index=np.arange(3))
    assert np.abs(choose_batch(alone, 16, 0).advantage).tolist() == [1.0, 1.0, 1.0]


def test_nothing_to_take_a_gradient_of_is_refused() -> None:
    with pytest.raises(EmptyComparison):
        choose_batch(rollout(((5, 0),)), 16, 0)
    with pytest.raises(MismatchError, match="no batch"):
        choose_batch(rollout_of(), 0, 0)


def test_ppo_gradient_is_the_objectives_derivative() -> None:
    ratio, advantage = np.array([0.5, 0.9, 1.1, 1.5] * 2), np.repeat([1.0, -1.0], 4)

    def objective(logprob: np.ndarray) -> np.ndarray:
        r = ratio * np.exp(logprob)
        return np.minimum(r * advantage, np.clip(r, 0.8, 1.2) * advantage)

    numeric = (objective(np.full(8, 1e-6)) - objective(np.full(8, -1e-6))) / 2e-6
    ours = np.where(unclipped(ratio, advantage), ratio * advantage, 0.0)
    assert ours == pytest.approx(numeric, abs=1e-8)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.model.layers.0.self_attn.q_proj.weight", "attention"),
        ("model.model.layers.0.self_attn.gate.weight", "attention"),
        ("model.model.layers.0.self_attn.q_norm.weight", "norms"),
        ("model.model.layers.0.self_attn.sinks", "sinks"),
        ("model.model.layers.0.mlp.router.bias", "router"),
        ("model.model.layers.0.mlp.gate.weight", "router"),
        ("model.model.layers.0.mlp.experts.gate_up_proj", "experts"),
        ("model.model.layers.0.mlp.shared_experts.up_proj.weight", "experts"),
        ("model.model.layers.0.mlp.gate_proj.weight", "mlp"),
        ("model.model.embed_tokens.weight", "embeddings"),
        ("model.lm_head.weight", "head"),
        ("model.model.norm.weight", "norms"),
        ("model.model.embeddings.weight", "embeddings"),
        ("model.model.embed_tokens_per_layer.weight", "embeddings"),
        ("model.model.layers.0.mixer.q_proj.weight", "attention"),
        ("model.model.layers.0.mixer.in_proj.weight", "other"),
        ("model.model.layers.0.mamba.A_log", "other"),
    ],
)
def test_parameters_have_groups(name: str, group: str) -> None:
    assert group_of(name) == group
    assert group in GROUPS
