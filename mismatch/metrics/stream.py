"""Estimates of more tokens than fit in memory: the same numbers, from chunks that are read again.

A pass over the sequences' lengths, one over everything, and two over what quantiles need. What is
kept: sums per prompt, a number per sequence and metric, and the largest hundredth of the terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.metrics.blocks import BLOCK, Block, Layout, regrouped, upcast
from mismatch.metrics.estimate import RESAMPLES, Estimator
from mismatch.metrics.registry import METRICS, Array, Metric
from mismatch.types import Estimate, Ints

Chunk = Mapping[str, Array]
Chunks = Callable[[], Iterable[Chunk]]


def stream(
    chunks: Chunks,
    prompt: Ints,
    metrics: Iterable[Metric] | None = None,
    *,
    lengths: tuple[Ints, Ints] | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
    threads: int | None = None,
) -> dict[str, Estimate]:
    """Every metric that the chunks allow, with its interval, by name.

    Same values and intervals as :meth:`Estimator.all` on the concatenated chunks, to rounding.
    Metrics that need all tokens at once (load per expert) are absent.

    Args:
        chunks: starts a new pass: an iterable of name -> [a, …] arrays, of any sizes. Each holds
            ``sequence`` [a], which never decreases, and what metrics need; a sequence may go on in
            the next chunk. ``delta`` is made of ``rollout`` and ``train``.
        prompt: [N] prompt of each sequence.
        metrics: all that are declared, by default.
        lengths: the sequences that hold tokens (ascending) and how many each holds, where they are
            known: it saves a pass.
        threads: that compute, as for :class:`Estimator`.

    Raises:
        EmptyComparison: no token.
        MismatchError: ``chunks`` cannot be started again, sequences out of order, arrays of
            different lengths, a value that is not finite, or passes that differ.
    """
    if not callable(chunks):
        raise MismatchError(
            "chunks must be a function that starts a new pass over the same chunks",
            "an iterator can be read once only: hand over `lambda: read(...)`, or `lambda: a_list`",
        )
    layout = Layout.of_lengths(*(lengths or sequence_lengths(chunks())), prompt)
    sample = _first(chunks())
    known = set(sample) | ({"delta"} if {"rollout", "train"} <= set(sample) else set())
    wanted = [
        metric
        for metric in (METRICS.values() if metrics is None else metrics)
        if known.issuperset(metric.needs) and (metric.kind != "extreme" or metric.fold)
    ]

    def blocks() -> Iterator[Block]:
        return regrouped(chunks(), layout)

    estimator = Estimator.on(layout, seed=seed, resamples=resamples, threads=threads)
    made = estimator.over(wanted, blocks, sample)
    return {metric.name: made[metric.name] for metric in wanted if metric.name in made}


def sequence_lengths(chunks: Iterable[Chunk]) -> tuple[Ints, Ints]:
    """The sequences that hold tokens, ascending, and how many tokens each holds.

    Raises:
        MismatchError: a chunk without ``sequence``, or sequences that do not ascend.
    """
    found: list[tuple[Ints, Ints]] = []
    last = -1
    for chunk in chunks:
        if "sequence" not in chunk:
            raise MismatchError("a chunk lacks 'sequence'", "give the sequence of every token, [a]")
        sequence = np.asarray(chunk["sequence"])
        if not len(sequence):
            continue
        steps = np.diff(sequence, prepend=last)
        if (steps < 0).any():
            place = int(np.flatnonzero(steps < 0)[0])
            before = sequence[place - 1] if place else last
            raise MismatchError(
                f"sequence {sequence[place]} comes after sequence {before}",
                "chunks must hold tokens in order of their sequence",
            )
        found.append(np.unique(sequence, return_counts=True))
        last = int(sequence[-1])
    if not found:
        raise EmptyComparison()
    names = np.concatenate([name for name, _ in found])
    counts = np.concatenate([count for _, count in found])
    present, code = np.unique(names, return_inverse=True)
    return present, np.bincount(code, weights=counts).astype(np.int64)


def _first(chunks: Iterable[Chunk]) -> Chunk:
    """The first chunk with tokens: where thresholds and origins come from."""
    for chunk in chunks:
        tokens = len(chunk["sequence"])
        if tokens:
            stride = -(-tokens // BLOCK)
            return upcast({name: np.asarray(array)[::stride] for name, array in chunk.items()})
    raise MismatchError(
        "a later pass over the chunks holds no tokens",
        "chunks must start anew at each call: `lambda: read(...)`, not one iterator again",
    )
