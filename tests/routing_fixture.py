"""Invented routing of both sides: which experts differ is planted, the rest is drawn."""

from __future__ import annotations

import numpy as np
import pandas as pd

from mismatch.metrics.routing_pairs import RouterNoise, router_noise
from mismatch.types import Rollout, Routing, Sampling, Scoring

NOISE = 0.02  # scale of how far a margin moves between two passes of the trainer


def rollout_of(tokens: pd.DataFrame, samples_per_prompt: int = 4) -> Rollout:
    """A rollout whose action tokens are the rows of a tokens table; a prompt is its number."""
    lengths = tokens.groupby("sequence")["position"].max().to_numpy() + 1
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    actions = offsets[tokens["sequence"].to_numpy()] + tokens["position"].to_numpy()
    prompts = np.arange(len(lengths)) // samples_per_prompt
    token_ids = np.repeat(prompts, lengths)
    token_ids[actions] = tokens["token_id"].to_numpy()
    mask = np.zeros(offsets[-1], bool)
    mask[actions] = True
    return Rollout(
        token_ids=token_ids,
        offsets=offsets,
        action_mask=mask,
        turn=mask.astype(np.int64),
        prompt_index=prompts,
        finish_reason=("stop",) * len(lengths),
        sampling=Sampling(),
        fingerprint={"engine": "vllm"},
    )


def routing_pair(
    rollout: Rollout,
    differs: np.ndarray,
    *,
    top_k: int = 2,
    experts: int = 16,
    weights: bool = False,
    seed: int = 0,
) -> tuple[Routing, Routing]:
    """Both sides' routing: one expert is another where ``differs`` [A, L] says so.

    Margins are those of the train side; where experts differ they are within a few ``NOISE``.
    """
    rng = np.random.default_rng(seed)
    rows, layers = len(rollout.token_ids), differs.shape[1]
    first = np.minimum(rng.geometric(4.0 / experts, (rows, layers)) - 1, experts - 1)
    left = (first[..., None] + np.arange(top_k)) % experts
    right = left.copy()
    flipped = np.zeros((rows, layers), bool)
    flipped[rollout.actions - 1] = differs
    right[flipped, -1] = (right[flipped, -1] + 1) % experts
    margin = rng.exponential(0.5, (rows, layers))
    margin[flipped] = np.abs(NOISE * rng.normal(size=flipped.sum()))
    dtype = np.uint8 if experts <= 256 else np.uint16
    present = np.ones(rows, bool)
    numbers = tuple(range(layers))
    gates = None
    if weights:
        gates = np.sort(rng.dirichlet(np.ones(top_k), (rows, layers)), axis=2)[..., ::-1]
        gates = gates.astype(np.float32)
    return (
        Routing(numbers, experts, left.astype(dtype), present, gates),
        Routing(numbers, experts, right.astype(dtype), present, gates, margin.astype(np.float32)),
    )


def with_routing(
    rollout: Rollout, tokens: pd.DataFrame, left: Routing, right: Routing
) -> tuple[Scoring, Scoring, RouterNoise]:
    """The two scorings of a tokens table, and the noise of a regrouped pass of the trainer."""
    ids = rollout.token_ids[rollout.actions]
    decode = Scoring("vllm:decode", ids, tokens["rollout_logprob"].to_numpy(), {}, routing=left)
    facts = {"mode": "train", "dtype": "bf16"}
    train = Scoring("fsdp", ids, tokens["train_logprob"].to_numpy(), facts, routing=right)
    assert right.margin is not None
    moved = NOISE * np.random.default_rng(9).normal(size=right.margin.shape)
    margin = np.abs(right.margin + moved).astype(np.float32)
    again = Routing(right.layers, right.num_experts, right.ids, right.present, None, margin)
    regrouped = Scoring("fsdp:regrouped", ids, train.logprobs, facts, routing=again)
    noise = router_noise(rollout, train, [regrouped])
    assert noise is not None
    return decode, train, noise
