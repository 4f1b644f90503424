"""The process between the tool and a worker: ends all that the worker started, whatever happens.

Started as a script by :mod:`mismatch.processes.launch`, before any heavy import. The first line on
its standard input is ``{"command": […], "grace_s": 10.0}``; the end of that input is the end of
the tool, however the tool died. It is the subreaper of all descendants (Linux), so that none is
forgotten: not those in other sessions, nor those whose parent is gone, nor those that overwrote
their environment to show another title, as engines do. It ends as the worker did, by the same
signal or exit code.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
QUIET_S = 0.2  # for helpers that end by themselves once their parent has
FORCED_S = 5.0  # what the kernel may take to end a process that is killed
POLL_S = 0.05
LONGEST = 41  # of the path that holds temporary files: a socket below it has 107 bytes
STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def main() -> int:
    """Run one worker and end its family; the worker's exit code, or its signal."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    job = json.loads(line)
    reading, writing = os.pipe()  # it can be read when a signal has come
    for end in (reading, writing):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *STOPPING):
        signal.signal(number, lambda number, frame: None)
    with temporary_files():
        status = _run(job["command"], job["grace_s"], reading)
    if os.WIFSIGNALED(status):  # end by the signal that ended the worker
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core of the supervisor helps nobody
        killer = os.WTERMSIG(status)
        with contextlib.suppress(OSError):  # SIGKILL has no handler to take away
            signal.signal(killer, signal.SIG_DFL)
        os.kill(os.getpid(), killer)
    return os.waitstatus_to_exitcode(status)


@contextlib.contextmanager
def temporary_files() -> Iterator[None]:
    """Use a folder for the worker's temporary files, which does not outlive it.

    vLLM, SGLang and torchrun leave sockets and folders behind, killed or not. What PyTorch
    compiled stays where it is: the next worker uses it again.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a full disk: the worker says what it cannot write
            above = tempfile.gettempdir()
            if len(above) <= LONGEST:
                # Named after the worker: the tool removes it where this process is killed.
                prefix = f"mismatch-{os.environ.get('MISMATCH_WORKER', '')[:8]}-"
                folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
                os.environ["TMPDIR"] = stack.enter_context(folder)
                if "TORCHINDUCTOR_CACHE_DIR" not in os.environ and (cache := own_cache(above)):
                    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        yield


def own_cache(above: str) -> str:
    """Return the folder of what PyTorch compiled: this user's, and written by nobody else.

    torch runs what lies in it (pickles), and any user of the machine can make a folder of that name
    in a shared temporary directory.

    Returns:
        ``above``/torchinductor_UID, else the folder in the user's home; "": neither is safe, and
        the worker compiles into a temporary folder.
    """
    home = os.path.expanduser("~/.cache/mismatch/torchinductor")
    for folder in (f"{above}/torchinductor_{os.getuid()}", home):
        with contextlib.suppress(OSError):
            os.makedirs(folder, 0o700, exist_ok=True)
            found = os.lstat(folder)
            others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not others:
                return folder
    return ""


def _run(command: list[str], grace_s: float, wake: int) -> int:
    """Return the wait status of a worker that has ended, and its family with it."""
    try:
        control: Callable[..., object] = ctypes.CDLL(None).prctl
    except (AttributeError, OSError):  # not Linux
        control = lambda *arguments: None  # noqa: E731
    control(PR_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()

    def die_with_supervisor() -> None:
        control(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)  # it died between fork and prctl

    try:
        worker = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_supervisor,
        )
    except OSError as error:
        what = f"cannot start {command[0]}: {error.strerror}"
        print("error", json.dumps({"message": what, "fix": "is it an executable file?"}))
        return 1 << 8
    status = _wait(worker.pid, wake)
    ended = end_family(worker.pid, 0.0 if status is None else QUIET_S, grace_s)
    return ended if status is None else status


def _wait(worker: int, wake: int) -> int | None:
    """Return the worker's wait status; None: it has to be ended."""
    while True:
        readable, _, _ = select.select([0, wake], [], [])
        signals = os.read(wake, 4096) if wake in readable else b""
        ended = _reap()
        if worker in ended:
            return ended[worker]
        if any(number in signals for number in STOPPING):
            return None
        if 0 in readable and not os.read(0, 4096):
            return None


def _reap() -> dict[int, int]:
    """Wait statuses of the children that have ended."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


def end_family(worker: int, quiet_s: float, grace_s: float) -> int:
    """End all descendants: first asked, then forced.

    Args:
        quiet_s: how long they may take to end unasked.
        grace_s: how long they may take once they are asked.

    Returns:
        The worker's wait status, or that of a process that was killed.
    """
    start = time.monotonic()
    asked: set[int] = set()
    status = int(signal.SIGKILL)
    this = psutil.Process()
    while True:
        status = _reap().get(worker, status)
        alive = this.children(recursive=True)
        waited = time.monotonic() - start
        if not alive or waited > quiet_s + grace_s + FORCED_S:
            return status
        for process in alive:
            with contextlib.suppress(psutil.Error):
                if waited > quiet_s + grace_s:
                    process.kill()
                elif waited >= quiet_s and process.pid not in asked:
                    asked.add(process.pid)
                    process.terminate()
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())
