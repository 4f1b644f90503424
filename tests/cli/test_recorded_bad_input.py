"""Dumps that are written wrongly: each row of the tables has a sentence and its remedy."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from .. import recorded_folders as made
from ..command import mismatch
from ..conftest import grid
from .test_recorded_folders import judged

Entry = dict[str, Any]


def text() -> bytes:
    """The lines of a dump that nothing is wrong with."""
    rows = made.samples(32)
    entries = []
    for row in rows:
        ids, mask = row.prompt + row.response, [0] * len(row.prompt) + row.sampled
        sides = {"rollout_logprobs": row.rollout, "train_logprobs": row.train}
        entries.append({"token_ids": ids, "action_mask": mask} | sides)
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()


def zst(content: bytes) -> bytes:
    stream = pa.BufferOutputStream()
    with pa.CompressedOutputStream(stream, "zstd") as file:
        file.write(content)
    return stream.getvalue().to_pybytes()


def each(change: Callable[[Entry], Entry]) -> Callable[[bytes], bytes]:
    """Change every row of a dump."""
    return lambda lines: b"".join(
        json.dumps(change(json.loads(line))).encode() + b"\n" for line in lines.splitlines()
    )


def put(name: str, of: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    return each(lambda entry: entry | {name: of(entry[name])})


def without(name: str, *others: str) -> Callable[[bytes], bytes]:
    """Leave a field out, or give it another name."""
    return each(
        lambda entry: {
            (others[0] if key == name else key): value
            for key, value in entry.items()
            if key != name or others
        }
    )


def scaled(factor: float, *names: str) -> Callable[[bytes], bytes]:
    return each(
        lambda entry: entry | {name: (factor * np.array(entry[name])).tolist() for name in names}
    )


SIDES = ("rollout_logprobs", "train_logprobs")
# Table -> case -> name of the file, its bytes, and what is said. Exit code 2: nothing was measured.
REFUSED: dict[str, tuple[str, Callable[[bytes], bytes], tuple[str, ...]]] = {
    "files: CSV": ("a.csv", lambda lines: b"a,b\n-1,-1\n", ("table of text", "JSON object")),
    "files: TSV": ("a.tsv", lambda lines: b"a\tb\n-1\t-1\n", ("table of text", "JSON object")),
    "files: empty": ("a.jsonl", lambda lines: b"", ("is empty", "JSON object")),
    "files: an array": (
        "a.json",
        lambda lines: b"[" + b",".join(lines.splitlines()) + b"]",
        ("it is a list", "jq -c '.[]'"),
    ),
    "files: pretty": (
        "a.json",
        lambda lines: json.dumps(json.loads(lines.splitlines()[0]), indent=1).encode(),
        ("JSON object", "jq -c ."),
    ),
    "files: UTF-16": ("a.jsonl", lambda lines: lines.decode().encode("utf-16"), ("iconv",)),
    "files: cut zstd": ("a.jsonl.zst", lambda lines: zst(lines)[:-200], ("cut off",)),
    "files: half Parquet": ("a.parquet", lambda lines: b"PAR1 half", ("still written",)),
    "files: torch": ("a.pt", lambda lines: b"PK\x03\x04 half", ("--python ENV",)),
    "files: torn in the middle": (
        "a.jsonl",
        lambda lines: lines[:2000] + b"\n" + lines[-2000:],
        ("a.jsonl:", "--skip-torn"),
    ),
    "fields: another mask": (
        "a.jsonl",
        without("action_mask", "response_mask"),
        ("rename it", "--dump-format"),
    ),
    "fields: no mask": ("a.jsonl", without("action_mask"), ("no action_mask (fields:",)),
    "fields: no rollout": (
        "a.jsonl",
        without("rollout_logprobs"),
        ("no rollout_logprobs (fields:",),
    ),
    "fields: another name": (
        "a.jsonl",
        without("rollout_logprobs", "inference_logps"),
        ("inference_logps", "--dump-format"),
    ),
    "fields: no trainer": (
        "a.jsonl",
        without("train_logprobs"),
        ("32 of 32", "mismatch read-rollouts FILE"),
    ),
    "fields: text alone": (
        "a.jsonl",
        each(lambda entry: {"prompt": "a", "completion": "b"}),
        ("TRL", "prompt_ids"),
    ),
    "fields: a step by name": (
        "a.jsonl",
        each(lambda entry: entry | {"step": "two"}),
        ("step is 'two'", "whole number"),
    ),
    "rows: ids as text": ("a.jsonl", put("token_ids", lambda ids: [*map(str, ids)]), ("'3'",)),
    "rows: ids as floats": ("a.jsonl", put("token_ids", lambda ids: [*map(float, ids)]), ("3.0",)),
    "rows: columns for rows": ("a.jsonl", put("token_ids", lambda ids: [ids]), ("[[3",)),
    "rows: numbers as text": (
        "a.jsonl",
        put("train_logprobs", lambda values: [*map(str, values)]),
        ("train_logprobs: '-",),
    ),
    "rows: JSON in JSON": ("a.jsonl", put("train_logprobs", json.dumps), ("but '[",)),
    "rows: an engine's objects": (
        "a.jsonl",
        put("rollout_logprobs", lambda values: [{"logprob": value} for value in values]),
        ("{'logprob'",),
    ),
    "rows: nothing sampled": (
        "a.jsonl",
        put("action_mask", lambda mask: [0] * len(mask)),
        ("no token was sampled", "a mask is 1 where"),
    ),
    "rows: all sampled": (
        "a.jsonl",
        put("action_mask", lambda mask: [1] * len(mask)),
        ("first token is sampled", "write the prompt's ids"),
    ),
    "values: all null": (
        "a.jsonl",
        put("train_logprobs", lambda values: [None] * len(values)),
        ("no token has a number on both sides", "NaN or null", "first at row 0"),
    ),
}
# What is read all the same: how many rows, and what the verdict or the output says.
READ: dict[str, tuple[str, Callable[[bytes], bytes], int, tuple[str, ...]]] = {
    "files: gzip": ("a.jsonl.gz", gzip.compress, 32, ("not measured",)),
    "files: bzip2": ("a.jsonl.bz2", bz2.compress, 32, ("not measured",)),
    "files: xz": ("a.jsonl.xz", lzma.compress, 32, ("not measured",)),
    "files: zstd": ("a.jsonl.zst", zst, 32, ("not measured",)),
    "files: gzip by no name": ("a.jsonl", gzip.compress, 32, ("not measured",)),
    "files: a byte order mark": (
        "a.jsonl",
        lambda lines: b"\xef\xbb\xbf" + lines,
        32,
        ("not measured",),
    ),
    "files: torn at its end": ("a.jsonl", lambda lines: lines[:-40], 31, ("cut off",)),
    "rows: the trainer's are short": (
        "a.jsonl",
        put("train_logprobs", lambda values: values[:-1]),
        32,
        ("-1 trainer values", "every row from there on", "a value for every sampled token"),
    ),
    "values: negated": ("a.jsonl", scaled(-1, *SIDES), 32, ("negated", "times -1")),
    "values: base 2": ("a.jsonl", scaled(1 / np.log(2), SIDES[1]), 32, ("base 2", "ln 2")),
    "values: base 10": ("a.jsonl", scaled(1 / np.log(10), SIDES[0]), 32, ("base 10", "ln 10")),
    "values: one number": ("a.jsonl", scaled(0, SIDES[1]), 32, ("one number, 0,",)),
    "values: a copy": (
        "a.jsonl",
        each(lambda entry: entry | {SIDES[1]: entry[SIDES[0]]}),
        32,
        ("to the last bit", "bypass_mode"),
    ),
    "values: an infinity": (
        "a.jsonl",
        put(SIDES[1], lambda values: [float("-inf"), *values[1:]]),
        32,
        ("-inf", "32 sequences, the first at row 0"),
    ),
}


@pytest.mark.parametrize(
    "case", grid(REFUSED, "files: UTF-16", "fields: another mask", "rows: JSON in JSON",
                 "values: all null")
)  # fmt: skip
def test_what_cannot_be_read_is_named_with_its_remedy(tmp_path: Path, case: str) -> None:
    name, change, says = REFUSED[case]
    (tmp_path / name).write_bytes(change(text()))
    done = mismatch("postmortem", tmp_path / name, cwd=tmp_path)
    said = " ".join(done.stderr.split())
    assert done.returncode == 2, done.stdout
    for words in (name, *says):
        assert words in said
    assert "fix:" in said
    for flag in ("--format", "fp16", "a bug in mismatch"):
        assert flag not in said.replace("--dump-format", "")
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("case", grid(READ, "files: zstd", "values: one number"))
def test_what_can_be_read_is_answered(tmp_path: Path, case: str) -> None:
    name, change, rows, says = READ[case]
    (tmp_path / name).write_bytes(change(text()))
    said, report = judged(tmp_path, tmp_path / name)
    whole = " ".join([*said.split(), report["verdict"]["reason"], *map(str, report["checks"])])
    for words in says:
        assert words in whole
    assert report["run"]["n_sequences"] == rows
    assert "fp16" not in report["verdict"]["reason"]
    if case.startswith("values") and "infinity" not in case:
        assert not report.get("causes", {}).get("ranked")
