"""A dump in parts: the same result whoever reads them, and nothing left behind."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch.errors import MismatchError
from mismatch.features.recorded import parts as parts_module
from mismatch.features.recorded.dumps import read_part, read_recorded
from mismatch.features.recorded.parts import Part, parts_of
from mismatch.processes.spread import Where

ROWS = 60


def entries(first: int = 0) -> list[dict[str, Any]]:
    random = np.random.default_rng(first)
    return [
        {
            "token_ids": [1, 2, 3, 4],
            "action_mask": [False, True, True, True],
            "rollout_logprobs": [-1.0] * 3,
            "train_logprobs": (random.normal(0, 0.1, 3) - 1.0).tolist(),
            "prompt_id": None if number % 3 else f"p{number // 6}",
            "step": (first + number) % 4,
        }
        for number in range(ROWS)
    ]


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """Three Parquet files of six row groups each."""
    folder = tmp_path / "dump"
    folder.mkdir()
    for number in range(3):
        table = pa.Table.from_pylist(entries(number))
        pq.write_table(table, folder / f"part{number}.parquet", row_group_size=10)
    return folder


def test_a_large_file_is_cut_at_its_row_groups(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = sorted(dump.iterdir())
    assert [(part.number, part.groups) for part in parts_of(files)] == [
        (number, (0, 1, 2, 3, 4, 5)) for number in range(3)
    ]
    monkeypatch.setattr(parts_module, "PART_BYTES", 1)
    parts = parts_of(files)
    assert [part.number for part in parts] == list(range(18))
    assert [(part.first, part.groups) for part in parts[6:9]] == [(0, (0,)), (10, (1,)), (20, (2,))]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Three JSONL files, lines of other lengths, blank ones among them, the last without an end."""
    folder = tmp_path / "lines"
    folder.mkdir()
    for number in range(3):
        texts = [json.dumps(entry) for entry in entries(number)]
        texts[10:10] = ["", "  "]
        (folder / f"part{number}.jsonl").write_text("\n".join(texts))
    return folder


@pytest.mark.parametrize("size", [1, 100, 177, 1000, 1 << 20])
def test_a_jsonl_file_is_cut_between_its_lines(
    lines: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Every byte is of one part, and every part ends with a line; its lines are the file's."""
    whole = read_recorded(lines)
    monkeypatch.setattr(parts_module, "PART_BYTES", size)
    files = sorted(lines.iterdir())
    parts = parts_of(files)
    assert [part.number for part in parts] == list(range(len(parts)))
    for file in files:
        text = file.read_bytes()
        spans = [(part.start, part.end) for part in parts if part.file == file]
        if size > len(text):
            assert spans == [(0, None)]
            continue
        assert len(spans) == len(text.splitlines()) if size == 1 else len(spans) > 1
        assert b"".join(text[a:b] for a, b in spans) == text
        assert all(text[:b].endswith(b"\n") for _, b in spans[:-1])
        at = [part.place(number) for part in parts if part.file == file
              for number, _ in part.json_lines()]  # fmt: skip
        kept = [n for n, line in enumerate(text.splitlines(), start=1) if line.strip()]
        assert at == [f"{file}:{number}" for number in kept]
    rows = read_recorded(lines).sequences
    assert [row.logprobs.tolist() for row in rows] == [
        row.logprobs.tolist() for row in whole.sequences
    ]


def test_only_lines_of_json_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "PART_BYTES", 1)
    texts = (b"PK\x03\x04\n1\n2", pickle.dumps(b"\n\n"), b"\n{}\n{}", b"PAR1\n\n", b"")
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.jsonl").write_bytes(text)
    parts = parts_of([*sorted(tmp_path.iterdir()), tmp_path / "gone.jsonl"])
    assert [(part.start, part.end) for part in parts] == [(0, None)] * 6


def test_a_fault_in_the_lines_of_another_part_names_its_line(
    lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_module, "PART_BYTES", 500)
    good = [json.dumps(entry) for entry in entries(9)[:40]]
    bad = json.dumps(entries(9)[0] | {"action_mask": [True] * 4})
    for wrong, says in ((bad, "the first"), ("{", "is no JSON"), ("[1]", "is no JSON")):
        (lines / "part1.jsonl").write_text("\n".join([*good[:30], wrong, *good[30:]]))
        for on in (Where(), Where(workers=2)):
            with pytest.raises(MismatchError, match=rf"part1\.jsonl:31:? {says}"):
                read_recorded(lines, on=on)


@pytest.mark.parametrize("most", [None, 100])
@pytest.mark.parametrize("form", ["dump", "lines"])
def test_several_processes_read_what_one_reads(
    form: str, monkeypatch: pytest.MonkeyPatch, most: int | None, request: pytest.FixtureRequest
) -> None:
    """Sums, rows that are drawn, their numbers: all the same, and in the same order."""
    dump = request.getfixturevalue(form)
    monkeypatch.setattr(parts_module, "PART_BYTES", 1 if form == "dump" else 1000)
    one = read_recorded(dump, most=most)
    two = read_recorded(dump, most=most, on=Where(workers=2))
    assert one.steps == two.steps
    one.steps = two.steps = set()  # no order
    assert repr(one) == repr(two)
    assert one.sums.rows == 3 * ROWS
    assert [row.number for row in one.sequences] == sorted(row.number for row in one.sequences)
    if most is None:
        assert [row.number for row in one.sequences] == list(range(3 * ROWS))
    else:
        assert 16 < len(one.sequences) < 3 * ROWS


@pytest.mark.parametrize("form", ["dump", "lines"])
def test_parts_change_no_sum(
    form: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    dump = request.getfixturevalue(form)
    whole = read_recorded(dump)
    monkeypatch.setattr(parts_module, "PART_BYTES", 1)
    cut = read_recorded(dump)
    assert cut.sums.rows == whole.sums.rows
    for one, other in zip(cut.sums.steps(), whole.sums.steps(), strict=True):
        numbers, others = (
            {name: value for name, value in asdict(step).items() if value is not None}
            for step in (one, other)
        )
        assert numbers == pytest.approx(others, rel=1e-12)


def test_a_fault_in_another_process_is_the_same_error(
    dump: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_module, "PART_BYTES", 1)
    wrong = [*entries(9)[:25], entries(9)[0] | {"action_mask": [True] * 4}]
    pq.write_table(pa.Table.from_pylist(wrong), dump / "part1.parquet", row_group_size=10)
    for on in (Where(), Where(workers=2)):
        with pytest.raises(MismatchError, match=r"part1\.parquet:26: the first") as error:
            read_recorded(dump, on=on)
        assert "mask is shifted" in error.value.fix


def kills_itself(part: Part) -> None:
    if part.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_ends_the_reading_with_its_remedy() -> None:
    parts = [Part(Path("a"), number) for number in range(4)]
    with pytest.raises(MismatchError, match="killed") as error:
        list(Where(workers=2).each(kills_itself, parts, True))
    assert "--workers 1" in error.value.fix


SLEEPS = """
import sys, time
from pathlib import Path
from mismatch.features.recorded.parts import Part
from mismatch.processes.spread import Where

def sleeps(part):
    time.sleep(60)

if __name__ == "__main__":
    print("ready", flush=True)
    list(Where(workers=2).each(sleeps, [Part(Path("a"), n) for n in range(2)], True))
"""


@pytest.mark.slow
def test_a_killed_reader_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text(SLEEPS)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"ready\n"
        until = time.monotonic() + 30
        children: list[psutil.Process] = []
        while len(children) < 3 and time.monotonic() < until:  # two, and a resource tracker
            children = psutil.Process(reader.pid).children(recursive=True)
            time.sleep(0.1)
        assert len(children) >= 2
        time.sleep(2)  # they have begun
        reader.kill()
    gone, alive = psutil.wait_procs(children, timeout=20)
    assert (len(gone), alive) == (len(children), [])


def test_files_of_two_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"token_ids": [1, 2], "action_mask": [0, 1], "logprobs": [-1.0]}\n'
    )
    (tmp_path / "b.jsonl").write_text(
        '{"prompt_tokens": [1], "response_tokens": [2], "logprobs": [-1.0]}\n'
    )
    with pytest.raises(MismatchError, match=r"b\.jsonl .* open-instruct"):
        read_recorded(tmp_path)


def test_a_scheduler_that_does_not_answer_is_an_error_with_its_remedy() -> None:
    with pytest.raises(MismatchError, match="--dask") as error:
        list(Where(dask="tcp://127.0.0.1:9").each(kills_itself, [], True))
    assert error.value.fix


@pytest.mark.parametrize("error", [ModuleNotFoundError("no mismatch"), MismatchError("own", "fix")])
def test_what_fails_on_a_dask_worker_is_said(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def result() -> None:
        raise error

    client = MagicMock()
    client.return_value.map.return_value = [SimpleNamespace(result=result)]
    monkeypatch.setitem(sys.modules, "distributed", SimpleNamespace(Client=client))
    said = "own" if isinstance(error, MismatchError) else "worker failed.*no mismatch"
    with pytest.raises(MismatchError, match=said):
        list(Where(dask="tcp://there").each(kills_itself, [Part(Path("a"), 0)], True))


def test_a_part_keeps_few_rows_more_than_its_share(tmp_path: Path) -> None:
    """So that little goes from one process to another; a part alone keeps what the dump does."""
    path = tmp_path / "dump.jsonl"
    row = {"prompt_token_ids": [1], "response_token_ids": [5] * 9, "logprobs": [-1.0] * 9}
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(4000)))
    kept = {
        share: sum(len(row.token_ids) for row in read_part(
            replace(part, share=share), None, None, None, 8000).sequences)
        for part in parts_of([path])
        for share in (1.0, 0.05)
    }  # fmt: skip
    assert 3000 < kept[1.0] <= 8000
    assert 400 < kept[0.05] <= 1601
    assert [part.share for part in parts_of([path, path])] == [0.5, 0.5]
