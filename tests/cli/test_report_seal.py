"""A report that this user judged is not called unverified; a changed or foreign one is."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from mismatch.pipeline.saved_runs import UNVERIFIED
from tests import frozen
from tests.command import mismatch

WORD = UNVERIFIED.partition(":")[0]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run that a command has judged here, and the folder that holds the user's key."""
    place = tmp_path_factory.mktemp("sealed")
    run, state = frozen.unpack("recorded", place), place / "state"
    done = mismatch("compare", run, XDG_STATE_HOME=str(state))
    assert done.returncode in (0, 1), done.stderr
    return run, state


def said(run: Path, state: Path) -> str:
    """Return the pages that `mismatch report` makes of a run's stored report."""
    done = mismatch("report", run, XDG_STATE_HOME=str(state))
    assert done.returncode in (0, 1), done.stderr
    return (run / "report.md").read_text() + (run / "report.html").read_text()


def test_a_report_that_was_judged_here_is_verified(judged: tuple[Path, Path]) -> None:
    assert WORD not in said(*judged)


def test_another_users_key_or_none_verifies_nothing(
    judged: tuple[Path, Path], tmp_path: Path
) -> None:
    run, state = judged
    copied = shutil.copytree(run, tmp_path / "run")
    assert WORD in said(copied, tmp_path / "other")
    (tmp_path / "file").write_text("no folder")
    assert WORD in said(copied, tmp_path / "file")
    assert WORD not in said(copied, state)


def test_changed_numbers_are_not_verified(judged: tuple[Path, Path], tmp_path: Path) -> None:
    run, state = judged
    forged = shutil.copytree(run, tmp_path / "run")
    report = json.loads((forged / "report.json").read_text())
    report["run"]["command"] = "mismatch check --model other"
    (forged / "report.json").write_text(json.dumps(report))
    listed = json.loads((forged / "manifest.json").read_text())
    changed = (forged / "report.json").read_bytes()
    entry = listed["artefacts"]["report.json"]
    assert entry["made_with"]["seal"]
    entry |= {"sha256": hashlib.sha256(changed).hexdigest(), "bytes": len(changed)}
    (forged / "manifest.json").write_text(json.dumps(listed))
    assert WORD in said(forged, state)
