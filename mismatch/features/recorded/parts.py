"""The parts of a dump, each read by itself: files, and of large files row groups or lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError
from mismatch.run.files import LARGEST_JSON, open_parquet, open_regular, parse_json

PART_BYTES = 32 << 20
LARGE_BYTES = 2 * PART_BYTES  # of a dump that several processes read sooner than one


@dataclass(frozen=True)
class Part:
    """A file, or what a process reads of it: row groups of a Parquet file, lines of a JSONL file.

    Attributes:
        number: in the order of the dump.
        first: rows of the file before it; of lines, they are counted when someone asks.
        groups: None: the whole file.
        start, end: bytes of its first line and after its last; None: the whole file.
        share: of the bytes of the dump.
    """

    file: Path
    number: int
    first: int = 0
    groups: tuple[int, ...] | None = None
    start: int = 0
    end: int | None = None
    share: float = 1.0

    def place(self, number: int) -> str:
        """Return the file, and the number in it of a row of this part, for errors."""
        number += self.first
        with open_regular(self.file) as file:
            for at in range(0, self.start, PART_BYTES):
                number += file.read(min(PART_BYTES, self.start - at)).count(b"\n")
        return f"{self.file}:{number}"

    def json_lines(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the number and the object of every line that is not blank."""
        at = self.start
        with open_regular(self.file) as file:
            file.seek(at)
            # Of a line that is too long, pieces that are too long.
            lines = iter(lambda: file.readline(LARGEST_JSON + 1), b"")
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        entry = parse_json(line)
                        if not isinstance(entry, dict):
                            raise TypeError(f"it is a {type(entry).__name__}")
                    except (ValueError, TypeError, RecursionError) as error:
                        fault = f"{self.place(number)} is no JSON object: {error}"
                        fix = "was it cut off? one JSON object per line is expected"
                        raise MismatchError(fault, fix) from error
                    yield number, entry
                at += len(line)
                if at == self.end:
                    return


def parts_of(files: Sequence[Path]) -> list[Part]:
    """Return the parts of a dump, in order: files, and of large files their row groups or lines."""
    parts = list[Part]()
    for file in files:
        if file.suffix == ".parquet":
            for first, groups, size in _groups(file):
                parts.append(Part(file, len(parts), first, groups, share=size))
        else:
            for start, end in _lines(file):
                size = (end or (file.stat().st_size if file.exists() else 0)) - start
                parts.append(Part(file, len(parts), start=start, end=end, share=size))
    total = sum(part.share for part in parts) or 1
    return [replace(part, share=part.share / total) for part in parts]


def _lines(file: Path) -> Iterator[tuple[int, int | None]]:
    """Yield where some lines of a JSONL file begin and end; (0, None) for every other file."""
    try:
        with open_regular(file) as lines:
            start, size = 0, file.stat().st_size
            if size <= PART_BYTES or lines.read(1) != b"{":
                yield 0, None
                return
            while start < size:
                lines.seek(start + PART_BYTES - 1)
                if len(lines.readline(LARGEST_JSON + 1)) > LARGEST_JSON:
                    yield start, None  # reading it says so
                    return
                end = min(lines.tell(), size)
                yield start, end
                start = end
    except OSError:  # reading it says what is wrong
        yield 0, None


def _groups(file: Path) -> Iterator[tuple[int, tuple[int, ...] | None, int]]:
    """Yield rows before some row groups, their numbers, and their bytes."""
    import pyarrow as pa

    about = None
    with suppress(pa.ArrowException, OSError):  # reading it says what is wrong
        about = open_parquet(file).metadata
    if about is None or not about.num_row_groups:
        yield 0, None, 0
        return
    first, rows, size, groups = 0, 0, 0, []
    for number in range(about.num_row_groups):
        groups.append(number)
        size += about.row_group(number).total_byte_size
        rows += about.row_group(number).num_rows
        if size >= PART_BYTES or number == about.num_row_groups - 1:
            yield first, tuple(groups), size
            first, size, groups = rows, 0, []
