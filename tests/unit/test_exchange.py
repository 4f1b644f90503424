"""Tokens go out in a file and log-probabilities come back: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mismatch.errors import MismatchError
from mismatch.processes.exchange import read_scores, write_tokens
from mismatch.specs import Pass, TrainSpec
from mismatch.types import Scoring
from tests.made_run import rollout

PASSES = [
    Pass(name, TrainSpec(model="tiny-gpt-oss", scorer="file"))
    for name in ("fsdp", "fsdp:alone", "fsdp:fp32")
]
SUFFIXES = (".parquet", ".jsonl")


def table_of(path: Path) -> pd.DataFrame:
    """Return the file as the other machine reads it."""
    parquet = path.suffix == ".parquet"
    return pd.read_parquet(path) if parquet else pd.read_json(path, orient="records", lines=True)


def scored(path: Path, column: str = "logprobs") -> pd.DataFrame:
    """Return the file's table with minus each action token's id over the vocabulary."""
    table = table_of(path)
    table[column] = [
        [-token / 512 for token, acts in zip(row.token_ids, row.action_mask, strict=True) if acts]
        for row in table.itertuples()
    ]
    return table


def read(path: Path, table: pd.DataFrame) -> dict[str, Scoring]:
    if path.suffix == ".parquet":
        table.to_parquet(path)
    else:
        table.to_json(path, orient="records", lines=True)
    return read_scores(path, PASSES, rollout())


@pytest.fixture(params=SUFFIXES)
def sent(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / f"tokens{request.param}"
    write_tokens(path, rollout())
    return path


def test_numbers_come_back_in_the_runs_order(sent: Path) -> None:
    expected = -rollout().token_ids[rollout().actions] / 512
    found = read(sent, scored(sent).iloc[::-1])  # another order of rows
    assert found.keys() == {"fsdp"}
    assert np.allclose(found["fsdp"].logprobs, expected)
    facts = found["fsdp"].fingerprint
    assert (facts["backend"], facts["file"]) == ("file", sent.name)
    assert facts["notes"]


def test_side_passes_and_rows_of_all_tokens(sent: Path) -> None:
    table = scored(sent, "logprobs_fp32")
    table["logprobs"] = [[0.0, *(-1.0 for _ in ids[1:])] for ids in table.token_ids]
    found = read(sent, table.drop(columns=["token_ids", "action_mask"]))
    assert found.keys() == {"fsdp", "fsdp:fp32"}
    assert (found["fsdp"].logprobs == -1.0).all()


def _other_tokens(table: pd.DataFrame) -> pd.DataFrame:
    table.at[0, "token_ids"] = [1 + token for token in table.token_ids[0]]
    return table


def _short(table: pd.DataFrame) -> pd.DataFrame:
    table.at[0, "logprobs"] = table.logprobs[0][:-1]
    return table


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda table: table.iloc[1:], "15 sequences"),
        (_other_tokens, "sequence 0"),
        (_short, "sequence 0"),
        (lambda table: table.drop(columns="logprobs"), "logprobs"),
        (lambda table: table.assign(logprobs=[[0.5] * 6] * len(table)), "0.5"),
        (lambda table: table.drop(columns="sequence"), "sequence"),
        (lambda table: table.assign(logprobs="x"), "tokens.jsonl"),
        (lambda table: table.assign(logprobs=-1.0), "tokens.jsonl"),
        (lambda table: table.assign(logprobs=[{"a": [1]}] * len(table)), "tokens.jsonl"),
        (lambda table: table.assign(token_ids=3), "tokens.jsonl"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, change, said: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "tokens.jsonl"
    write_tokens(path, rollout())
    with pytest.raises(MismatchError) as refused:
        read(path, change(scored(path)))
    assert said in refused.value.message
