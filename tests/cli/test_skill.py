"""The skill for agents: its commands run, and the fields that it names exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import frozen, recorded_folders
from tests.command import mismatch

FILE = Path(__file__).parents[2] / "skills" / "mismatch" / "SKILL.md"
TEXT = FILE.read_text(encoding="utf-8")
COMMANDS = [
    line.strip()
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
STARTS = ("--out runs/before", "--fix all")  # of these, an engine would start: they are planned


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the commands name."""
    folder = tmp_path_factory.mktemp("skill")
    runs = folder / "runs"
    runs.mkdir()
    frozen.unpack("clean", runs).rename(runs / "before")
    done = mismatch("compare", runs / "before")  # makes the table of tokens
    assert done.returncode in (0, 1), done.stderr
    shutil.copytree(runs / "before", runs / "after")
    rows = recorded_folders.samples(64)
    recorded_folders.generic(folder / "dump.jsonl", rows, step=1)
    recorded_folders.generic(folder / "dumps" / "step_1.jsonl", rows, step=1)
    return folder


def run_in(place: Path, command: str) -> Any:
    words = shlex.split(command)
    assert words.pop(0) == "mismatch"
    if any(start in command for start in STARTS):
        there = "tiny-gpt-oss" if "--resume" in words else "runs/new"
        other = {"runs/before": there, "--resume": "--model"}
        words = [other.get(word, word) for word in words if word not in ("--format", "json")]
        words = [*words, "--dry-run"]
    return mismatch(*words, cwd=place)


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_run(place: Path, command: str) -> None:
    done = run_in(place, command)
    assert done.returncode in (0, 1), done.stderr
    prints = {"json", "gates"}.intersection(command.split())
    if prints and not any(start in command for start in STARTS):
        json.loads(done.stdout)


def leaves(value: Any, path: str = "") -> set[str]:
    """Return the names of all keys and the dotted paths of a document, and its texts."""
    if isinstance(value, dict):
        inner = [leaves(each, f"{path}.{key}".lstrip(".")) | {key} for key, each in value.items()]
        return {path}.union(*inner)
    if isinstance(value, list):
        return {path}.union(*(leaves(each, path) for each in value))
    return {path, value} if isinstance(value, str) else {path}


def test_fields_and_words_that_it_names_exist(tmp_path: Path) -> None:
    done = mismatch("check", "--model", "tiny-gpt-oss", "--dry-run", "--format", "json")
    known = leaves(json.loads(done.stdout))
    for name in ("no-sinks", "clean"):
        known |= leaves(frozen.report_of(frozen.unpack(name, tmp_path)))
    known |= {"healthy", "tolerable", "inconclusive", "unfit", "broken", "suspected", "refuted"}
    known |= {"engine", "trainer", "both", "confirmed"}
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    spans = {span for span in re.findall(r"`([^`]+)`", prose) if re.fullmatch(r"[a-z_.]+", span)}
    assert spans - known - {"mismatch"} == set()
    assert len(spans) > 15


def test_flags_that_it_names_exist() -> None:
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    every = mismatch("check", "--help-all").stdout
    flags = set(re.findall(r"`(--[a-z-]+)`", prose))
    assert flags
    assert {flag for flag in flags if flag not in every} == set()
