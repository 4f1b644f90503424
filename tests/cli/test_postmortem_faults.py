"""A postmortem that is killed, starved or started in an odd place: its numbers, or words."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..command import mismatch
from ..conftest import grid
from ..limited import mounted
from ..postmortem_kills import write_dump

ROOT = Path(__file__).parents[2]
EVERY = 37  # of about 110 operations


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    return write_dump(tmp_path_factory.mktemp("dump") / "dump.jsonl")


def headline(run: Path) -> dict[str, object]:
    held: dict[str, object] = json.loads((run / "report.json").read_text())["headline"]
    return held


@pytest.mark.slow
@pytest.mark.parametrize("every", grid([4, EVERY], EVERY))
def test_a_kill_at_any_write_leaves_the_same_numbers_or_words(tmp_path, every):
    # A /dev/shm of its own: the engines of other tests write into the machine's meanwhile.
    script = [sys.executable, "-m", "tests.postmortem_kills", str(tmp_path), "1", str(every)]
    done = mounted("/dev/shm", "size=64m", script, ROOT, timeout=900, OMP_NUM_THREADS="1")
    kills = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert len(kills) >= 3
    wrong = [kill for kill in kills if kill[2] not in ("same", "refused") or kill[3]]
    assert not wrong, wrong
    assert {kill[2] for kill in kills} == {"same", "refused"}


@pytest.mark.grid
def test_a_bare_environment_changes_no_number(tmp_path, dump):
    """No HOME, no TMPDIR, no locale, a dumb terminal of one column, 32 descriptors."""
    plain = mismatch("postmortem", dump, "--out", tmp_path / "plain", cwd=tmp_path)
    script = 'ulimit -n 32; exec "$@"'
    command = [sys.executable, "-m", "mismatch", "postmortem", str(dump), "--out", "bare"]
    bare = subprocess.run(
        ["/bin/sh", "-c", script, "sh", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={
            "PATH": "",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": "/nowhere",
            "LC_ALL": "C",
            "TERM": "dumb",
            "COLUMNS": "1",
        },
    )
    assert bare.returncode == plain.returncode, bare.stderr
    assert "Traceback" not in bare.stderr
    assert headline(tmp_path / "bare") == headline(tmp_path / "plain")


@pytest.mark.parametrize("room_kib", grid([8, 48, 96], 48))
def test_a_full_disk_is_named(tmp_path, dump, room_kib):
    command = [sys.executable, "-m", "mismatch", "postmortem", str(dump), "--out", "disk/run"]
    done = mounted(tmp_path / "disk", f"size={room_kib}k", command, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert os.strerror(errno.ENOSPC) in done.stderr
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.grid
def test_of_two_that_write_into_one_directory_one_is_refused(tmp_path, dump):
    command = [sys.executable, "-m", "mismatch", "postmortem", str(dump), "--out", "run"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, cwd=tmp_path, **streams) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in both]
    codes = sorted(process.returncode for process in both)
    assert "Traceback" not in outputs[0][1] + outputs[1][1]
    mismatch("postmortem", dump, "--out", "alone", cwd=tmp_path)
    assert codes[1] == 2 or codes[0] == codes[1], outputs
    assert headline(tmp_path / "run") == headline(tmp_path / "alone")
