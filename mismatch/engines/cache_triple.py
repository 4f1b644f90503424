"""The same contexts continued with the prefix cache unread and read, after prefill and decode.

Cold, warm prompt and warm decode of one engine. Greedy, so that no generator has to be wound back;
where the two continuations part, the last logprob is that of the cold one's token on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mismatch.captures import CacheKind, CachePair
from mismatch.engines.base import CacheReading, Continued, Progress
from mismatch.errors import MismatchError

NEW = 16  # tokens that are compared, of each continuation
BLOCK = 128  # largest block of a cache that contexts are made long enough for


def context_of(longest: int) -> int:
    """Tokens of the longest sequence that the triple needs, for prompts of at most ``longest``."""
    return max(longest, BLOCK + 1) + BLOCK + 2 * NEW


def measure(
    engine: CacheReading, prompts: Sequence[list[int]], block: int, progress: Progress
) -> list[CachePair]:
    """Both pairs of every prompt.

    Args:
        block: tokens of a block of the cache; only whole blocks are read from it.

    Raises:
        MismatchError: blocks larger than contexts are long, or a cold pass that was not cold.
    """
    if not 0 < block <= BLOCK:
        raise MismatchError(f"the prefix cache has blocks of {block} tokens, at most {BLOCK} fit")
    contexts = [lengthened(ids, block + 1) for ids in prompts]
    cold = engine.continue_greedily(contexts, block + NEW, False, progress)
    warm = engine.continue_greedily(contexts, NEW, True, progress)
    longer = [ids + one.token_ids for ids, one in zip(contexts, cold, strict=True)]
    # Warm first: a cold pass would leave blocks of the same tokens that prefill has written.
    warm_decode = engine.continue_greedily(longer, NEW, True, progress)
    cold_decode = engine.continue_greedily(longer, NEW, False, progress)
    if any(one.cached for one in (*cold, *cold_decode)):
        raise MismatchError("the engine read its prefix cache although it was told to leave it")
    rounds: list[tuple[CacheKind, list[list[int]], list[Continued], list[Continued]]] = [
        ("warm prompt", contexts, cold, warm),
        ("warm decode", longer, cold_decode, warm_decode),
    ]
    return [
        pair_of(kind, (len(ids), len(prompt)), left, right)
        for kind, given, lefts, rights in rounds
        for prompt, ids, left, right in zip(contexts, given, lefts, rights, strict=True)
    ]


def lengthened(ids: list[int], least: int) -> list[int]:
    """A prompt, repeated until it has ``least`` tokens.

    >>> lengthened([1, 2], 5)
    [1, 2, 1, 2, 1, 2]
    """
    return ids * -(-least // len(ids))


def pair_of(
    kind: CacheKind, context: tuple[int, int], cold: Continued, warm: Continued
) -> CachePair:
    """Log-probabilities of the cold continuation's tokens, up to where the warm one parts.

    A token that is not among the likeliest of the warm one is given the least of those: an upper
    bound of its log-probability, so that the two are at least that far apart.

    Args:
        context: its tokens, and how many of them prefill had written.
    """
    length = min(len(cold.token_ids), len(warm.token_ids), NEW)
    left, right = np.asarray(cold.token_ids[:length]), np.asarray(warm.token_ids[:length])
    differ = np.flatnonzero(left != right)
    parts = int(differ[0]) if len(differ) else None
    used = length if parts is None else parts + 1
    rows = list(zip(cold.token_ids, cold.likeliest, warm.likeliest, strict=False))[:used]
    return CachePair(
        kind,
        *context,
        warm.cached,
        tuple(own[token] for token, own, _ in rows),
        tuple(other.get(token, min(other.values())) for token, _, other in rows),
        parts,
    )
