"""Flags that take a file of a stranger, over files that are none: an error, and no waiting."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ..command import mismatch
from ..made_run import make_run

pytestmark = pytest.mark.slow

TINY = ["--model", "tiny-gpt-oss", "--engine", "transformers", "--dry-run"]
# What reads the file -> its command; IN stands for the file, RUN for a run, OUT for a new path.
READERS: dict[str, list[str]] = {
    "config": ["check", "--config", "IN", *TINY],
    "levels": ["compare", "RUN", "--thresholds", "IN"],
    "prompts": ["check", "--prompts", "IN", *TINY],
    "data set": ["check", "--dataset", "IN", *TINY],
    "verl": ["check", "--verl-config", "IN", *TINY],
    "trl": ["check", "--trl-config", "IN", *TINY],
    "scores": ["score", "RUN", "--scorer", "file", "--scorer-config", "IN"],
    "dump": ["postmortem", "IN", "--out", "OUT"],
    "rollouts": ["read-rollouts", "IN", "--model", "tiny-gpt-oss", "--out", "OUT"],
}
ATTACKS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "deep": lambda path: path.write_text("[" * 100_000),
    "no text": lambda path: path.write_bytes(bytes(range(128, 256)) * 64),
    "device": lambda path: path.symlink_to("/dev/zero"),
}
SUFFIX = {"verl": "yaml", "trl": "yaml", "config": "toml", "levels": "toml", "scores": "parquet"}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_file_that_is_none_is_refused(reader: str, attack: str, tmp_path: Path) -> None:
    path = tmp_path / f"in.{SUFFIX.get(reader, 'jsonl')}"
    ATTACKS[attack](path)
    given = {"IN": path, "OUT": tmp_path / "out"}
    if "RUN" in READERS[reader]:
        given["RUN"] = make_run(tmp_path / "run")
    command = [given.get(each, each) for each in READERS[reader]]
    done = mismatch(*command, cwd=tmp_path, timeout=20, HF_HUB_OFFLINE="1")
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stderr, done.stderr
    assert "error: " in done.stderr
