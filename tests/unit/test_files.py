"""Files that others made: regular files alone, within bounds."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch.errors import MismatchError
from mismatch.run.files import (
    LARGEST_JSON,
    MOST_CONTAINERS,
    bounded_memory,
    open_parquet,
    open_regular,
    parse_json,
    read_regular,
    read_yaml,
)


def test_a_regular_file_is_read_also_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link") == b"text"
    with open_regular(tmp_path / "file") as file:
        assert not os.get_inheritable(file.fileno())


@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_refused_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("fifo", "zero", ".", "none"):
        with pytest.raises(OSError, match=name.replace(".", "folder")):
            read_regular(tmp_path / name)


def test_a_sparse_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="32 MiB"):
        read_regular(tmp_path / "large")


def test_json_is_parsed_within_bounds() -> None:
    assert parse_json('{"a": ["é"]}'.encode()) == {"a": ["é"]}
    many = b"[" + b"[]," * MOST_CONTAINERS + b"1]"
    for data in (many, b" " * LARGEST_JSON + b"1", b"\xff", b"{"):
        with pytest.raises(ValueError, match=r"."):
            parse_json(data)


def test_names_that_are_no_text_are_an_error_of_the_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"element": [1]}), tmp_path / "t.parquet")
    data = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "t.parquet").write_bytes(data.replace(b"element", b"\xe5lement"))
    with pytest.raises(OSError, match="no UTF-8"):
        open_parquet(tmp_path / "t.parquet")


def bomb(levels: int = 11, wide: int = 9) -> str:
    lines = ["a0: &a0 [x]"]
    for n in range(1, levels):
        lines.append(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * wide)}]")
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        bomb(),
        bomb().replace("[", "{<<: [").replace("]", "]}").replace("{<<: [x]}", "{x: 1}"),
        "a: &a [*a]",
        "a: &a {b: *a}",
        "a: [" * 3000,
    ],
)
@pytest.mark.timeout(20)
def test_yaml_that_grows_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises((ValueError, RecursionError)):
        read_yaml(tmp_path / "x.yaml")


@pytest.mark.parametrize("text", ["", "a: &a [1, 2]\nb: *a\n", bomb(4)])
def test_yaml_with_a_few_aliases_is_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    assert read_yaml(tmp_path / "x.yaml") == text


def test_a_reader_that_takes_too_much_memory_is_stopped(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(MismatchError, match="takes more"), bounded_memory(Path("x"), 64 << 20):
        bytearray(128 << 20)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    with bounded_memory(Path("x"), 64 << 20):
        bytearray(16 << 20)
    (tmp_path / "large").write_bytes(b"x" * (8 << 20))
    with bounded_memory(tmp_path / "large", 64 << 20):
        bytearray(128 << 20)
