"""Which of three parties stands apart, decided by intervals. Pure.

Three scorings of the same tokens, all made by scoring given ids: their pairwise mean |delta| are
the edges of a triangle. A party stands apart where both its edges are longer than the third: the
difference of two edges is paired token by token, and its 95 % interval has to lie above 0. Three
parties cannot be told apart by mistake more often than one: two of them would each need an edge to
be longer than the other's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from mismatch.experiments.engine_pair.types import Contrast
from mismatch.metrics import METRICS
from mismatch.metrics.difference import paired
from mismatch.types import Floats, Rollout

MEASURE = "logprob_abs_diff_mean"  # the same from either end, unlike k3
WORTH = 0.1  # a party is odd only where its edges are longer by at least that share
# Nats; what levels.toml calls healthy for mean |delta| in float32: nearer is rounding.
FLOOR = 1e-5
FLOOR_TEXT = f"{FLOOR:.0e}".replace("e-0", "e-")


def contrasts(
    rollout: Rollout, logprobs: Mapping[str, Floats], tokens: str, seed: int = 0
) -> list[Contrast]:
    """Both edges of every party against the third edge, on one set of tokens.

    Args:
        logprobs: party -> [A]; three parties.
    """
    sequence = rollout.sequence_of_token[rollout.actions]
    sizes = {
        frozenset(pair): logprobs[pair[1]] - logprobs[pair[0]] for pair in combinations(logprobs, 2)
    }
    made = []
    for party in logprobs:
        others = [one for one in logprobs if one != party]
        opposite = sizes[frozenset(others)]
        for other in others:
            estimate = paired(
                METRICS[MEASURE],
                {"delta": opposite},
                {"delta": sizes[frozenset((party, other))]},
                sequence=sequence,
                prompt=rollout.prompt_index,
                seed=seed,
            )
            made.append(Contrast(party, other, tokens, estimate))
    return made


def lengths(logprobs: Mapping[str, Floats]) -> dict[frozenset[str], float]:
    """Mean |delta| of every edge."""
    return {
        frozenset(pair): float(np.abs(logprobs[pair[1]] - logprobs[pair[0]]).mean())
        for pair in combinations(logprobs, 2)
    }


def odd_one(
    found: Sequence[Contrast], edges: Mapping[str, Mapping[frozenset[str], float]]
) -> tuple[str | None, float | None]:
    """The party that stands apart on every set of tokens, and by what factor at least.

    Args:
        edges: tokens -> lengths of their three edges.
    """
    if all_agree(edges):
        return None, None
    parties = list(dict.fromkeys(one.party for one in found))
    for party in parties:
        mine = [one for one in found if one.party == party]
        told = all(one.difference.low is not None and one.difference.low > 0 for one in mine)
        factor = min(
            _factor(party, known) for known in edges.values()
        )  # of its shorter edge, on the tokens where that is shortest
        if told and factor >= 1.0 + WORTH:
            return party, factor
    return None, None


def all_agree(edges: Mapping[str, Mapping[frozenset[str], float]]) -> bool:
    """Whether every edge on every set of tokens is too short to matter."""
    return bool(edges) and all(
        length < FLOOR for known in edges.values() for length in known.values()
    )


def _factor(party: str, known: Mapping[frozenset[str], float]) -> float:
    own = [length for pair, length in known.items() if party in pair]
    third = next(length for pair, length in known.items() if party not in pair)
    return min(own) / third if third > 0 else float("inf")
