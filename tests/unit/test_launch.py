"""Workers: their errors reach the user, and none of their processes outlives them."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from mismatch.errors import MismatchError
from mismatch.workers.launch import run_worker, write_error


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def wait_for(condition, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)


def test_output_is_logged_and_progress_is_relayed(tmp_path):
    lines = []
    run_worker("job", python("print('hello'); print('progress 1/2')"), tmp_path, lines.append)
    assert (tmp_path / "logs" / "job.log").read_text() == "hello\n"
    assert lines == ["1/2"]


def test_a_workers_own_error_is_raised_as_it_said_it(tmp_path):
    code = f"""
        import sys
        from mismatch.errors import MismatchError
        from mismatch.workers.launch import write_error
        write_error({str(tmp_path)!r}, "job", MismatchError("no such layer", "use another"))
        sys.exit(1)
    """
    with pytest.raises(MismatchError, match="no such layer") as caught:
        run_worker("job", python(code), tmp_path)
    assert caught.value.fix == "use another"


def test_the_error_of_an_earlier_run_is_not_believed(tmp_path):
    write_error(tmp_path, "job", MismatchError("stale"))
    run_worker("job", python("pass"), tmp_path)
    with pytest.raises(MismatchError, match="exit code 3"):
        run_worker("job", python("raise SystemExit(3)"), tmp_path)


def test_a_crash_shows_the_last_lines(tmp_path):
    with pytest.raises(MismatchError, match="ValueError: 42"):
        run_worker("job", python("raise ValueError(42)"), tmp_path)


def test_a_killed_worker_is_named_as_killed(tmp_path):
    code = "import os, signal; print('loading', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(MismatchError, match="SIGKILL") as caught:
        run_worker("engine", python(code), tmp_path)
    assert "loading" in caught.value.message
    assert "memory" in caught.value.fix


ORPHAN_MAKER = """
    import subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                             start_new_session={new_session})
    open({pid_file!r}, "w").write(str(child.pid))
    {then}
"""


@pytest.mark.parametrize("new_session", [False, True])
@pytest.mark.parametrize("then", ["sys.exit(1)", "import os; os.kill(os.getpid(), 9)"])
def test_children_of_a_dead_worker_are_ended(tmp_path, new_session, then):
    pid_file = tmp_path / "pid"
    code = textwrap.dedent(ORPHAN_MAKER).format(
        pid_file=str(pid_file), new_session=new_session, then=then
    )
    with pytest.raises(MismatchError):
        run_worker("job", python(code), tmp_path)
    wait_for(lambda: not alive(int(pid_file.read_text())))


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_tool_itself_is_ended(tmp_path, number):
    """The worker here ignores Ctrl-C, as engines do; its own child sleeps in another session."""
    pid_file = tmp_path / "pid"
    worker = f"""
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
open({str(pid_file)!r}, "w").write(str(os.getpid()))
time.sleep(600)
"""
    tool = f"""
        import pathlib, signal, sys
        from mismatch.cli.main import _interrupt
        from mismatch.workers.launch import run_worker
        signal.signal(signal.SIGTERM, _interrupt)
        run_worker("job", [sys.executable, "-c", {worker!r}], pathlib.Path({str(tmp_path)!r}))
    """
    process = subprocess.Popen(python(tool), stderr=subprocess.DEVNULL)
    wait_for(lambda: pid_file.exists() and pid_file.read_text())
    os.kill(process.pid, number)
    process.wait(20)
    wait_for(lambda: not alive(int(pid_file.read_text())))
