"""Tokens in blocks of whole sequences, small enough to stay in the processor's cache.

A comparison of ten million tokens is worked through in blocks: a metric's terms exist for one block
at a time, and only sums per prompt outlive it. Where the arrays come from does not matter: slices
of what is in memory, or chunks that are read again for every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from mismatch.errors import EmptyComparison, MismatchError
from mismatch.metrics.registry import Array
from mismatch.types import Ints

BLOCK = 1 << 16  # tokens: an array of a block is 512 KiB
Arrays = Mapping[str, Array]
Blocks = Callable[[], Iterable["Block"]]  # starts a new pass each time


@dataclass(frozen=True, slots=True)
class Layout:
    """Which tokens belong to which sequence and prompt. N counts sequences that hold tokens.

    Attributes:
        offsets: [N + 1] tokens of sequence n are ``offsets[n]:offsets[n + 1]``, once in order.
        prompts: [N] prompt of each, numbered 0 … P - 1.
        order: [A] puts tokens in order of their sequence; None where they are.
    """

    offsets: Ints
    prompts: Ints
    n_prompts: int
    order: Ints | None = None

    @property
    def n_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def n_sequences(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def of(cls, sequence: Array, prompt: Array) -> Layout:
        """From the sequence of each token [A] and the prompt of each sequence.

        Raises:
            EmptyComparison: no token.
            MismatchError: not whole numbers, or a sequence that has no prompt.
        """
        sequence, prompt = _whole("sequence", sequence), _whole("prompt", prompt)
        if not len(sequence):
            raise EmptyComparison()
        starts, ordered = _starts(sequence)
        order = None if ordered else np.argsort(sequence, kind="stable")
        if order is not None:
            starts = _starts(sequence[order])[0]
        first = sequence[starts] if order is None else sequence[order[starts]]
        return cls._made(first, np.append(starts, len(sequence)), prompt, order)

    @classmethod
    def of_lengths(cls, sequence: Array, length: Array, prompt: Array) -> Layout:
        """From the sequences that hold tokens, ascending, and how many each holds, both [N]."""
        if not len(sequence):
            raise EmptyComparison()
        offsets = np.concatenate([[0], np.cumsum(length)])
        return cls._made(sequence, offsets, _whole("prompt", prompt), None)

    @classmethod
    def _made(cls, sequence: Ints, offsets: Ints, prompt: Ints, order: Ints | None) -> Layout:
        if sequence.min() < 0 or sequence.max() >= len(prompt):
            worst = sequence.min() if sequence.min() < 0 else sequence.max()
            raise MismatchError(
                f"sequence {worst} has no prompt: prompts are given for 0 to {len(prompt) - 1}",
                "give the prompt of every sequence, [N]",
            )
        found, code = np.unique(prompt[sequence], return_inverse=True)
        return cls(offsets, code, len(found), order)


@dataclass(frozen=True, slots=True)
class Block:
    """Whole sequences in order, and all arrays of their tokens.

    Attributes:
        starts: first token of each sequence, within the block.
        prompts: prompt of each sequence.
    """

    arrays: Arrays
    starts: Ints
    prompts: Ints

    @property
    def n_tokens(self) -> int:
        return len(self.arrays["sequence"])

    def pieces(self) -> Iterator[Block]:
        """The same tokens in pieces of at most ``2 * BLOCK``: one sequence can be very long."""
        tokens = self.n_tokens
        if tokens <= 2 * BLOCK:
            yield self
            return
        for low in range(0, tokens, BLOCK):
            high = min(low + BLOCK, tokens)
            first = int(np.searchsorted(self.starts, low, "right")) - 1
            last = int(np.searchsorted(self.starts, high, "left"))
            cut = {name: array[low:high] for name, array in self.arrays.items()}
            starts = np.maximum(self.starts[first:last], low) - low
            yield Block(cut, starts, self.prompts[first:last])


def in_memory(
    arrays: Arrays, layout: Layout, sequence: Array, *, check: bool = True
) -> Iterator[Block]:
    """Blocks of arrays [A, …] that are all there.

    Args:
        check: for values that are not finite; once is enough.
    """
    arrays = {**arrays, "sequence": sequence}
    for first, last in _cuts(layout.offsets):
        low, high = int(layout.offsets[first]), int(layout.offsets[last])
        where = slice(low, high) if layout.order is None else layout.order[low:high]
        block = {name: array[where] for name, array in arrays.items()}
        block = checked(block, low) if check else upcast(block)
        yield Block(block, layout.offsets[first:last] - low, layout.prompts[first:last])


def regrouped(chunks: Iterable[Arrays], layout: Layout) -> Iterator[Block]:
    """Blocks from chunks of any size that follow each other, cut wherever they like."""
    source, held, begin, end = iter(chunks), list[Arrays](), 0, 0
    for first, last in _cuts(layout.offsets):
        low, high = int(layout.offsets[first]), int(layout.offsets[last])
        while end < high:
            chunk = next(source, None)
            if chunk is None:
                raise MismatchError(f"a later pass ended after {end} of {layout.n_tokens} tokens")
            held.append(checked(chunk, end))
            end += len(chunk["sequence"])
        while begin + len(held[0]["sequence"]) <= low:
            begin += len(held.pop(0)["sequence"])
        made = _between(held, low - begin, high - begin)
        yield Block(made, layout.offsets[first:last] - low, layout.prompts[first:last])
    if end > layout.n_tokens or next(source, None) is not None:
        raise MismatchError(f"a later pass holds more tokens than the first: {layout.n_tokens}")


def checked(arrays: Arrays, position: int) -> dict[str, Array]:
    """The arrays as they are computed with: float64 where they are floats.

    Args:
        position: of the first token, for messages.

    Raises:
        MismatchError: arrays of different lengths, or a value that is not finite.
    """
    made = {}
    tokens = len(arrays["sequence"])
    for name, array in arrays.items():
        if len(array) != tokens:
            raise MismatchError(
                f"{name} has {len(array)} tokens, sequence has {tokens}",
                "give one entry per action token in every array",
            )
        if array.dtype.kind == "f":
            finite = np.isfinite(array)
            if not finite.all():
                bad = np.argwhere(~finite)[0]
                raise MismatchError(
                    f"{name} is {array[tuple(bad)]} at action token {position + int(bad[0])}",
                    "look for overflow (fp16), -inf of a masked token, or padding that was scored",
                )
        made[name] = array
    return upcast(made)


def upcast(arrays: Arrays) -> dict[str, Array]:
    """Floats as float64; tables [A, L] as they are, for their size."""
    return {
        name: array.astype(np.float64, copy=False)
        if array.dtype.kind == "f" and array.ndim == 1
        else array
        for name, array in arrays.items()
    }


def _cuts(offsets: Ints) -> Iterator[tuple[int, int]]:
    """First and last sequence of each block: at most ``BLOCK`` tokens, at least one sequence."""
    first, sequences = 0, len(offsets) - 1
    while first < sequences:
        last = int(np.searchsorted(offsets, offsets[first] + BLOCK, "right")) - 1
        last = max(last, first + 1)
        yield first, last
        first = last


def _between(chunks: list[Arrays], low: int, high: int) -> dict[str, Array]:
    """Tokens ``low:high`` of chunks that follow each other."""
    names = set(chunks[0])
    if any(set(chunk) != names for chunk in chunks):
        raise MismatchError("chunks hold different arrays", "give the same names in every chunk")
    ends = np.cumsum([len(chunk["sequence"]) for chunk in chunks])
    begins = [0, *map(int, ends[:-1])]
    made = {}
    for name in chunks[0]:
        parts = [
            chunk[name][max(low - begin, 0) : high - begin]
            for chunk, begin in zip(chunks, begins, strict=True)
            if begin < high
        ]
        made[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return made


def _starts(sequence: Ints) -> tuple[Ints, bool]:
    """Where the sequence changes, and whether it only ever rises; block by block, for memory."""
    found, ordered = [np.zeros(1, np.int64)], True
    for low in range(0, len(sequence), BLOCK):
        steps = np.diff(sequence[low : low + BLOCK + 1])
        found.append(np.flatnonzero(steps) + (low + 1))
        ordered = ordered and not bool((steps < 0).any())
    return np.concatenate(found), ordered


def _whole(name: str, values: Array) -> Ints:
    array = np.asarray(values)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise MismatchError(
            f"{name} must be a list of whole numbers, not {array.ndim}-dimensional {array.dtype}"
        )
    return array
