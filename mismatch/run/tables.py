"""Parquet files with a schema and a header of their own, and columns of ragged lists.

``routing/<name>.safetensors``: ``ids`` [T, L, K] in one byte per (token, layer, slot) up to 256
experts and in two above, ``present`` [T], and where they are known ``weights`` [T, L, K] and
``margin`` [T, L] in float32: a million tokens are 144 MB. Files are written in chunks and read
through the page cache, so that neither holds a second copy. ``dists/<name>.safetensors``:
``positions``, ``logprobs``, ``vocabulary``, and of a top-k ``ids`` and ``rest``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mismatch.captures import Distributions
from mismatch.errors import MismatchError
from mismatch.run import manifest
from mismatch.run.manifest import write_atomic
from mismatch.run.provenance import redact

if TYPE_CHECKING:
    import pyarrow as pa


GROUP_VALUES = 1 << 20


def write_table(path: Path, columns: dict[str, Any], schema: str, header: dict[str, Any]) -> Path:
    """Write columns atomically; ``header`` is any JSON data, kept beside the schema's name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(columns)
    text = redact(json.dumps(header, allow_nan=False, default=plain))
    table = table.replace_schema_metadata({"schema": schema, "header": text})
    rows = _rows_per_group(table)
    return write_atomic(
        path, lambda target: pq.write_table(table, target, rows, compression="zstd")
    )


def _rows_per_group(table: pa.Table) -> int:
    """So many rows that the longest column of lists holds about ``GROUP_VALUES`` in each group.

    Groups are what a reader holds of a file at a time.
    """
    import pyarrow as pa

    values = [
        sum(len(chunk.values) for chunk in column.chunks)
        for column in table.columns
        if pa.types.is_large_list(column.type)
    ]
    rows: int = table.num_rows
    groups = -(-max([1, rows, *values]) // GROUP_VALUES)
    return max(1, rows // groups)


def read_table(path: Path, schema: str, required: set[str]) -> tuple[pa.Table, dict[str, Any]]:
    """The table and its header.

    Raises:
        MismatchError: absent, truncated, foreign, of another schema, or columns missing.
    """
    import pyarrow.parquet as pq

    header = read_header(path, schema)
    with _parquet(path):
        table = pq.read_table(path)
    missing = required - set(table.column_names)
    if missing:
        raise MismatchError(f"{path} lacks the columns {sorted(missing)}", "run the stage again")
    return table, header


def read_header(path: Path, schema: str) -> dict[str, Any]:
    """The header alone, without reading the columns.

    Raises:
        MismatchError: as :func:`read_table`.
    """
    import pyarrow.parquet as pq

    require_schema(path, schema_of(path), schema)
    with _parquet(path):
        metadata = pq.read_schema(path).metadata
    header: dict[str, Any] = json.loads(metadata[b"header"])
    return header


def schema_of(path: Path) -> str | None:
    """The schema that a file says it has, None where it says none.

    Raises:
        MismatchError: absent, truncated or foreign.
    """
    import pyarrow.parquet as pq

    require_file(path)
    with _parquet(path):
        metadata = pq.read_schema(path).metadata or {}
    return metadata.get(b"schema", b"").decode() or None


def layers_of(texts: pa.ChunkedArray) -> pa.Array:
    """Runs of layers as text, ``0, 3, 5-7``, as lists of their numbers; null stays null."""
    import pyarrow as pa

    unique = {text: _numbers(text) for text in texts.unique().to_pylist() if text is not None}
    rows = [None if text is None else unique[text] for text in texts.to_pylist()]
    return pa.array(rows, pa.large_list(pa.int16()))


def _numbers(text: str) -> list[int]:
    ends = [[int(end) for end in part.split("-")] for part in text.split(", ") if part]
    return [layer for run in ends for layer in range(run[0], run[-1] + 1)]


@contextmanager
def _parquet(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MismatchError(
            f"{path} is not a readable Parquet file (truncated or foreign): {reason}",
            "run the stage that makes it again",
        ) from error


def require_file(path: Path) -> None:
    if not path.exists():
        raise MismatchError(f"{path} does not exist", missing_fix(path))


def missing_fix(path: Path) -> str:
    """The command that makes an artefact."""
    if path.name == "rollout.parquet":
        return f"make it: mismatch rollout --model MODEL --out {path.parent}"
    if path.parent.name == "scores":
        return f"make it: mismatch score {path.parent.parent}"
    return "make it: mismatch check --model MODEL"


def require_schema(path: Path, schema: str | None, wanted: str) -> None:
    if schema != wanted:
        raise MismatchError(
            f"{path} has schema {schema or 'none'}, this version reads {wanted}",
            "make it again with this version of mismatch",
        )


def ragged(values: np.ndarray, offsets: np.ndarray) -> pa.Array:
    """Flat values as a column of lists."""
    import pyarrow as pa

    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values))


def flat(table: pa.Table, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Values and offsets of a list column, whatever slices the reader made."""
    import pyarrow.compute as pc

    lists = table.column(column)
    lengths = pc.list_value_length(lists).to_numpy()
    values = pc.list_flatten(lists).to_numpy()
    return values, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def plain(value: Any) -> Any:
    """numpy as JSON data."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)


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
