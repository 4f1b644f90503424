"""Whole next-token distributions at a seeded sample of action tokens, the same for every side.

The side that samples chooses: the positions, and for each of them the ids whose log-probabilities
are kept. A small vocabulary is kept whole; of a large one the sampling side's k most likely ids,
and the mass of all others as one number. Every other side gives the same ids of the same positions,
so that two of them can be compared by sum p log(p / q): mismatch.metrics.exact.

Which positions: every action token has a pseudo-random number that depends on the run's seed, its
sequence and its place in it, never on its text; those with the smallest numbers are taken. So an
engine can choose while it samples, before it knows how many tokens there will be.

M is the number of positions, k that of ids per position, V the size of the vocabulary; other
letters as in mismatch.types. Also here: what cannot be true of captured experts, and what an
engine gives with its prefix cache and without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mismatch.errors import CorruptCapture, MismatchError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
WHOLE_VOCABULARY = 4096  # entries up to which all of them are kept: 16 KiB per position
OFF_BY = 1e-3  # nats that the sum of a float32 distribution may be away from 1
AGAIN = "make the run again, or without it: --exact-kl 0"
WHOLE_AND_PART = "one side holds whole distributions, the other a part of each"
ENTRIES = 1 << 22  # ids that are validated at a time
FEW_ROWS = 64  # rows that may share their experts by chance
LIKELIEST = 5  # outcomes of every sampled token that either side keeps
ABSENT_LOGPROB = -9998.0  # servers write -9999 for minus infinity, which JSON does not have
CacheKind = Literal[
    "warm prompt", "warm decode"
]  # what wrote the cache that a context was read from
Corruption = tuple[str, int, int]  # what, row of T, column of L


class NotNumbers(ValueError):
    """Log-probabilities that are NaN."""


@dataclass(frozen=True, slots=True)
class CachePair:
    """One context continued greedily twice: with the prefix cache unread, and read.

    Attributes:
        context: its tokens, the first ``prefilled`` of which were written by prefill.
        cached: those whose keys and values the second one read.
        cold, warm: logprobs of the first one's tokens on both, nats.
        parts: index of the token at which the two part, the last of ``cold``; None: nowhere.
    """

    kind: CacheKind
    context: int
    prefilled: int
    cached: int
    cold: tuple[float, ...]
    warm: tuple[float, ...]
    parts: int | None = None

    @property
    def was_read(self) -> bool:
        """Whether something of the kind was read: for decode, blocks that it had a part in."""
        return self.cached > (self.prefilled if self.kind == "warm decode" else 0)


@dataclass(frozen=True, slots=True)
class Distributions:
    """What one side says about every token that could come at M positions.

    Example: two positions, the two most likely ids of 1,000::

        Distributions(
            positions=[3, 17],                          # [M] int64, indices into A, ascending
            logprobs=[[-.1, -3.], [-.7, -.9]],          # [M, k] float32, nats
            vocabulary=1000,
            ids=[[7, 9], [12, 7]],                      # [M, k] int64
            rest=[-3.1, -2.4],                          # [M] float32: log of what is left to 1
        )

    Attributes:
        logprobs: without ``ids``, [M, V]: column i is id i. -inf: never sampled (top-p, top-k).
    """

    positions: Ints
    logprobs: NDArray[np.float32]
    vocabulary: int
    ids: Ints | None = None
    rest: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        count = len(self.positions)
        width = self.vocabulary if self.ids is None else self.ids.shape[-1]
        if self.logprobs.shape != (count, width) or (self.ids is None) != (self.rest is None):
            raise CorruptCapture(
                f"distributions of {count} positions: {self.logprobs.shape} logprobs, "
                f"expected {(count, width)}",
                AGAIN,
            )
        if self.ids is not None and self.rest is not None:
            if self.ids.shape != self.logprobs.shape or self.rest.shape != (count,):
                raise CorruptCapture("distributions: ids, logprobs and rest differ in shape", AGAIN)
            ordered = np.sort(self.ids, axis=1)
            if (ordered[:, 1:] == ordered[:, :-1]).any():
                raise CorruptCapture("distributions: the same id twice at one position", AGAIN)
        if (np.diff(self.positions) <= 0).any():
            raise CorruptCapture("distributions: positions are not in ascending order", AGAIN)

    @property
    def whole(self) -> bool:
        """Whether every id of the vocabulary is there."""
        return self.ids is None

    def law(self, name: str = "a scoring") -> Floats:
        """Log-probabilities in float64 that sum to 1 in every row, [M, V] or [M, k + 1].

        The last of k + 1 columns is everything outside the ids. float32 rows miss 1 by about 1e-7,
        which would count in full, while what is left after dividing by the sum counts squared.

        Args:
            name: whose they are, for the error.

        Raises:
            MismatchError: NaN, or rows that do not sum to 1.
        """
        rows = self.logprobs.astype(np.float64)
        if self.rest is not None:
            rows = np.concatenate([rows, self.rest.astype(np.float64)[:, None]], axis=1)
        with np.errstate(divide="ignore"):
            total = np.log(np.exp(rows).sum(axis=1))
        bad = ~(np.abs(total) <= OFF_BY)
        if bad.any():
            first = int(np.flatnonzero(bad)[0])
            raise MismatchError(
                f"{name}: {int(bad.sum())} of {len(rows)} distributions do not sum to 1; the first "
                f"is that of action token {self.positions[first]} (log of the sum: "
                f"{total[first]:.3g})",
                "look for overflow (fp16) in the logits",
            )
        law: Floats = rows - total[:, None]
        return law

    def column(self, token_ids: Ints) -> Ints:
        """Return the column of :meth:`law` that holds each of these ids, [M]; k: the remainder."""
        if self.ids is None:
            return token_ids
        held = self.ids == token_ids[:, None]
        return np.where(held.any(axis=1), held.argmax(axis=1), self.ids.shape[1]).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Likeliest:
    """The k most likely tokens of each of n positions, the likeliest first.

    Eight bytes per outcome: of a million tokens with five outcomes 40 MB.

    Attributes:
        ids: [n, k] int32.
        logprobs: [n, k] float32 nats, of the distribution that the side reports; -inf: never.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    def __post_init__(self) -> None:
        if self.ids.ndim != 2 or self.ids.shape != self.logprobs.shape:
            fault = f"likeliest tokens: {self.ids.shape} ids, {self.logprobs.shape} logprobs"
            raise CorruptCapture(fault, "look into the engine's log")

    @classmethod
    def of(cls, ids: Any, logprobs: Any) -> Likeliest:
        """Of rows of equal length.

        Raises:
            ValueError: rows of different lengths, negative ids or NaN.
        """
        numbers, values = np.asarray(ids, np.int64), np.asarray(logprobs, np.float32)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < 1 << 31:
            raise ValueError("likeliest tokens: ids out of range")
        if np.isnan(values).any():
            raise NotNumbers("likeliest tokens: logprobs that are NaN")
        values = np.where(values < ABSENT_LOGPROB, -np.inf, values).astype(np.float32)
        return cls(numbers.astype(np.int32), values)

    @classmethod
    def joined(cls, parts: Iterable[Likeliest | None]) -> Likeliest | None:
        """Join one after another; None where one is missing or has another k."""
        given = list(parts)
        whole = [part for part in given if part is not None]
        if len(whole) < len(given) or len({part.ids.shape[1] for part in whole}) != 1:
            return None
        return cls(
            np.concatenate([part.ids for part in whole]),
            np.concatenate([part.logprobs for part in whole]),
        )


def why_incomparable(left: Distributions, right: Distributions) -> str:
    """Return what keeps two sides from being compared; empty where nothing does."""
    if not np.array_equal(left.positions, right.positions):
        return "the two sides hold distributions of different positions"
    if left.whole != right.whole:
        return WHOLE_AND_PART
    if left.ids is None or right.ids is None:
        if left.vocabulary != right.vocabulary:
            return f"vocabularies of {left.vocabulary} and {right.vocabulary} entries"
        return ""
    same = np.array_equal(left.ids, right.ids)
    return "" if same else "the two sides hold log-probabilities of different token ids"


def priority(seed: int, sequence: Ints, index: Ints) -> NDArray[np.uint64]:
    """Return the pseudo-random number of action token ``index`` (from 0) of each sequence.

    SplitMix64's finaliser over seed, sequence and index: every engine can compute it for any token
    at any time, without the tokens before it.
    """
    with np.errstate(over="ignore"):
        mixed = _mix(np.full(1, seed, np.int64).view(np.uint64))
        mixed = _mix(mixed + np.asarray(sequence, np.int64).view(np.uint64))
        return _mix(mixed + np.asarray(index, np.int64).view(np.uint64))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)), np.uint64)


# ---------------------------------------------------------------- routed experts


def narrowest(num_experts: int) -> type[np.unsignedinteger[Any]]:
    """Return the smallest type that holds every expert's number.

    >>> narrowest(256).__name__, narrowest(257).__name__
    ('uint8', 'uint16')
    """
    return np.uint8 if num_experts <= 256 else np.uint16


def corruption(
    ids: NDArray[Any], present: NDArray[np.bool_], num_experts: int
) -> Corruption | None:
    """Return the first thing that cannot be true of captured experts, or None.

    Args:
        ids: [T, L, K].
        present: [T] rows that were captured; the others are not looked at.
    """
    top_k = ids.shape[2]
    captured = np.flatnonzero(present)
    suspects = np.arange(ids.shape[1] if top_k < num_experts and len(captured) > FEW_ROWS else 0)
    for rows in _chunks(captured, max(1, ENTRIES // max(1, ids.shape[1] * top_k))):
        part = ids[rows]
        if part.max(initial=0) >= num_experts or part.min(initial=0) < 0:
            row, layer, _ = np.argwhere((part >= num_experts) | (part < 0))[0]
            return "an expert id out of range", int(rows[row]), int(layer)
        repeated = _repeated(part)
        if repeated.any():
            row, layer = np.argwhere(repeated)[0]
            return "the same expert twice", int(rows[row]), int(layer)
        # Layers whose sets are all that of the first row; nearly always a few rows clear a layer.
        for some in (part[:FEW_ROWS], part) if len(suspects) else ():
            usual = np.sort(ids[captured[0]][suspects], axis=1)
            same = (np.sort(some[:, suspects], axis=2) == usual).all(axis=(0, 2))
            suspects = suspects[same]
    if len(suspects):
        return "the same experts for every token", int(captured[0]), int(suspects[0])
    return None


def _repeated(part: NDArray[Any]) -> NDArray[np.bool_]:
    """[T, L] whether two slots hold the same expert; K is small, so slot by slot."""
    repeated = np.zeros(part.shape[:2], np.bool_)
    for slot in range(part.shape[2]):
        for earlier in range(slot):
            repeated |= part[:, :, slot] == part[:, :, earlier]
    return repeated


def _chunks(rows: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
