"""Parquet files with a schema and a header, and columns of ragged lists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.errors import MismatchError
from mismatch.run.files import bounded_memory, open_parquet
from mismatch.run.manifest import require_file, require_schema, write_atomic
from mismatch.run.provenance import redact

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


NUMBER = re.compile(r"u?int\d+|halffloat|float|double|bool")  # types, as Arrow names them
TEXT = re.compile("(large_)?string")
GROUP_VALUES = 1 << 20
# Values of 8 bytes in memory, per byte of the file. Random tokens and their log-probabilities take
# at most 15, as ids and floats hardly compress; those of one token for ever took 85.
MOST_TIMES, SMALL = 128, 48 << 20


def write_table(path: Path, columns: dict[str, Any], schema: str, header: Any) -> Path:
    """Write columns atomically; ``header`` is any JSON data, kept next to the schema's name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(columns)
    text = redact(json.dumps(header, allow_nan=False, default=plain))
    table = table.replace_schema_metadata({"schema": schema, "header": text})
    rows = _rows_per_group(table)
    return write_atomic(path, lambda file: pq.write_table(table, file, rows, compression="zstd"))


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
    """Return the table and its header.

    Raises:
        MismatchError: absent, truncated, foreign, of another schema, or columns missing.
    """
    header = read_header(path, schema)
    with _parquet(path):
        file = open_parquet(path)
        _require_varied(path, file.metadata)
        with bounded_memory(path):  # where no thread can be made
            table = file.read(use_threads=False)
    missing = required - set(table.column_names)
    if missing:
        raise MismatchError(f"{path} lacks the columns {sorted(missing)}", "run the stage again")
    return table, header


def _require_varied(path: Path, about: pq.FileMetaData) -> None:
    """Refuse a small file of many values: those of a run do not repeat themselves so much.

    Raises:
        MismatchError: its values would take far more memory than the file has bytes.
    """
    groups = [about.row_group(number) for number in range(about.num_row_groups)]
    values = sum(each.column(at).num_values for each in groups for at in range(each.num_columns))
    size = path.stat().st_size
    if values * 8 > max(SMALL, MOST_TIMES * size):
        fault = f"{path} holds {values:,} values in {size:,} bytes: no run is like that"
        raise MismatchError(fault, "do not read it, or make the run again")


def read_header(path: Path, schema: str) -> dict[str, Any]:
    """Return the header alone, without reading the columns.

    Raises:
        MismatchError: as :func:`read_table`.
    """
    metadata = _metadata(path)
    require_schema(path, metadata.get(b"schema", b"").decode(), schema)
    header: dict[str, Any] = json.loads(metadata[b"header"])
    return header


def _metadata(path: Path) -> dict[bytes, bytes]:
    require_file(path)
    with _parquet(path):
        return open_parquet(path).schema_arrow.metadata or {}


@contextmanager
def _parquet(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except MemoryError:
        raise
    except (OSError, pa.ArrowException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        fault = f"{path} is not a readable Parquet file (truncated or foreign): {reason}"
        raise MismatchError(fault, "run the stage that makes it again") from error


def ragged(values: np.ndarray, offsets: np.ndarray) -> pa.Array:
    """Flat values as a column of lists."""
    import pyarrow as pa

    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values))


def flat(
    table: pa.Table, column: str, kind: type[np.generic] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return values and offsets of a list column, whatever slices the reader made.

    Raises:
        TypeError, ValueError: it is no column of lists, a row holds none, or as :func:`numbers`.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = table.column(column)
    if lists.null_count or not (pa.types.is_list(lists.type) or pa.types.is_large_list(lists.type)):
        raise TypeError(f"{column} holds {lists.type}, {lists.null_count} null; not lists")
    lengths = pc.list_value_length(lists).to_numpy()
    values = numbers(pc.list_flatten(lists), column, kind)
    return values, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def numbers(values: pa.ChunkedArray, column: str, kind: type[np.generic] | None) -> np.ndarray:
    """Return values of a column of numbers; None: of the type that they have.

    Raises:
        TypeError, ValueError: they are no numbers, a value is missing, or no number of ``kind``.
    """
    import pyarrow as pa

    if values.null_count or not NUMBER.fullmatch(str(values.type)):
        raise TypeError(f"{column} holds {values.type}, {values.null_count} null; not numbers")
    cast = values.cast(pa.from_numpy_dtype(kind)) if kind else values
    return np.array(cast.to_numpy())  # a copy: Arrow's memory cannot be written


def require_kinds(table: pa.Table, texts: set[str], lists: set[str]) -> None:
    """Raise a TypeError for a column that is not of texts, of lists, or (all others) of numbers."""
    import pyarrow as pa

    for field in table.schema:
        listed = pa.types.is_large_list(field.type) or pa.types.is_list(field.type)
        kind = field.type.value_type if listed else field.type
        fits = TEXT if field.name in texts else NUMBER
        if not (fits.fullmatch(str(kind)) or kind == pa.null()) or listed != (field.name in lists):
            raise TypeError(f"{field.name} holds {field.type}")


def plain(value: Any) -> Any:
    """numpy as JSON data."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)
