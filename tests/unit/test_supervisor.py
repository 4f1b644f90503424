"""No process survives: descendants that show another title, ignore TERM, or left their parents.

The argument: a worker starts a child that does everything that hides it. Whoever of tool,
supervisor and worker dies, and however, the child is gone soon after.
"""

import importlib.util
import os
import signal
import subprocess
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from mismatch.errors import MismatchError
from mismatch.processes import launch, supervisor
from mismatch.processes.launch import Worker, finish, stall_limit, started

from .test_launch import alive, python, run_worker, wait_for

pytestmark = pytest.mark.slow

GRACE_S = 0.5
# How a child hides: its environment is overwritten by its title, or it never had one.
WAYS = ["title", "no environment"]

WORKER = """
import os, pathlib, signal, subprocess, sys, time
child = '''
import os, pathlib, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if {way!r} == "title":
    import setproctitle
    setproctitle.setproctitle("VLLM::EngineCore")
if os.fork():
    os._exit(0)
os.setsid()
pathlib.Path({place!r}, "child").write_text(str(os.getpid()))
time.sleep(60)
'''
signal.signal(signal.SIGTERM, signal.SIG_IGN)
env = {{}} if {way!r} == "no environment" else None
subprocess.Popen([sys.executable, "-c", child], env=env)
while not pathlib.Path({place!r}, "child").exists():
    time.sleep(0.01)
pathlib.Path({place!r}, "worker").write_text(str(os.getpid()))
{then}
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(launch, "GRACE_S", GRACE_S)


@pytest.fixture(params=WAYS)
def way(request):
    if request.param == "title" and importlib.util.find_spec("setproctitle") is None:
        pytest.skip("client: setproctitle is not installed; it comes with vLLM")
    return request.param


def worker(folder, way: str, then: str = "") -> list[str]:
    return python(WORKER.format(place=str(folder), way=way, then=then))


def pids(folder) -> list[int]:
    """Of worker and child, once both are there."""
    files = [folder / name for name in ("worker", "child")]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def require_gone(numbers, timeout_s: float = 5.0):
    try:
        wait_for(lambda: not any(alive(number) for number in numbers), timeout_s)
    finally:
        for number in numbers:
            if alive(number):
                os.kill(number, signal.SIGKILL)


def test_leaving_the_block_ends_a_child_that_hides(tmp_path, way):
    with started("engine", worker(tmp_path, way), tmp_path):
        family = pids(tmp_path)
    require_gone(family, 0.5)


@pytest.mark.parametrize("then", ["sys.exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_crash_of_the_worker_ends_a_child_that_hides(tmp_path, way, then):
    with pytest.raises(MismatchError):
        run_worker("engine", worker(tmp_path, way, then), tmp_path)
    require_gone(pids(tmp_path), 0.5)


TOOL = """
import pathlib, signal
from mismatch.cli import main
from mismatch.processes import launch, supervisor
signal.signal(signal.SIGHUP, {hup})
launch.GRACE_S = {grace}
def app(**arguments):
    with launch.started("engine", {command!r}, pathlib.Path({place!r})) as worker:
        launch.finish(worker)
main.app = app
main.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_end_of_the_tool_ends_a_child_that_hides(tmp_path, way, number):
    facts = {"grace": GRACE_S, "command": worker(tmp_path, way), "place": str(tmp_path)}
    code = TOOL.format(hup="signal.SIG_DFL", **facts)  # also where the tests run under nohup
    tool = subprocess.Popen(python(code), stderr=subprocess.DEVNULL, cwd=tmp_path)
    family = pids(tmp_path)
    os.kill(tool.pid, number)
    tool.wait(20)
    require_gone(family)


def test_hup_is_ignored_under_nohup(tmp_path):
    facts = {"grace": GRACE_S, "command": worker(tmp_path, WAYS[1]), "place": str(tmp_path)}
    code = TOOL.format(hup="signal.SIG_IGN", **facts)
    tool = subprocess.Popen(python(code), stderr=subprocess.DEVNULL, cwd=tmp_path)
    family = pids(tmp_path)
    os.kill(tool.pid, signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        tool.wait(1)
    tool.kill()
    tool.wait()
    require_gone(family)


@pytest.mark.skipif(importlib.util.find_spec("setproctitle") is None, reason="client: setproctitle")
def test_a_killed_supervisor_takes_all_with_it(tmp_path):
    """The worker dies with it; its child keeps its environment in spite of its title."""
    running = Worker("engine", worker(tmp_path, "title"), tmp_path)
    try:
        family = pids(tmp_path)
        os.kill(running._process.pid, signal.SIGKILL)
        with pytest.raises(MismatchError, match="SIGKILL"):
            wait_for(running.ended)
        require_gone(family, 1)
    finally:
        running.stop()


def test_a_stopped_child_is_ended(tmp_path, way):
    with started("engine", worker(tmp_path, way), tmp_path):
        family = pids(tmp_path)
        os.kill(family[1], signal.SIGSTOP)
    require_gone(family, 0.5)


@pytest.mark.parametrize(
    ("code", "fate"), [("sys.exit(3)", "exit code 3"), ("os.abort()", "SIGABRT")]
)
def test_the_fate_of_the_worker_is_told(tmp_path, code, fate):
    with pytest.raises(MismatchError, match=fate):
        run_worker("engine", python(f"import os, sys; {code}"), tmp_path)


def test_an_interpreter_that_is_not_there_is_named(tmp_path):
    with pytest.raises(MismatchError, match="cannot start /no/such/python"):
        run_worker("engine", ["/no/such/python", "-c", "pass"], tmp_path)


def test_ending_well_takes_no_time(tmp_path, monkeypatch):
    """No grace is waited for where nobody is left."""
    monkeypatch.setattr(launch, "GRACE_S", 120.0)
    before = set(psutil.Process().children())
    start = time.monotonic()
    run_worker("engine", python("pass"), tmp_path)
    assert time.monotonic() - start < 60
    assert set(psutil.Process().children()) <= before


# ---------------------------------------------------------------- workers that stop working

LAST_LINE = "waiting for rank 1"
IDLE = f"print({LAST_LINE!r}, flush=True); import time; time.sleep(60)"


def test_an_idle_worker_is_ended_and_named(tmp_path, monkeypatch):
    monkeypatch.setenv("MISMATCH_STALL_S", "1.5")
    start = time.monotonic()
    with (
        started("train", python(IDLE), tmp_path) as train,
        pytest.raises(MismatchError, match="train process stalled") as caught,
    ):
        finish(train)
    assert time.monotonic() - start < 10
    assert LAST_LINE in caught.value.message
    assert "MISMATCH_STALL_S" in caught.value.fix
    assert train._process.poll() is not None


WORKING = {
    "output": "import time\nfor _ in range(15): print('.', flush=True); time.sleep(0.2)",
    "processor time": "import time\nend = time.monotonic() + 3\nwhile time.monotonic() < end: pass",
    "a child's processor time": (
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import time\\nend = time.monotonic() + 3\\n"
        "while time.monotonic() < end: pass'])"
    ),
}


@pytest.mark.parametrize("sign", WORKING)
def test_a_worker_at_work_is_left_alone(tmp_path, monkeypatch, sign):
    monkeypatch.setenv("MISMATCH_STALL_S", "1")
    run_worker("train", python(WORKING[sign]), tmp_path)


def test_a_worker_beside_may_be_idle(tmp_path, monkeypatch):
    monkeypatch.setenv("MISMATCH_STALL_S", "1")
    with (
        started("train", python(IDLE), tmp_path) as train,
        started("engine", python(WORKING["output"]), tmp_path) as engine,
    ):
        finish(engine, train)
        assert train._process.poll() is None


@pytest.mark.parametrize("text", ["soon", "nan", "0", "-1"])
def test_a_stall_limit_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("MISMATCH_STALL_S", text)
    with pytest.raises(MismatchError, match="MISMATCH_STALL_S"):
        stall_limit()


LITTER = """
import os, pathlib, signal, socket, tempfile
pathlib.Path(tempfile.mkdtemp(), "file").touch()
socket.socket(socket.AF_UNIX).bind(os.path.join(tempfile.gettempdir(), "socket"))
cache = os.environ["TORCHINDUCTOR_CACHE_DIR"]
pathlib.Path({text!r}).write_text(f"{{tempfile.gettempdir()}} {{cache}}")
if {killed}:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("killed", [False, True])
def test_temporary_files_go_with_the_worker(tmp_path, monkeypatch, killed):
    above = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(above))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it where it compiles
    text = tmp_path / "text"
    with pytest.raises(MismatchError) if killed else nullcontext():
        run_worker("engine", python(LITTER.format(text=str(text), killed=killed)), tmp_path)
    used, cache = (Path(path) for path in text.read_text().split())
    assert used.parent == cache.parent == above
    assert list(above.iterdir()) == [cache]  # what was compiled stays for the next worker
    cache.rmdir()
    above.rmdir()


def test_temporary_files_go_with_a_supervisor_that_is_killed(tmp_path, monkeypatch):
    above = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(above))
    monkeypatch.setattr(tempfile, "tempdir", None)  # where this process has looked before
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    text = tmp_path / "text"
    code = LITTER.format(text=str(text), killed=False) + "import time; time.sleep(60)"
    running = Worker("engine", python(code), tmp_path)
    try:
        while not (text.exists() and text.read_text()):
            time.sleep(0.05)
        assert Path(text.read_text().split()[0]).parent == above
        os.kill(running._process.pid, signal.SIGKILL)
        with pytest.raises(MismatchError, match="SIGKILL"):
            wait_for(running.ended)
    finally:
        running.stop()
    above.rmdir()  # empty


def test_a_temporary_folder_too_long_for_sockets_is_used_as_it_is(tmp_path, monkeypatch):
    above = tmp_path / ("x" * 60)
    above.mkdir()
    monkeypatch.setenv("TMPDIR", str(above))
    code = "import pathlib, tempfile; pathlib.Path({!r}).write_text(tempfile.gettempdir())"
    run_worker("engine", python(code.format(str(tmp_path / "text"))), tmp_path)
    assert (tmp_path / "text").read_text() == str(above)


def test_a_compile_cache_that_others_can_write_is_not_taken(tmp_path, monkeypatch):
    """torch runs what lies there: a link, and a folder open to others, are somebody else's."""
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    name = f"torchinductor_{os.getuid()}"
    own = str(home / ".cache/mismatch/torchinductor")
    (tmp_path / "fresh").mkdir()
    assert supervisor.own_cache(str(tmp_path / "fresh")) == str(tmp_path / "fresh" / name)
    (tmp_path / "open" / name).mkdir(parents=True)
    (tmp_path / "open" / name).chmod(0o777)
    assert supervisor.own_cache(str(tmp_path / "open")) == own
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / name).symlink_to(tmp_path / "open" / name)
    assert supervisor.own_cache(str(tmp_path / "linked")) == own
    if os.getuid() == 0:
        (tmp_path / "foreign" / name).mkdir(parents=True)
        os.chown(tmp_path / "foreign" / name, 65534, 65534)
        assert supervisor.own_cache(str(tmp_path / "foreign")) == own
    (home / ".cache/mismatch/torchinductor").chmod(0o770)
    assert supervisor.own_cache(str(tmp_path / "open")) == ""
