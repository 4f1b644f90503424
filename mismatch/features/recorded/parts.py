"""The parts of a dump, each read by itself: files, and of large Parquet files row groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PART_BYTES = 32 << 20
LARGE_BYTES = 2 * PART_BYTES  # of a dump that several processes read sooner than one


@dataclass(frozen=True)
class Part:
    """A file, or some row groups of a Parquet file, that a process reads by itself.

    Attributes:
        number: in the order of the dump.
        first: rows of the file before it.
        groups: None: the whole file.
    """

    file: Path
    number: int
    first: int = 0
    groups: tuple[int, ...] | None = None


def parts_of(files: Sequence[Path]) -> list[Part]:
    """Return the parts of a dump, in order: files, and of large Parquet files their row groups."""
    parts: list[Part] = []
    for file in files:
        for first, groups in _groups(file) if file.suffix == ".parquet" else [(0, None)]:
            parts.append(Part(file, len(parts), first, groups))
    return parts


def _groups(file: Path) -> Iterator[tuple[int, tuple[int, ...] | None]]:
    """Yield rows before some row groups, and their numbers."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        about = pq.read_metadata(file)
    except (pa.ArrowException, OSError):  # reading it says what is wrong
        yield 0, None
        return
    first, rows, size, groups = 0, 0, 0, []
    for number in range(about.num_row_groups):
        groups.append(number)
        size += about.row_group(number).total_byte_size
        rows += about.row_group(number).num_rows
        if size >= PART_BYTES or number == about.num_row_groups - 1:
            yield first, tuple(groups)
            first, size, groups = rows, 0, []
    if not about.num_row_groups:
        yield 0, None
