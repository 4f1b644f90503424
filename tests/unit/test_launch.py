"""Workers: their errors reach the user, and none of their processes outlives them."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from mismatch.engines.sglang import child as sglang_child
from mismatch.errors import MismatchError, OutOfMemory
from mismatch.processes import launch
from mismatch.processes.launch import finish, started
from mismatch.run import messages
from mismatch.run.messages import read_error, write_error


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def run_worker(*arguments) -> None:
    with started(*arguments) as worker:
        finish(worker)


def wait_for(condition, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)


def test_output_is_logged_and_progress_is_relayed(tmp_path):
    lines = []
    run_worker("job", python("print('hello'); print('progress 1/2')"), tmp_path, lines.append)
    assert (tmp_path / "logs" / "job.log").read_text() == "hello\n"
    assert lines[1:] == ["1/2"]


def test_a_workers_own_error_is_raised_as_it_said_it(tmp_path):
    code = f"""
        import sys
        from mismatch.errors import MismatchError
        from mismatch.run.messages import write_error
        write_error({str(tmp_path)!r}, "job", MismatchError("no such layer", "use another"))
        sys.exit(1)
    """
    with pytest.raises(MismatchError, match="no such layer") as caught:
        run_worker("job", python(code), tmp_path)
    assert caught.value.fix == "use another"


def test_a_run_may_lie_at_an_odd_path(tmp_path):
    run = tmp_path / "ein Läuf 漢字 $(x) 'y'"
    code = f"""
        import sys
        from mismatch.errors import MismatchError
        from mismatch.run.messages import write_error
        write_error({str(run)!r}, "job", MismatchError("kein Läuf"))
        sys.exit(1)
    """
    with pytest.raises(MismatchError, match="kein Läuf"):
        run_worker("job", python(code), run)
    assert (run / "logs" / "job.log").exists()


def test_the_error_of_an_earlier_run_is_not_believed(tmp_path):
    write_error(tmp_path, "job", MismatchError("stale"))
    run_worker("job", python("pass"), tmp_path)
    with pytest.raises(MismatchError, match="exit code 3"):
        run_worker("job", python("raise SystemExit(3)"), tmp_path)


def test_a_crash_shows_the_last_lines(tmp_path):
    with pytest.raises(MismatchError, match="ValueError: 42"):
        run_worker("job", python("raise ValueError(42)"), tmp_path)


@pytest.mark.parametrize(
    ("said", "helps"),
    [
        ("OSError: [Errno 24] Too many open files", "ulimit -n"),
        ("[enforce fail] DefaultCPUAllocator: can't allocate memory", "free memory"),
        ("terminate called after throwing std::bad_alloc", "free memory"),
        ("RuntimeError: could not create a primitive", "free memory"),  # oneDNN
        ("OSError: [Errno 28] No space left on device", "free space"),
    ],
)
def test_what_the_system_refused_has_its_remedy(tmp_path, said, helps):
    """Whether a worker says it itself, or its last lines do."""
    with pytest.raises(MismatchError) as caught:
        run_worker("job", python(f"import sys; print({said!r}); sys.exit(1)"), tmp_path)
    assert helps in caught.value.fix
    write_error(tmp_path, "engine", MismatchError(f"the engine failed: {said}", "see the log"))
    error = read_error(tmp_path, "engine")
    assert error is not None
    assert helps in error.fix


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
        from mismatch.processes.launch import finish, started
        signal.signal(signal.SIGTERM, _interrupt)
        run = pathlib.Path({str(tmp_path)!r})
        with started("job", [sys.executable, "-c", {worker!r}], run) as worker:
            finish(worker)
    """
    process = subprocess.Popen(python(tool), stderr=subprocess.DEVNULL)
    wait_for(lambda: pid_file.exists() and pid_file.read_text())
    os.kill(process.pid, number)
    process.wait(20)
    wait_for(lambda: not alive(int(pid_file.read_text())))


STARTING = """
import os, pathlib, time
pathlib.Path(os.environ["PID_FILE"]).write_text(str(os.getpid()))
time.sleep(600)  # before SGLang itself asks to end with its parent
"""
ENGINE = """
import multiprocessing
from mismatch.engines.sglang.child import run_detokenizer

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=run_detokenizer)
    process.start()
    process.join()
"""


@pytest.mark.slow
def test_a_process_of_sglang_ends_with_an_engine_that_is_killed_while_it_starts(tmp_path):
    """And no supervisor is there to end it."""
    managers = tmp_path / "sglang" / "srt" / "managers"
    managers.mkdir(parents=True)
    for folder in (managers.parent.parent, managers.parent, managers):
        (folder / "__init__.py").touch()
    (managers / "detokenizer_manager.py").write_text(STARTING)
    script, pid_file = tmp_path / "engine.py", tmp_path / "pid"
    script.write_text(ENGINE)
    path = os.pathsep.join([str(tmp_path), str(launch.ROOT)])
    env = os.environ | {"PYTHONPATH": path, "PID_FILE": str(pid_file)}
    engine = subprocess.Popen([sys.executable, str(script)], env=env)
    wait_for(lambda: pid_file.exists() and pid_file.read_text())
    engine.kill()
    engine.wait(20)
    wait_for(lambda: not alive(int(pid_file.read_text())))


def test_a_process_of_sglang_ends_where_its_engine_is_gone_already(monkeypatch):
    monkeypatch.setattr(os, "_exit", sys.exit)
    sglang_child.require_engine()  # no child of multiprocessing at all
    gone = type("Engine", (), {"pid": -1})
    monkeypatch.setattr("multiprocessing.parent_process", lambda: gone)
    with pytest.raises(SystemExit):
        sglang_child.require_engine()


STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
if len(sys.argv) > 2:
    subprocess.Popen([sys.executable, *sys.argv[1:3]], start_new_session=True)
pathlib.Path(sys.argv[-1]).write_text(str(os.getpid()))
time.sleep(40)
"""


@pytest.mark.slow
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_interrupt_does_not_cut_the_clean_up_short(tmp_path, second):
    """A worker and its child, in another session, that both have to be killed by force."""
    script, parent, child = (tmp_path / name for name in ("stubborn.py", "parent", "child"))
    script.write_text(STUBBORN)
    command = [sys.executable, str(script), str(script), str(child), str(parent)]
    tool = f"""
        import pathlib, signal
        from mismatch.cli.main import _interrupt
        from mismatch.processes import launch
        launch.GRACE_S = 1.5
        signal.signal(signal.SIGTERM, _interrupt)
        with launch.started("job", {command!r}, pathlib.Path({str(tmp_path)!r})) as worker:
            launch.finish(worker)
    """
    process = subprocess.Popen(python(tool), stderr=subprocess.DEVNULL)
    for file in (parent, child):
        wait_for(lambda file=file: file.exists() and file.read_text())
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.4)
    os.kill(process.pid, second)
    process.wait(20)
    wait_for(lambda: not any(alive(int(file.read_text())) for file in (parent, child)), 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_a_stage_ends_well_is_kept_for_after(tmp_path, monkeypatch, number):
    done = []

    def kill_tree(process, tag):
        if not done:
            signal.raise_signal(number)
        done.append(True)

    def interrupt(number, frame):
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "kill_tree", kill_tree)
    before = signal.signal(number, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_worker("job", python("pass"), tmp_path)
        assert signal.getsignal(number) is interrupt
    finally:
        signal.signal(number, before)
    assert done


def test_a_worker_can_be_run_from_any_thread(tmp_path):
    lines = []
    arguments = ("job", python("print('progress 1/1')"), tmp_path, lines.append)
    thread = threading.Thread(target=run_worker, args=arguments)
    thread.start()
    thread.join(20)
    assert lines[1:] == ["1/1"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---------------------------------------------------------------- two workers at once


def test_the_first_failure_ends_the_other_at_once(tmp_path):
    """An engine that would sample for ten minutes, beside a trainer that refuses its spec."""
    refusal = f"""
        import sys
        from mismatch.errors import MismatchError
        from mismatch.run.messages import write_error
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
        from mismatch.run.messages import write_error
        write_error({str(tmp_path)!r}, "train-rank0", MismatchError("of the trainer"))
        raise SystemExit(3)
    """
    with pytest.raises(MismatchError, match=r"engine .*code 3"):
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
        from mismatch.run.messages import report_ready, report_timing
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
        from mismatch.run.messages import write_error
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


# ---------------------------------------------------------------- lines that are not as agreed

ODD = [
    "timing of the kernels: not known yet",
    "timing generate soon",
    "timing ",
    "timing generate nan",
    "timing generate 1.250timing load 2.500",
    "error {oops",
    'error {"a": 1}',
    'error {"message": "cut sho',
]


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_line_is_logged_and_the_reading_goes_on(tmp_path, odd):
    """More output follows than a pipe holds; a worker that nobody reads is ended by its alarm."""
    code = f"""
        import signal
        signal.alarm(5)
        print({odd!r})
        print("x" * 200_000)
        print("timing generate 1.5")
    """
    with started("job", python(code), tmp_path) as worker:
        finish(worker)
    assert worker.timings == {"generate": 1.5}
    assert (tmp_path / "logs" / "job.log").read_text().splitlines() == [odd, "x" * 200_000]


def test_a_display_that_fails_does_not_stop_the_worker(tmp_path):
    def broken(line):
        raise BrokenPipeError

    code = "import signal; signal.alarm(5); print('progress 1/2'); print('x' * 200_000)"
    run_worker("job", python(code), tmp_path, broken)
    assert (tmp_path / "logs" / "job.log").read_text().startswith("progress 1/2\nxxx")


def test_an_error_file_that_was_cut_short_is_not_believed(tmp_path):
    code = f"""
        import pathlib
        path = pathlib.Path({str(tmp_path)!r}) / "errors" / "job.json"
        path.parent.mkdir()
        path.write_text('{{"message": "no sp')
        raise SystemExit("the last words")
    """
    with pytest.raises(MismatchError, match="the last words"):
        run_worker("job", python(code), tmp_path)


def test_a_line_for_the_parent_is_one_write(tmp_path, monkeypatch):
    """Ranks share one pipe: a line end written apart lets another rank's line in between."""
    writes = []

    class Stream:
        write = staticmethod(writes.append)
        flush = staticmethod(lambda: None)

    (tmp_path / "errors").write_text("")
    monkeypatch.setattr(sys, "stderr", Stream)
    messages.report_ready()
    messages.report_timing("load:fsdp", 1.25)
    write_error(tmp_path, "job", MismatchError("disk full", "free some"))
    assert writes == [
        "ready\n",
        "timing load:fsdp 1.250\n",
        'error {"message": "disk full", "fix": "free some"}\n',
    ]


def test_an_error_file_keeps_the_kind_of_the_error(tmp_path):
    for kind in (MismatchError, OutOfMemory):
        write_error(tmp_path, "pass-train", kind("too large", "use less"))
        error = read_error(tmp_path, "pass-train")
        assert type(error) is kind
        assert (error.message, error.fix) == ("too large", "use less")


def test_the_headline_of_an_error_is_without_the_log():
    headline = "the train process was killed"
    error = MismatchError(headline, log="    one\n    two")
    assert error.headline == headline
    assert error.message.endswith("\n    one\n    two")
