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
from mismatch.workers.launch import finish, run_worker, started, write_error


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


# ---------------------------------------------------------------- two workers at once


def test_the_first_failure_ends_the_other_at_once(tmp_path):
    """An engine that would sample for ten minutes, beside a trainer that refuses its spec."""
    refusal = f"""
        import sys
        from mismatch.errors import MismatchError
        from mismatch.workers.launch import write_error
        write_error({str(tmp_path)!r}, "train-rank0", MismatchError("no such kernel", "another"))
        sys.exit(2)
    """
    start = time.monotonic()
    with (
        pytest.raises(MismatchError, match="no such kernel"),
        started("train", python(refusal), tmp_path) as train,
        started("engine", python("import time; time.sleep(600)"), tmp_path) as engine,
    ):
        finish(engine, train)
    assert time.monotonic() - start < 30
    assert engine._process.poll() is not None


def test_one_worker_is_not_blamed_for_the_error_of_the_other(tmp_path):
    code = f"""
        from mismatch.errors import MismatchError
        from mismatch.workers.launch import write_error
        write_error({str(tmp_path)!r}, "train-rank0", MismatchError("of the trainer"))
        raise SystemExit(3)
    """
    with pytest.raises(MismatchError, match="engine process failed with exit code 3"):
        run_worker("engine", python(code), tmp_path)


def test_a_worker_that_ends_well_beside_another_is_no_failure(tmp_path):
    with (
        started("train", python("pass"), tmp_path) as train,
        started("engine", python("import time; time.sleep(1)"), tmp_path) as engine,
    ):
        finish(engine, train)
        finish(train)


def test_a_worker_says_how_long_it_took(tmp_path):
    code = """
        from mismatch.workers.launch import report_ready, report_timing
        report_ready()
        report_timing("load:fsdp", 1.25)
    """
    with started("train", python(code), tmp_path) as worker:
        finish(worker)
    assert worker.timings.keys() == {"ready", "load:fsdp"}
    assert worker.timings["load:fsdp"] == 1.25
    assert 0 < worker.timings["ready"] < 60


def test_an_error_that_cannot_be_written_is_said_instead(tmp_path):
    """A full disk, here a file where the directory should be: the reason must not be lost."""
    (tmp_path / "errors").write_text("")
    code = f"""
        import sys
        from mismatch.errors import MismatchError
        from mismatch.workers.launch import write_error
        write_error({str(tmp_path)!r}, "job", MismatchError("disk full", "free\\nsome"))
        sys.exit(1)
    """
    with pytest.raises(MismatchError, match="disk full") as caught:
        run_worker("job", python(code), tmp_path)
    assert caught.value.fix == "free\nsome"


def test_a_log_that_cannot_be_written_does_not_stop_the_worker(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "job.log").symlink_to("/dev/full")
    code = "print('x' * 1000 + '\\n', end='', flush=True)\n" * 300 + "raise SystemExit('the end')"
    with pytest.raises(MismatchError, match="the end"):
        run_worker("job", python(code), tmp_path)
