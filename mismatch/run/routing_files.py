"""Routed experts on disk and their validation, in bounded memory: a million tokens are 144 MB.

``routing/<name>.safetensors``: ``ids`` [T, L, K] in one byte per (token, layer, slot) up to 256
experts and in two above, ``present`` [T], and where they are known ``weights`` [T, L, K] and
``margin`` [T, L] in float32. Files are written in chunks and read through the page cache, so that
neither holds a second copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatch.errors import MismatchError

CHUNK_BYTES = 1 << 24
ENTRIES = 1 << 22  # ids that are validated at a time
FEW_ROWS = 64  # rows that may share their experts by chance
NAMES = {
    np.dtype(np.bool_): "BOOL",
    np.dtype(np.uint8): "U8",
    np.dtype(np.uint16): "U16",
    np.dtype(np.float32): "F32",
    np.dtype(np.float64): "F64",
    np.dtype(np.int64): "I64",
}
Corruption = tuple[str, int, int]  # what, row of T, column of L


def narrowest(num_experts: int) -> type[np.unsignedinteger[Any]]:
    """The smallest type that holds every expert's number.

    >>> narrowest(256).__name__, narrowest(257).__name__
    ('uint8', 'uint16')
    """
    return np.uint8 if num_experts <= 256 else np.uint16


# ---------------------------------------------------------------- validation


def corruption(
    ids: NDArray[Any], present: NDArray[np.bool_], num_experts: int
) -> Corruption | None:
    """The first thing that cannot be true of captured experts, or None.

    Args:
        ids: [T, L, K].
        present: [T] rows that were captured; the others are not looked at.
    """
    top_k = ids.shape[2]
    known = np.flatnonzero(present)
    suspects = np.arange(ids.shape[1] if top_k < num_experts and len(known) > FEW_ROWS else 0)
    for rows in _chunks(known, max(1, ENTRIES // max(1, ids.shape[1] * top_k))):
        part = ids[rows]
        if part.max(initial=0) >= num_experts or part.min(initial=0) < 0:
            row, layer, _ = np.argwhere((part >= num_experts) | (part < 0))[0]
            return "an expert id out of range", int(rows[row]), int(layer)
        repeated = _repeated(part)
        if repeated.any():
            row, layer = np.argwhere(repeated)[0]
            return "the same expert twice", int(rows[row]), int(layer)
        suspects = _still_constant(part, ids[known[0]], suspects)
    if len(suspects):
        return "the same experts for every token", int(known[0]), int(suspects[0])
    return None


def _repeated(part: NDArray[Any]) -> NDArray[np.bool_]:
    """[T, L] whether two slots hold the same expert; K is small, so slot by slot."""
    found = np.zeros(part.shape[:2], np.bool_)
    for slot in range(part.shape[2]):
        for earlier in range(slot):
            found |= part[:, :, slot] == part[:, :, earlier]
    return found


def _still_constant(
    part: NDArray[Any], first: NDArray[Any], suspects: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Those layers, of ``suspects``, whose sets are all that of the first row, [L, K]."""
    # Nearly always one look at a few rows clears a layer.
    for some in (part[:FEW_ROWS], part) if len(suspects) else ():
        usual = np.sort(first[suspects], axis=1)
        same = (np.sort(some[:, suspects], axis=2) == usual).all(axis=(0, 2))
        suspects = suspects[same]
    return suspects


def _chunks(rows: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


# ---------------------------------------------------------------- files


def write_arrays(path: Path, arrays: dict[str, NDArray[Any]], metadata: dict[str, str]) -> None:
    """A safetensors file, one chunk in memory at a time; OSError as the disk reports it."""
    ordered = sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize)  # aligned
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for name, array in ordered:
        header[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [start, start + array.nbytes],
        }
        start += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in ordered:
            rows = max(1, CHUNK_BYTES * len(array) // max(1, array.nbytes))
            for first in range(0, len(array), rows):
                file.write(np.ascontiguousarray(array[first : first + rows]).data)


def read_arrays(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Arrays of a safetensors file, mapped: pages are read where they are used.

    What is changed in them stays in memory.

    Raises:
        MismatchError: not such a file, or cut short.
    """
    kinds = {label: dtype for dtype, label in NAMES.items()}
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(size))
        metadata = header.pop("__metadata__", {})
        arrays = {name: _mapped(path, 8 + size, entry, kinds) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MismatchError(
            f"{path} cannot be read: {error}", "run the stage that makes it again"
        ) from error
    return arrays, metadata


def _mapped(
    path: Path, base: int, entry: dict[str, Any], kinds: dict[str, np.dtype[Any]]
) -> NDArray[Any]:
    dtype, shape = kinds[entry["dtype"]], tuple(entry["shape"])
    if 0 in shape:
        return np.zeros(shape, dtype)
    start, end = entry["data_offsets"]
    if end - start != int(np.prod(shape)) * dtype.itemsize:
        raise ValueError("an array of another size than it says")
    return np.memmap(path, dtype, "c", base + start, shape)
