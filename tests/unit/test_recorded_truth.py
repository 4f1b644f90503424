"""Hypothesis builds folders from one truth; reading gives that truth, or names what is missing."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mismatch.errors import MismatchError
from mismatch.features.recorded.dumps import CUT_OFF, Recorded, read_recorded
from mismatch.features.recorded.watch import follow

from .. import recorded_folders as made

# `MISMATCH_FOLDERS=1000` for the whole property; a sample runs with every change.
EXAMPLES = int(os.environ.get("MISMATCH_FOLDERS", "25"))
pytestmark = pytest.mark.timeout(600 if EXAMPLES < 100 else 0)
SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES < 100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def truths(draw: Any) -> list[list[made.Sample]]:
    """Some steps of a run: sequences with masks and versions of the weights."""
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        n = draw(st.integers(2, 7))
        rows = made.samples(n, draw(st.integers(0, 2**20)), length=(1, draw(st.integers(3, 25))))
        if draw(st.booleans()):  # a turn of a tool in the middle, which nobody sampled
            rows = [
                replace(row, mask=[int(i % 3 != 1) for i in range(len(row.response))])
                for row in rows
            ]
        if draw(st.booleans()):
            rows = [replace(row, versions=(str(i % 2),)) for i, row in enumerate(rows)]
        steps.append(rows)
    return steps


@st.composite
def folders(draw: Any) -> tuple[list[list[made.Sample]], str, dict[str, Any], bool, bool]:
    """A truth, the framework that writes it, its ranks, foreign files, a torn last line."""
    form = draw(st.sampled_from(["generic", "generic.gz", "nemo-rl", "prime-rl", "miles", "slime"]))
    ranks: dict[str, Any] = {}
    if form == "miles":
        ranks = {name: draw(st.integers(1, 3 if name == "cp" else 2))
                 for name in ("tp", "cp", "pp", "dp")}  # fmt: skip
        ranks["layout"] = draw(st.sampled_from(["thd", "bshd", "allgather"]))
    if form == "prime-rl":
        ranks = {"ranks": draw(st.integers(1, 3))}
    torn = draw(st.booleans()) and form in ("generic", "nemo-rl")
    return draw(truths()), form, ranks, draw(st.booleans()), torn


def write(folder: Path, steps: list[list[made.Sample]], form: str, ranks: dict[str, Any]) -> None:
    """Write the steps, the last one first: the order of files is no order of steps."""
    for step in reversed(range(len(steps))):
        rows = steps[step]
        if form == "miles":
            made.miles(folder, step, rows, **ranks)
        elif form == "slime":
            made.slime(folder, step, rows)
        elif form == "nemo-rl":
            made.nemo_rl(folder, step, rows)
        elif form == "prime-rl":
            made.prime_rl(folder, step, rows, **ranks)
        else:
            end = ".gz" if form.endswith("gz") else ""
            made.generic(folder / f"step_{step}.jsonl{end}", rows, step=step)


def of(rows: list[made.Sample]) -> list[tuple[Any, ...]]:
    """Ids, which of them were sampled, and the numbers of both sides, in any order."""
    found = []
    for row in rows:
        chosen = np.flatnonzero(row.sampled)
        if len(chosen):
            sides = [np.round(np.array(side)[chosen], 5).tolist()
                     for side in (row.rollout, row.train)]  # fmt: skip
            mask = [0] * len(row.prompt) + list(row.sampled)
            found.append((row.prompt + row.response, mask, *sides))
    return sorted(found)


def read_back(recorded: Recorded) -> dict[str, list[tuple[Any, ...]]]:
    steps: dict[str, list[tuple[Any, ...]]] = {}
    for row in recorded.sequences:
        assert row.train_logprobs is not None
        sides = [np.round(side, 5).tolist() for side in (row.logprobs, row.train_logprobs)]
        entry = row.token_ids.tolist(), row.sampled.astype(int).tolist(), *sides
        steps.setdefault(row.attributes["step"], []).append(entry)
    return {step: sorted(rows) for step, rows in steps.items()}


@given(folders())
@SETTINGS
def test_reading_a_folder_gives_its_truth(made_of: Any) -> None:
    steps, form, ranks, foreign, torn = made_of
    if ranks.get("layout") == "allgather":  # a few tokens whose slices fit both layouts
        assume(not any(made.alike(rows, ranks["cp"], ranks["dp"]) for rows in steps))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "dump"
        write(folder, steps, form, ranks)
        if foreign:
            made.foreign(folder)
        if torn:
            last = next(iter(sorted(folder.glob("*step*0.jsonl"))))
            last.write_bytes(last.read_bytes()[:-5])
            steps = [steps[0][:-1], *steps[1:]]
        recorded = read_recorded(folder, python=sys.executable)
        truth = {str(step): of(rows) for step, rows in enumerate(steps) if of(rows)}
        assert read_back(recorded) == truth
        assert torn == any(text.startswith(CUT_OFF) for text in recorded.remarks)
        assert bool(recorded.passed_over) == foreign
        if any(row.versions for rows in steps for row in rows) and form in ("miles", "slime"):
            assert any("weight_version" in row.attributes for row in recorded.sequences)
        lines = [*follow(folder, 0.1, True, lambda text: None, sys.executable)]
        named = [line.partition(":")[0] for line in lines]
        assert named == [f"step {step}" for step in sorted(map(int, truth))]


def test_a_read_that_is_interrupted_gives_the_next_one_nothing(tmp_path, monkeypatch):
    """The child still answers what nobody waits for any more."""
    rows = [made.samples(8, seed) for seed in (0, 1)]
    for step in (0, 1):
        made.slime(tmp_path / str(step), step, rows[step])
    read_recorded(tmp_path / "0", python=sys.executable)  # a child that is kept

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("select.select", interrupted)
        with pytest.raises(KeyboardInterrupt):
            read_recorded(tmp_path / "0", python=sys.executable)
    recorded = read_recorded(tmp_path / "1", python=sys.executable)
    assert read_back(recorded) == {"1": of(rows[1])}


@given(truths(), st.integers(2, 3), st.integers(0, 5))
@SETTINGS
def test_a_slice_that_is_missing_is_never_silent(
    steps: list[list[made.Sample]], size: int, lost: int
) -> None:
    """What is read is true, and what is missing is counted."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        made.miles(folder, 0, steps[0], cp=size)
        sorted(folder.glob("*.pt"))[lost % size].unlink()
        try:
            recorded = read_recorded(folder, python=sys.executable)
        except MismatchError as error:
            said = error.message
        else:
            said = " ".join(recorded.remarks)
            for row in read_back(recorded)["0"]:
                assert row in of(steps[0])
            if len(recorded.sequences) == len(of(steps[0])):
                return
        assert "missing" in said or "no token" in said
