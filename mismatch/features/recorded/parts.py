"""The parts of a dump, each read by itself: files, and of large files row groups or lines.

The files that the ranks of one step wrote with torch are one part: only together they are rows.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError
from mismatch.run.files import LARGEST_JSON, open_parquet, open_regular, parse_json

PART_BYTES = 32 << 20
LARGE_BYTES = 2 * PART_BYTES  # of a dump that several processes read sooner than one
SUFFIXES = (".jsonl", ".json", ".parquet", ".pt", ".dp", ".pkl")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
OF_TORCH = (".pt", ".dp", ".pkl")
TABLES = (".csv", ".tsv")
# What the names of files and folders say.
IN_NAMES = {
    "step": r"(?:step|rollout(?:_id)?|iter(?:ation)?)[_-]?(\d+)",
    "rank": r"rank[_-]?(\d+)",
}
ALONE = re.compile(r"(?<![^_-])\d+(?![^_-])", re.ASCII)  # numbers between separators


@dataclass(frozen=True)
class Part:
    """A file, or what a process reads of it: row groups of a Parquet file, lines of a JSONL file.

    Attributes:
        others: files of the same step by other ranks, of files of torch.
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
    others: tuple[Path, ...] = ()

    def place(self, number: int) -> str:
        """Return the file, and the number in it of a row of this part, for errors."""
        number += self.first
        with open_regular(self.file) as file:
            for at in range(0, self.start, PART_BYTES):
                number += file.read(min(PART_BYTES, self.start - at)).count(b"\n")
        return f"{self.file}:{number}"

    def json_lines(
        self, cut: Callable[[str], None] | None = None, skip: bool = False
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the number and the object of every line that is not blank.

        Args:
            cut: gets the place of every line that is left out because it is no JSON object; None:
                other lines are refused.
            skip: also leave out other lines than the last one of a file.

        Raises:
            Unreadable: the first line is no JSON object.
            MismatchError: another line is none.
        """
        at = self.start
        with open_lines(self.file) as file:
            if at:
                file.seek(at)
            # Of a line that is too long, pieces that are too long.
            lines = iter(lambda: file.readline(LARGEST_JSON + 1), b"")
            number = 0
            while True:
                try:
                    line = next(lines, b"")
                except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
                    if cut is None or not number:
                        raise Unreadable(f"{self.file} was cut off: {error}", CUT) from error
                    cut(f"{self.file}, behind line {number}")
                    return
                if not line:
                    return
                number += 1
                if line.strip():
                    try:
                        entry = parse_json(line if at else line.removeprefix(codecs.BOM_UTF8))
                        if not isinstance(entry, dict):
                            raise TypeError(f"it is a {type(entry).__name__}")
                    except (ValueError, TypeError, RecursionError) as error:
                        first = number == 1 and not self.start
                        last = not line.endswith(b"\n") and len(line) <= LARGEST_JSON
                        if cut is None or (first and not skip) or not (last or skip):
                            fault = f"{self.place(number)} is no JSON object: {error}"
                            fix = first_line_fix(line) if first else CUT
                            raise (Unreadable if first else MismatchError)(fault, fix) from error
                        cut(self.place(number))
                    else:
                        yield number, entry
                at += len(line)
                if at == self.end:
                    return


CUT = "was it cut off? one JSON object per line is expected; --skip-torn leaves other lines out"


def first_line_fix(line: bytes) -> str:
    """Say what to do with a file whose first line is no JSON object.

    >>> first_line_fix(b"{\\n")
    'one JSON object per line is expected: jq -c . FILE > LINES.jsonl'
    """
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "it is UTF-16, and UTF-8 is expected: iconv -f UTF-16 -t UTF-8 FILE > LINES.jsonl"
    if line.startswith(b"["):
        return "one JSON object per line is expected: jq -c '.[]' FILE > LINES.jsonl"
    if line.strip() == b"{":
        return "one JSON object per line is expected: jq -c . FILE > LINES.jsonl"
    return CUT


class Unreadable(MismatchError):
    """A file that holds no rows that can be read. In a folder it is passed over, and named.

    Args:
        foreign: it was never meant to hold rows; else it is damaged, or needs what is not here.
    """

    def __init__(self, message: str, fix: str = "", foreign: bool = False) -> None:
        super().__init__(message, fix)
        self.foreign = foreign


def open_lines(path: Path) -> Any:
    """Open a file of lines, which may be compressed."""
    file = open_regular(path)
    start = file.peek(6)[:6]
    if start.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=file)
    if start.startswith(b"BZh"):
        return bz2.BZ2File(file)
    if start.startswith(b"\xfd7zXZ"):
        return lzma.LZMAFile(file)
    if start.startswith(b"\x28\xb5\x2f\xfd"):
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file), "zstd"))
    return file


def suffix_of(file: Path) -> str:
    """Return a file's suffix without that of its compression.

    >>> suffix_of(Path("a/step_1.jsonl.zst"))
    '.jsonl'
    """
    return Path(file.stem).suffix if file.suffix in COMPRESSED else file.suffix


def files_of(path: Path) -> list[Path]:
    """Return the files of a dump: itself, or those below a folder, by step and name.

    Raises:
        MismatchError: it does not exist or is no regular file, or the folder holds no file that
            can be read.
    """
    if not path.is_dir():
        if not path.exists():
            raise MismatchError(f"{path} does not exist", "give a dump that a framework wrote")
        if not path.is_file():
            raise MismatchError(f"{path} is no regular file", "give a file that a framework wrote")
        return [path]
    files = [file for file in path.rglob("*") if suffix_of(file) in SUFFIXES and file.is_file()]
    if not files:
        fault = f"{path} holds no {', '.join(SUFFIXES)} file"
        raise MismatchError(fault, "give the folder that the dump is in")
    return sorted(files, key=lambda file: (int(named(file).get("step", 0)), str(file)))


def named(file: Path) -> dict[str, str]:
    """Return what the names of a file and of its folder say: step and rank.

    >>> named(Path("exports/step_3/rank_1.jsonl")), named(Path("train_data/0_7.pt"))
    ({'step': '3', 'rank': '1'}, {'step': '0', 'rank': '7'})
    """
    stem = file.name.split(".")[0].lower()
    text = f"{file.parent.name.lower()}/{stem}"
    found = {name: re.findall(pattern, text) for name, pattern in IN_NAMES.items()}
    said = {name: numbers[-1] for name, numbers in found.items() if numbers}
    if "step" in said or suffix_of(file) not in OF_TORCH:
        return said
    # slime's and miles' names are two numbers; verl's gen_batch.dp is in a folder of its step.
    numbers = ALONE.findall(re.sub(IN_NAMES["rank"], "", stem))[-2:]
    numbers = numbers or re.findall(r"^\d+$", file.parent.name, re.ASCII)
    return dict(zip(("step", "rank"), numbers, strict=False)) | said


def of_one_step(file: Path) -> tuple[str, str]:
    """Return what files of all ranks of one step have in common; "" as the second: no step."""
    folder = re.sub(IN_NAMES["rank"], "rank", str(file.parent).lower())
    step = named(file).get("step", "")
    return (f"{folder}/*{suffix_of(file)}", step) if step else (str(file), "")


def parts_of(files: Sequence[Path]) -> list[Part]:
    """Return the parts of a dump, in order: files, and of large files their row groups or lines."""
    parts, of_step = list[Part](), dict[tuple[str, str], int]()
    for file in files:
        if file.suffix == ".parquet":
            for first, groups, size in _groups(file):
                parts.append(Part(file, len(parts), first, groups, share=size))
        elif suffix_of(file) in OF_TORCH and (key := of_one_step(file))[1]:
            size = file.stat().st_size if file.exists() else 0
            if key in of_step:
                part = parts[of_step[key]]
                others, share = (*part.others, file), part.share + size
                parts[part.number] = replace(part, others=others, share=share)
            else:
                of_step[key] = len(parts)
                parts.append(Part(file, len(parts), share=size))
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
