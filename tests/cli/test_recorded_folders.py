"""Folders of dumps as runs leave them, by `mismatch postmortem` and `mismatch watch`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch.features.recorded.dumps import read_recorded

from .. import recorded_folders as made
from ..command import mismatch

ROOT = Path(__file__).parents[2]


def judged(tmp_path: Path, dump: Path, *more: object) -> tuple[str, dict[str, Any]]:
    """What postmortem prints of a dump, and its report."""
    out = tmp_path / "run"
    done = mismatch("postmortem", dump, "--python", sys.executable, "--out", out, *more)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout, json.loads((out / "report.json").read_text())


def watched(folder: Path) -> list[str]:
    done = mismatch("watch", folder, "--once", "--python", sys.executable)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def tokens(rows: list[made.Sample]) -> int:
    return sum(sum(row.sampled) for row in rows)


def abs_diff(rows: list[made.Sample]) -> float:
    delta = [np.subtract(row.train, row.rollout)[np.array(row.sampled) > 0] for row in rows]
    return float(np.abs(np.concatenate(delta)).mean())


@pytest.mark.parametrize(
    "layout",
    [{}, {"tp": 2, "dp": 2}, {"tp": 4, "cp": 2}, {"cp": 2, "dp": 2}, {"pp": 2, "tp": 2, "cp": 2}],
    ids=str,
)
def test_ranks_of_a_step_are_one_truth(tmp_path, layout):
    rows = [made.samples(16, seed) for seed in (0, 1)]
    for step, each in enumerate(rows):
        made.miles(tmp_path / "dump", step, each, **layout)
    said, report = judged(tmp_path, tmp_path / "dump")
    assert report["run"]["n_tokens"] == tokens(rows[0] + rows[1])
    steps = report["recorded"]["steps"]
    assert [step["tokens"] for step in steps] == [tokens(each) for each in rows]
    assert [step["abs_diff"] for step in steps] == pytest.approx([*map(abs_diff, rows)], rel=1e-4)
    copies = layout.get("tp", 1) * layout.get("pp", 1) - 1
    assert ("counted once" in said) == (copies > 0)
    assert ("put together" in said) == (layout.get("cp", 1) > 1)
    lines = watched(tmp_path / "dump")
    assert [line.partition(":")[0] for line in lines] == ["step 0", "step 1"]


def test_slices_that_are_missing_are_named(tmp_path):
    made.miles(tmp_path / "dump", 0, made.samples(16), cp=2)
    (tmp_path / "dump" / "0_1.pt").unlink()
    done = mismatch("postmortem", tmp_path / "dump", "--python", sys.executable, cwd=tmp_path)
    assert done.returncode == 2
    assert "ranks are missing" in done.stderr


def test_slimes_present_format_is_read(tmp_path):
    rows = made.samples(32)
    made.slime(tmp_path / "dump", 3, made.off(rows, range(1, 32, 2)), dp=2)
    said, report = judged(tmp_path, tmp_path / "dump")
    assert "the format slime" in said
    assert "columns advantages" in said
    rewards = [
        row.reward for row in read_recorded(tmp_path / "dump", python=sys.executable).sequences
    ]
    assert rewards == [n / 8 for n in range(32)]  # before they were normalised
    assert report["recorded"]["rows"]["shared"][0]["attribute"] == "rank"


def test_rows_of_older_weights_are_named_by_their_version(tmp_path):
    rows = made.off([replace(row, versions=("4",)) for row in made.samples(32)], range(0, 32, 4))
    rows = [replace(row, versions=("3",)) if n % 4 == 0 else row for n, row in enumerate(rows)]
    order = np.random.default_rng(0).permutation(32)
    made.miles(tmp_path / "dump", 0, [rows[n] for n in order], dp=2)
    said, _ = judged(tmp_path, tmp_path / "dump")
    assert "of weight_version 3" in " ".join(said.split())


def test_foreign_files_are_passed_over_and_said_once(tmp_path):
    folder = tmp_path / "logs" / "exp_001"
    rows = made.samples(32)
    for step in (1, 2, 3):
        made.nemo_rl(folder, step, rows)
    made.foreign(folder)
    said, report = judged(tmp_path, tmp_path / "logs")
    assert said.count("passed over") == 1
    assert "no rows of" in said
    assert report["run"]["n_tokens"] == 3 * tokens(rows)
    lines = watched(tmp_path / "logs")
    assert sum("mean |delta|" in line for line in lines) == 3
    assert sum("val_data_step" in line for line in lines) == 1


def test_a_folder_without_rows_is_refused_by_the_file_that_was_meant(tmp_path):
    made.foreign(tmp_path)
    done = mismatch("postmortem", tmp_path, cwd=tmp_path)
    assert done.returncode == 2
    assert "known format" in done.stderr or "JSON object" in done.stderr


def test_sequences_out_of_the_loss_are_shown_apart(tmp_path):
    rows = made.off(made.samples(32), [5], spread=3.0)
    kept = [replace(row, kept=n != 5) for n, row in enumerate(rows)]
    made.nemo_rl(tmp_path / "dump", 1, kept)
    said, report = judged(tmp_path, tmp_path / "dump")
    assert "1 sequences apart" in said
    assert report["run"]["n_sequences"] == 31


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_a_torn_last_line_costs_that_row_alone(tmp_path, name):
    dump = made.generic(tmp_path / name, made.samples(32))
    dump.write_bytes(dump.read_bytes()[:-60])
    said, report = judged(tmp_path, dump)
    assert "cut off" in said
    assert report["run"]["n_sequences"] >= 24  # zlib holds some rows back


def test_a_torn_line_in_the_middle_needs_a_flag(tmp_path):
    dump = made.generic(tmp_path / "rows.jsonl", made.samples(32))
    lines = dump.read_text().splitlines(keepends=True)
    dump.write_text("".join([*lines[:10], lines[10][:90], *lines[11:]]))
    done = mismatch("postmortem", dump, cwd=tmp_path)
    assert done.returncode == 2
    assert "rows.jsonl:11" in done.stderr
    assert "--skip-torn" in done.stderr
    assert judged(tmp_path, dump, "--skip-torn")[1]["run"]["n_sequences"] == 30


def test_one_rank_of_four_is_named_in_one_line_of_a_step(tmp_path):
    rows = made.off(made.samples(64), range(2, 64, 4))
    made.prime_rl(tmp_path, 1, rows, ranks=4)
    made.prime_rl(tmp_path, 2, made.samples(64, seed=2), ranks=4, stable=False)
    lines = watched(tmp_path)
    assert len(lines) == 2
    assert "of rank 2" in lines[0]
    assert "no STABLE" in lines[1]


def test_steps_are_told_in_their_order(tmp_path):
    for step in (10, 2, 1):  # the last one is written first
        made.nemo_rl(tmp_path, step, made.samples(16, seed=step))
        time.sleep(0.02)
    assert [line.partition(":")[0] for line in watched(tmp_path)] == ["step 1", "step 2", "step 10"]


def test_a_step_of_nulls_is_a_line_and_infinity_comes_first(tmp_path):
    rows = made.samples(16)
    bad = replace(rows[3], train=[*rows[3].train[:4], float("-inf"), *rows[3].train[5:]])
    made.generic(tmp_path / "step_1.jsonl", [*rows[:3], bad, *rows[4:]], step=1, rank=2)
    nothing = [replace(row, train=[float("nan")] * len(row.train)) for row in rows]
    made.generic(tmp_path / "step_2.jsonl", nothing, step=2)
    first, second = watched(tmp_path)
    assert first.startswith("step 1: trainer:")
    assert "rank 2, row" in first
    assert "sampled token 4" in first
    assert second.startswith("step 2: no")
    _, report = judged(tmp_path, tmp_path)
    assert "1, rank 2" in report["recorded"]["findings"][0]["first"]
    assert [step["tokens"] for step in report["recorded"]["steps"]] == [tokens(rows) - 1, 0]


def test_long_sequences_far_apart_have_a_small_effective_size(tmp_path):
    """8,000 tokens of -0.1 nats: no weight of a sequence is a float."""
    rows = [
        replace(row, train=(np.asarray(row.rollout) - 0.1 - 0.01 * n / 8000).tolist())
        for n, row in enumerate(made.samples(4, length=(8000, 8001)))
    ]
    made.generic(tmp_path / "step_1.jsonl", rows, step=1)
    (line,) = watched(tmp_path)
    share = float(line.partition("effective size ")[2].split(" %")[0])
    assert 25 <= share <= 100
    judged(tmp_path, tmp_path / "step_1.jsonl")


def test_nothing_ends_a_watch(tmp_path):
    """A slow writer, a foreign file, half an archive, a step again, a deleted file."""
    rows = made.samples(16)
    text = made.nemo_rl(tmp_path / "elsewhere", 1, rows).read_text()
    folder = tmp_path / "dump"
    folder.mkdir()
    command = [sys.executable, "-m", "mismatch", "watch", str(folder), "--every", "0.2"]
    lines: list[str] = []

    def until(words: str) -> None:
        deadline = time.time() + 60
        while not any(words in line for line in lines):
            assert time.time() < deadline, lines
            assert process.poll() is None, lines
            time.sleep(0.05)

    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    ) as process:
        assert process.stdout is not None
        reader = threading.Thread(target=lambda: lines.extend(iter(process.stdout.readline, "")))
        reader.start()
        (folder / "train_data_step1.jsonl").write_text(text[:-100])
        until("for the rest")
        assert not any("mean |delta|" in line for line in lines)
        (folder / "train_data_step1.jsonl").write_text(text)
        until("step 1: mean")
        made.foreign(folder)
        until("meta.json")
        (folder / "step_2.parquet").write_bytes(b"PAR1 half")
        (folder / "step_3.pt").write_bytes(b"PK\x03\x04 half")
        until("step_2.parquet")
        until("step_3.pt")
        (folder / "train_data_step1.jsonl").write_text("".join(text.splitlines(True)[:-4]))
        until("again")
        (folder / "train_data_step1.jsonl").unlink()
        until("deleted")
        made.nemo_rl(folder, 4, rows)
        until("step 4: mean")
        process.terminate()
    reader.join()
