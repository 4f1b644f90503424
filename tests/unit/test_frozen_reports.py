"""Judging saved runs again gives the reports that were made with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mismatch.run import manifest
from tests import frozen
from tests.command import mismatch
from tests.conftest import grid

CLOSE = 1e-9  # relative: another CPU adds in another order


def differences(was: Any, now: Any, place: str = "") -> list[str]:
    """Return where two reports differ, numbers by more than rounding."""
    if isinstance(was, dict) and isinstance(now, dict):
        keys = {**was, **now}
        pairs = [(was.get(key), now.get(key), f"{place}/{key}") for key in keys]
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        pairs = [(a, b, f"{place}/{n}") for n, (a, b) in enumerate(zip(was, now, strict=True))]
    elif isinstance(was, float) and isinstance(now, float):
        return [] if now == pytest.approx(was, rel=CLOSE, abs=1e-12) else [f"{place}: {was} {now}"]
    else:
        return [] if was == now else [f"{place}: {was!r} {now!r}"]
    return [each for pair in pairs for each in differences(*pair)]


@pytest.mark.parametrize("name", grid(frozen.RUNS, "no-sinks", "quantised", "recorded"))
def test_a_saved_run_is_judged_as_it_was(name: str, tmp_path: Path) -> None:
    run = frozen.unpack(name, tmp_path)
    was = frozen.report_of(run)
    done = mismatch("compare", run, "--quiet")
    assert done.returncode in (0, 1), done.stderr
    assert differences(was, frozen.report_of(run)) == []


GONE = "http://127.0.0.1:9"  # nobody listens there


def unpacked(name: str, into: Path) -> tuple[Path, list[str]]:
    """Write a frozen run as if this machine had made it; return it, and the command that did."""
    run = frozen.unpack(name, into)
    file = run / manifest.NAME
    document = json.loads(file.read_text())
    for entry in document["artefacts"].values():
        entry.pop("made_with", None)
    file.write_text(json.dumps(document))
    return run, [GONE if word == "URL" else word for word in frozen.RUNS[name]]


@pytest.mark.slow
@pytest.mark.parametrize("name", grid((n for n in frozen.RUNS if n != "recorded"), "clean"))
def test_resuming_a_complete_run_starts_nothing(name: str, tmp_path: Path) -> None:
    run, command = unpacked(name, tmp_path)
    was = json.loads((run / "report.json").read_text())
    done = mismatch(*command, "--resume", run, "--quiet", timeout=300)
    report = json.loads((run / "report.json").read_text())
    assert done.returncode == report["headline"]["exit_code"], done.stderr
    assert report["verdict"] == was["verdict"]
    assert not (run / "jobs").exists()
    assert not (run / "logs").exists()


@pytest.mark.parametrize("lacking", ["rollout", "scores/server-prefill", "--explain"])
def test_a_run_that_is_not_complete_asks_its_server(lacking: str, tmp_path: Path) -> None:
    run, command = unpacked("server", tmp_path)
    if lacking == "--explain":
        command.append(lacking)
    else:
        (run / f"{lacking}.parquet").unlink()
    done = mismatch(*command, "--resume", run, "--quiet")
    assert done.returncode == 2
    assert GONE in done.stderr


def test_a_changed_number_shows(tmp_path: Path) -> None:
    run = frozen.unpack("recorded", tmp_path)
    was = frozen.report_of(run)
    changed = json.loads(json.dumps(was))
    changed["verdict"]["reason"] += "."
    assert len(differences(was, changed)) == 1
