"""A file that is deleted from a run makes no verdict better, and no report more complete."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mismatch.analysis.levels import INCOMPLETE, SEVERITY
from mismatch.errors import MismatchError
from mismatch.run import manifest, store
from mismatch.run.directory import at_work, load_spec
from mismatch.run.messages import pass_label, write_error

from ..command import ROOT, mismatch
from ..conftest import grid
from ..invented_run import likely, noise, sampled, saved
from ..made_run import make_run, spec

pytestmark = pytest.mark.slow

KILLER = ROOT / "tests" / "integration" / "killer"
WORD = "unverified"
PASSES = ("fsdp:regrouped", "fsdp:repeated", "fsdp:grad")


def complete(folder: Path) -> Path:
    """A run of two sides in float32 that agree: it is healthy."""
    rollout, exact = sampled(), {"dtype": "fp32"}
    left = likely(rollout)
    right = left + noise(rollout, 1e-6)
    return saved(folder, rollout, left, right, engine=exact, trainer=exact)


def incomplete(folder: Path) -> Path:
    """A run without the passes that its spec asks for; of one it holds why."""
    rollout = sampled()
    left, settings = likely(rollout), replace(spec(), noise_floor=True)
    right = left + noise(rollout, 0.001)
    others = {name: right + noise(rollout, 1e-4, 3) for name in PASSES[1:]}
    run = saved(folder, rollout, left, right, others=others, settings=settings)
    write_error(run, pass_label(PASSES[0]), MismatchError("out of memory", "take less"))
    document = {"schema": "x/1"}
    store.save_document(run, "gradients.json", document, schema="x/1")
    (run / "gradients.json").unlink()  # its report is incomplete
    return run


MAKERS = {"complete": complete, "incomplete": incomplete, "broken": make_run}
CODES = {"complete": 0, "incomplete": 2, "broken": 1}


@pytest.fixture(scope="module", params=grid(MAKERS, "complete"))
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = MAKERS[request.param](tmp_path_factory.mktemp(request.param) / "run")
    with at_work(run, "check", load_spec(run), "mismatch check"):
        pass
    assert mismatch("compare", run).returncode == CODES[request.param]
    return run


def document(command: str, run: Path) -> dict[str, Any] | None:
    """Return the report that a command gives; None where it refuses the run."""
    done = mismatch(command, run, "--format", "json")
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (0, 1, 2)
    if not done.stdout:
        assert done.returncode == 2
        assert "error: " in done.stderr
        return None
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_a_deleted_file_makes_nothing_better(judged: Path, tmp_path: Path) -> None:
    before = {command: document(command, judged) for command in ("report", "compare")}
    assert before["compare"] is not None
    assert WORD not in before["compare"]["verdict"]["reason"]
    names = [str(path.relative_to(judged)) for path in judged.rglob("*") if path.is_file()]
    assert {"spec.json", "run.json", "manifest.json", "scores/fsdp.parquet"} <= {*names}
    recorded = {*manifest.entries(judged), manifest.NAME}
    gone = not all((judged / name).exists() for name in recorded)
    for name in names:
        for command, old in before.items():
            run = shutil.copytree(judged, tmp_path / "run")
            (run / name).unlink()
            new = document(command, run)
            shutil.rmtree(run)
            if new is None or old is None:
                continue
            where = (name, command)
            stale = command == "report" and (gone or name in recorded)
            assert (WORD in new["verdict"]["reason"]) == stale, where
            statuses = [SEVERITY[each["verdict"]["status"]] for each in (old, new)]
            assert statuses == sorted(statuses), where
            whats = [{each["what"] for each in report["not_tested"]} for report in (old, new)]
            # Only the manifest knows which artefacts there were: without it, it is named itself.
            known = {"gradients.json"} if name == manifest.NAME else set()
            assert whats[0] <= whats[1] | known, where
            ids = [{check["id"] for check in report["checks"]} for report in (old, new)]
            assert (INCOMPLETE in ids[0]) <= (INCOMPLETE in ids[1]), where


def test_a_recorded_artefact_that_was_deleted_leaves_the_report_incomplete(tmp_path: Path) -> None:
    run = complete(tmp_path / "run")
    store.save_document(run, "locate.json", {"schema": "x/1"}, schema="x/1")
    (run / "locate.json").unlink()
    found = document("compare", run)
    assert found is not None
    assert INCOMPLETE in {check["id"] for check in found["checks"]}
    assert "locate.json" in {each["what"] for each in found["not_tested"]}
    manifest.forget(run, "locate.json")
    found = document("compare", run)
    assert found is not None
    assert found["verdict"]["status"] == "healthy"


@pytest.mark.grid
def test_every_format_of_a_report_that_another_judged_says_so(tmp_path: Path) -> None:
    run, elsewhere = complete(tmp_path / "run"), str(tmp_path / "state")
    for form in ("text", "json", "markdown", "github", "junit"):
        for more in ([], ["--quiet"]):
            done = mismatch("compare", run, "--format", form, *more)
            assert done.returncode == 0, done.stderr
            assert WORD not in done.stdout
            for name in ("report.html", "report.md", "report.json"):
                assert WORD not in (run / name).read_text()
            done = mismatch("report", run, "--format", form, *more, XDG_STATE_HOME=elsewhere)
            assert done.returncode == 0, done.stderr
            assert WORD in done.stdout
            for name in ("report.html", "report.md"):
                assert WORD in (run / name).read_text()
    other = shutil.copytree(run, tmp_path / "other")
    for form in ("text", "json", "markdown", "github", "junit"):
        command = ["compare", run, "--against", other, "--format", form]
        assert WORD in mismatch(*command).stdout
        if form in ("text", "json", "markdown"):
            assert WORD in mismatch("report", run, other, "--format", form).stdout


@pytest.mark.parametrize("command", grid(("compare", "locate"), "compare"))
def test_what_an_interrupted_writer_left_is_removed(command: str, tmp_path: Path) -> None:
    """By each command that holds the run, before it works or fails."""
    run = make_run(tmp_path / "run")
    left = [run / ".spec.json.0a1b.partial", run / "scores" / ".fsdp.parquet.0a1b.partial"]
    for path in left:
        path.write_text("{")
    done = mismatch(command, run, HF_HUB_OFFLINE="1")
    assert "Traceback" not in done.stderr
    assert not [path for path in left if path.exists()]


FOREIGN = (".report.html.partial", ".report.html.0123.partial", ".other.0123456789abcdef.partial")


def test_a_report_removes_what_a_killed_report_left(tmp_path: Path) -> None:
    """And nothing else: not a writer's file at work, a link, or what has another name."""
    run = complete(tmp_path / "run")
    assert mismatch("compare", run).returncode == 0
    killed = subprocess.run(
        [sys.executable, "-m", "mismatch", "report", run],
        env={**os.environ, "KILL_AT": "report.html", "PYTHONPATH": f"{KILLER}:{ROOT}"},
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (left,) = run.glob(".report.html.*.partial")
    for name in FOREIGN:
        (run / name).write_text("theirs")
    at_work = run / ".report.html.00000000000000aa.partial"
    with at_work.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert mismatch("report", run).returncode == 0
        assert not left.exists()
        assert {path.name for path in run.glob("*.partial")} == {at_work.name, *FOREIGN}
        assert mismatch("compare", run).returncode == 0
        assert {path.name for path in run.glob("*.partial")} == {at_work.name}
    (tmp_path / "mine").write_text("mine")
    link = tmp_path / ".tokens.parquet.0123456789abcdef.partial"
    link.symlink_to("mine")
    assert mismatch("tokens", run, tmp_path / "tokens.parquet").returncode == 0
    assert link.is_symlink()
    assert (tmp_path / "mine").read_text() == "mine"
