"""Routed experts and whole distributions on disk (see mismatch.captures), in bounded memory.

``routing/<name>.safetensors``: ``ids`` [T, L, K] in one byte per (token, layer, slot) up to 256
experts and in two above, ``present`` [T], and where they are known ``weights`` [T, L, K] and
``margin`` [T, L] in float32: a million tokens are 144 MB. Files are written in chunks and read
through the page cache, so that neither holds a second copy. ``dists/<name>.safetensors``:
``positions``, ``logprobs``, ``vocabulary``, and of a top-k ``ids`` and ``rest``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatch.captures import Distributions
from mismatch.errors import MismatchError
from mismatch.run import manifest
from mismatch.run.tables import require_file, require_schema

DISTRIBUTIONS = "mismatch.distributions/1"
CHUNK_BYTES = 1 << 24
NAMES = {
    np.dtype(np.bool_): "BOOL",
    np.dtype(np.uint8): "U8",
    np.dtype(np.uint16): "U16",
    np.dtype(np.float32): "F32",
    np.dtype(np.float64): "F64",
    np.dtype(np.int64): "I64",
}


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


def save_distributions(run_dir: Path, name: str, captured: Distributions) -> None:
    """Write and record one artefact; ``name`` is its path inside the run directory."""
    from safetensors.numpy import save as to_bytes

    tensors: dict[str, Any] = {"positions": captured.positions, "logprobs": captured.logprobs}
    if captured.ids is not None and captured.rest is not None:
        tensors |= {"ids": captured.ids.astype(np.int32), "rest": captured.rest}
    tensors["vocabulary"] = np.asarray([captured.vocabulary], np.int64)
    tensors = {key: np.ascontiguousarray(value) for key, value in tensors.items()}
    # One entry alone: the library writes several in any order, and equal artefacts are equal files.
    data = to_bytes(tensors, {"schema": DISTRIBUTIONS})
    manifest.write_atomic(run_dir / name, lambda target: target.write_bytes(data))
    manifest.record(run_dir, name, DISTRIBUTIONS)


def load_distributions(run_dir: Path, name: str) -> Distributions:
    """Read one artefact.

    Raises:
        MismatchError: absent, damaged, or of another schema.
    """
    from safetensors import SafetensorError, safe_open

    path = run_dir / name
    require_file(path)
    manifest.verify(run_dir, name)
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise MismatchError(
            f"{path} cannot be read: {error}", "run the stage that makes it again"
        ) from error
    require_schema(path, metadata.get("schema"), DISTRIBUTIONS)
    ids = tensors.get("ids")
    return Distributions(
        positions=tensors["positions"].astype(np.int64),
        logprobs=tensors["logprobs"].astype(np.float32),
        vocabulary=int(tensors["vocabulary"][0]),
        ids=None if ids is None else ids.astype(np.int64),
        rest=tensors.get("rest"),
    )
