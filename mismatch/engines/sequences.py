"""Samples by seed, and what every engine refuses: ids that no model has, starts without a past."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from mismatch.errors import MismatchError


def sample_seed(seed: int, prompt: int, sample: int) -> int:
    """A 31-bit seed for one sample of one prompt.

    Hashed, not counted: with ``seed + sample`` two runs with neighbouring seeds would share most of
    their random streams.
    """
    text = f"{seed}/{prompt}/{sample}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def require_starts(starts: Sequence[int]) -> None:
    """Refuse to score a first token.

    Raises:
        MismatchError: a start below 1: nothing predicts the first token.
    """
    if min(starts, default=1) < 1:
        raise MismatchError(
            "prefill from token 0: nothing predicts the first token", "start at token 1 or later"
        )


def require_ids(sequences: Sequence[Sequence[int]], vocabulary: int) -> None:
    """Refuse what would end the whole server: ids outside the vocabulary, or no ids at all.

    Raises:
        MismatchError: naming the sequence and the id.
    """
    fix = "the tokenizer does not fit the model: save both together with save_pretrained()"
    for index, ids in enumerate(sequences):
        if not ids:
            raise MismatchError(f"sequence {index} is empty", "drop the prompt")
        for token in (min(ids), max(ids)):
            if not 0 <= token < vocabulary:
                raise MismatchError(
                    f"sequence {index} holds id {token}, the vocabulary has {vocabulary}", fix
                )
