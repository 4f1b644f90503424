"""Tokens tables of version 2, as large as asked for."""

from __future__ import annotations

import numpy as np
import pandas as pd

from mismatch.pipeline.tokens import arrow_lists


def many(
    sequences: int = 60,
    length: int = 100,
    seed: int = 0,
    vocabulary: int = 900,
    layers: int = 12,
    asked: int = 1,
) -> pd.DataFrame:
    """Drawn at random: a few common words, heavy tails, 4 % of flips in every layer.

    A prompt has four samples and 3 * ``asked`` tokens.

    Both sides' likeliest outcomes stand at every 97th token, at most 512 times; the rollout side
    did not name the third.
    """
    rng = np.random.default_rng(seed)
    n = sequences * length
    left = -rng.gamma(0.4, 1.0, n)
    delta = 0.02 * rng.standard_t(3, n)
    flips = rng.random((n, layers)) < 0.04
    words = np.minimum(rng.zipf(1.3, n), vocabulary) - 1
    sequence = np.repeat(np.arange(sequences), length)
    first = np.arange(n) % length == 0
    tops = np.where((np.arange(n) % 97 == 0) & (np.arange(n) < 97 * 512), 3, 0)
    ends = np.concatenate([[0], np.cumsum(tops)])
    return pd.DataFrame(
        {
            "sequence": sequence,
            "prompt": sequence // 4,
            "sample": sequence % 4,
            "position": np.tile(np.arange(length), sequences) + 3 * asked,
            "token_id": words,
            "token": np.array([f" t{i}" for i in range(vocabulary)], dtype=object)[words],
            "token_class": "word",
            "rollout_logprob": left,
            "train_logprob": left + delta,
            "delta": delta,
            "entropy": rng.gamma(1.0, 0.5, n),
            "reward": (sequence % 2).astype(float),
            "reference_logprob": left + 0.1 * delta,
            "fix": "a-fix",
            "fix_logprob": left + 0.5 * delta,
            "routing_flips": pd.array(flips.sum(axis=1), dtype="Int16"),
            "routing_flipped_layers": arrow_lists(
                2 * np.nonzero(flips)[1], np.concatenate([[0], np.cumsum(flips.sum(axis=1))])
            ),
            "routing_margin": rng.gamma(1, 0.1, n).astype(np.float32),
            "context": arrow_lists(
                [text for s in range(sequences) for text in [f" q{s // 4}", " is", "?"] * asked],
                np.concatenate([[0], np.cumsum(3 * asked * first)]),
                "string",
            ),
            "top_ids": arrow_lists(np.arange(ends[-1]), ends),
            "top_tokens": arrow_lists(["</script>", "b", "c"] * (ends[-1] // 3), ends, "string"),
            "top_rollout": arrow_lists(np.tile([-0.5, -3.0, np.nan], ends[-1] // 3), ends),
            "top_train": arrow_lists(np.tile([-np.inf, -1.0, -2.0], ends[-1] // 3), ends),
        }
    )
