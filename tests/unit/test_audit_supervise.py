"""A kernel that takes its process with it costs its own row, and nobody else's."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from mismatch.errors import MismatchError
from mismatch.features.kernels.isolation import AuditSpec, run_audit
from tests.texts import numbers
from tests.unit.kernels_worker import NO_SHAPE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WORKER = "tests.unit.kernels_worker"


@pytest.fixture(autouse=True)
def workers_find_the_tests(monkeypatch):
    """Workers do not import from the working directory; the made-up work is among the tests."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def audited(run_dir, *names, limit_s=60.0, model="made-up", **more):
    spec = AuditSpec(model=model, kernels=names, limit_s=limit_s, **more)
    lines = []
    report = run_audit(spec, run_dir, lines.append, WORKER)
    return {audit.name: audit for audit in report.audits}, report, lines


@pytest.mark.grid
def test_each_ends_in_its_own_way_and_the_others_go_on(tmp_path):
    names = ("good", "SIGSEGV", "raises", "SIGKILL", "exits", "leaves", "last")
    audits, report, lines = audited(tmp_path, *names)
    assert [audit.name for audit in report.audits[1:]] == list(names)
    assert {name for name, audit in audits.items() if audit.findings} == {"good", "last"}
    reasons = {name: audits[name].reason for name in names}
    assert "signal 11 (SIGSEGV)" in reasons["SIGSEGV"]
    assert "signal 9 (SIGKILL)" in reasons["SIGKILL"]
    assert ("memory" in reasons["SIGKILL"], "memory" in reasons["SIGSEGV"]) == (True, False)
    assert reasons["raises"].endswith(f"ValueError: {NO_SHAPE}")
    assert reasons["exits"] == "crashed: SystemExit: 3"
    assert "exit code 0" in reasons["leaves"]
    assert all(audits[name].crashed for name in names[1:-1])
    assert not audits["good"].crashed
    assert lines[1] == "1/7 good"  # the first says that it starts
    assert lines[-1] == "7/7 last"
    done = (tmp_path / "logs" / "kernels.log").read_text()
    assert "doing last" in done
    assert "doing good" not in done  # done once, by an earlier process


@pytest.mark.grid
def test_one_that_hangs_is_ended_and_is_not_waited_for_twice(tmp_path):
    start = time.monotonic()
    audits, _, _ = audited(tmp_path, "hangs", "good", limit_s=3.0)
    assert audits["hangs"].crashed
    assert numbers(audits["hangs"].reason) == [3.0]
    assert audits["good"].findings
    assert time.monotonic() - start < 40


@pytest.mark.grid
def test_what_fails_before_any_kernel_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(MismatchError, match="no such model") as caught:
        audited(tmp_path / "a", "good", names=("unplanned",))
    assert caught.value.fix == "name another"
    with pytest.raises(MismatchError, match="SIGSEGV"):
        audited(tmp_path / "b", "good", model="SIGSEGV")
    monkeypatch.setenv("MISMATCH_STALL_S", "1")
    with pytest.raises(MismatchError, match="stalled"):
        audited(tmp_path / "c", "good", model="hangs", limit_s=1.0)


def test_an_interrupt_leaves_no_process_behind(tmp_path):
    code = f"""
        from pathlib import Path
        from mismatch.features.kernels.isolation import AuditSpec, run_audit
        spec = AuditSpec(model="made-up", kernels=("hangs",))
        run_audit(spec, Path({str(tmp_path)!r}), print, {WORKER!r})
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as tool:
        log, end = tmp_path / "logs" / "kernels.log", time.monotonic() + 60
        while not (log.exists() and "doing hangs" in log.read_text()):
            assert time.monotonic() < end
            time.sleep(0.05)
        children = psutil.Process(tool.pid).children(recursive=True)
        assert children
        os.kill(tool.pid, signal.SIGINT)
        tool.wait(60)
    assert not [child for child in children if child.is_running() and child.status() != "zombie"]
