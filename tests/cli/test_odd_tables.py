"""Parquet files with columns or headers of another kind: the file is named, with exit code 2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch.run import manifest

from ..command import mismatch
from ..made_run import make_run

pytestmark = pytest.mark.slow
Make = Callable[[int], Any]
WORDS: Make = lambda rows: pa.array(["7"] * rows)  # noqa: E731
COLUMNS: dict[str, tuple[str, str, Make]] = {
    "texts for ids": ("rollout.parquet", "token_ids", WORDS),
    "lists of texts": ("rollout.parquet", "token_ids", lambda n: pa.array([["7"] * 9] * n)),
    "lists of lists": ("scores/fsdp.parquet", "logprobs", lambda n: pa.array([[[0.5]] * 6] * n)),
    "lists with nulls": ("rollout.parquet", "turn", lambda n: pa.array([[None] * 8 + [1]] * n)),
    "null": ("scores/fsdp.parquet", "logprobs", lambda n: pa.nulls(n)),
    "dictionary": ("rollout.parquet", "prompt_index", lambda n: WORDS(n).dictionary_encode()),
    "no whole number": ("rollout.parquet", "prompt_index", lambda n: pa.array([0.5] * n)),
    "above int64": (
        "rollout.parquet",
        "token_ids",
        lambda n: pa.array([[2**63 + 1] * 9] * n, pa.list_(pa.uint64())),
    ),
    "negative ids": ("rollout.parquet", "token_ids", lambda n: pa.array([[-(2**62)] * 9] * n)),
    "huge ids": ("rollout.parquet", "token_ids", lambda n: pa.array([[2**62] * 9] * n)),
    "texts for numbers": ("tokens.parquet", "delta", WORDS),
    "numbers for lists": ("tokens.parquet", "context", lambda n: pa.array([1.5] * n)),
    "lists for numbers": ("tokens.parquet", "sequence", lambda n: pa.array([[1]] * n)),
}
HEADERS: dict[str, tuple[str, tuple[str, ...], Any]] = {
    "facts that are a number": ("scores/fsdp.parquet", ("fingerprint",), 3),
    "a fact of another kind": ("scores/fsdp.parquet", ("fingerprint", "dtype"), ["bf16"]),
    "a name that is none": ("scores/fsdp.parquet", ("name",), True),
    "a temperature in words": ("rollout.parquet", ("sampling", "temperature"), "hot"),
    "a huge temperature": ("rollout.parquet", ("sampling", "temperature"), 10**400),
}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("judged") / "run")
    assert mismatch("compare", run).returncode == 1
    return run


def refused(run: Path, name: str) -> None:
    """Read the changed file, entered in the manifest as who edits it on purpose does."""
    entry = manifest.entries(run)[name]
    manifest.record(run, name, entry["schema"], entry["made_by"], entry["inputs"])
    done = mismatch("report" if name == "tokens.parquet" else "compare", run, timeout=60)
    assert done.returncode == 2, done.stdout
    assert name in done.stderr, done.stderr
    assert "fix:" in done.stderr
    for word in ("Traceback", "internal error", "bug in mismatch"):
        assert word not in done.stderr, done.stderr


@pytest.mark.parametrize("case", COLUMNS)
def test_a_column_of_another_kind_is_refused(case: str, judged: Path, tmp_path: Path) -> None:
    name, column, make = COLUMNS[case]
    run = shutil.copytree(judged, tmp_path / "run")
    rows = pq.read_table(run / name)
    at = rows.column_names.index(column)
    pq.write_table(rows.set_column(at, column, make(rows.num_rows)), run / name)
    refused(run, name)


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_of_another_kind_is_refused(case: str, judged: Path, tmp_path: Path) -> None:
    name, place, value = HEADERS[case]
    run = shutil.copytree(judged, tmp_path / "run")
    rows = pq.read_table(run / name)
    about = dict(rows.schema.metadata)
    header = json.loads(about[b"header"])
    part = header
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    about[b"header"] = json.dumps(header).encode()
    pq.write_table(rows.replace_schema_metadata(about), run / name)
    refused(run, name)
