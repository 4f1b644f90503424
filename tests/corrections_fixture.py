"""Corrections of a synthetic report, previewed on its own tokens."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd

from mismatch.features.corrections.preview import preview
from mismatch.features.corrections.results import Corrections
from mismatch.types import Ints, Rollout, Sampling, Scoring


@cache
def _corrections(rollout: bytes, delta: bytes, sequence: bytes, prompt: bytes) -> Corrections:
    """Previewed on the table's own tokens; rewards are drawn."""
    left, sequences = np.frombuffer(rollout), np.frombuffer(sequence, dtype=np.int64)
    lengths = np.bincount(sequences) + 1  # and one token of prompt
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = np.ones(offsets[-1], dtype=bool)
    mask[offsets[:-1]] = False
    prompts = np.frombuffer(prompt, dtype=np.int64)
    token_ids = np.repeat(prompts, lengths)
    ids = token_ids[mask]
    samples = Rollout(
        token_ids=token_ids,
        offsets=offsets,
        action_mask=mask,
        turn=mask.astype(np.int64),
        prompt_index=prompts,
        finish_reason=("stop",) * len(prompts),
        sampling=Sampling(),
        fingerprint={"engine": "vllm"},
        rewards=np.random.default_rng(3).integers(0, 2, len(prompts)).astype(float),
    )
    decode = Scoring("vllm:decode", ids, left, {})
    train = Scoring("fsdp", ids, left + np.frombuffer(delta), {})
    return preview(samples, decode, train, sampled_by_left=True)


def corrections_of(tokens: pd.DataFrame, prompts: Ints) -> Corrections:
    """Preview the corrections of a token table whose sequences have these prompts."""
    columns = [tokens[name].to_numpy() for name in ("rollout_logprob", "delta")]
    return _corrections(
        *(column.tobytes() for column in columns),
        tokens["sequence"].to_numpy().astype(np.int64).tobytes(),
        prompts.astype(np.int64).tobytes(),
    )
