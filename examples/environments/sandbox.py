"""Run code that a model wrote in a process of its own, with limits. NOT a security boundary.

The code gets a fresh directory, an empty environment, and limits of time, memory, output and disk.
As far as the machine allows, it gets no network, no new processes, and no files but its own, the
interpreter's and the system's: by bubblewrap, or else by user namespaces (``unshare``), and by
Landlock and a system call filter (sandbox_guard.py). :func:`unheld` tries once what the machine
does not contain. The README names what is not contained on any machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

GUARD = Path(__file__).with_name("sandbox_guard.py")
INTERVAL_S = 0.1  # between two looks at the directory's size
STARTED_S = 30.0  # in which a machine under load starts the probe
SMALLEST_FILE = 4096  # bytes: an empty one costs too
TAG = "MISMATCH_WORKER"  # by this variable mismatch finds and ends a worker's descendants
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
# Each line: what this machine could not keep from the code.
PROBE = """
import os, socket
try:
    if set(name for _, name in socket.if_nameindex()) - {"lo"}: raise AssertionError
except AssertionError: print("the network")
except OSError: pass
try:
    if os.fork() == 0: os._exit(0)
    print("new processes")
except OSError: pass
def tries(what, does):
    try: does(); print(what, "of files outside its directory")
    except OSError: pass
tries("the content", lambda: open(PLACE).read())
tries("changes", lambda: open(PLACE, "a").close())
tries("the permissions", lambda: os.chmod(PLACE, 0o600))
"""
LANDLOCK = True  # used where the kernel has it


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run of code may take.

    Attributes:
        output_bytes: of standard output and error together; it is stopped after them.
        disk_bytes: of all its files.
    """

    time_s: float = 10.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 15
    file_bytes: int = 16 << 20
    disk_bytes: int = 32 << 20


DEFAULTS = Limits()


def run_code(code: str, limits: Limits = DEFAULTS) -> str:
    """Return what a Python program writes, or what stopped it; nothing it started is left.

    Its output is data: the caller must not read control tokens in it.
    """
    with _place() as folder:
        output, reason = _run(code, folder, limits, holder())
    text = output[: limits.output_bytes].decode("utf-8", "replace")
    if reason:
        text += f"{'' if not text or text.endswith(chr(10)) else chr(10)}error: {reason}"
    return text or "(no output)"


@cache
def holder() -> str:
    """ "bwrap", "unshare", or "" where neither starts a program on this machine."""
    for name in ("bwrap", "unshare"):
        if shutil.which(name) is None:
            continue
        with _place() as folder:
            output, _ = _run("print('started')", folder, Limits(STARTED_S), name)
        if output == b"started\n":
            return name
    return ""


@cache
def unheld() -> tuple[str, ...]:
    """Return what this machine does not keep from the code: tried once, with code that tries it."""
    with _place() as folder, tempfile.TemporaryDirectory() as other:
        target = Path(other) / "file"
        target.write_text("a file of the user")
        output, _ = _run(f"PLACE = {str(target)!r}\n{PROBE}", folder, Limits(STARTED_S), holder())
    return tuple(output.decode("utf-8", "replace").splitlines())


@contextlib.contextmanager
def _place() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="mismatch-code-")
    try:
        yield folder
    finally:
        try:
            shutil.rmtree(folder, ignore_errors=True)
        except RecursionError:  # folders in folders
            subprocess.run(["rm", "-rf", "--", folder], check=False)


def _run(code: str, folder: str, limits: Limits, by: str) -> tuple[bytes, str]:
    """Output, and what ended it before its time ("": it ended by itself)."""
    with tempfile.TemporaryFile() as program:
        program.write(code.encode("utf-8", "replace"))
        program.seek(0)
        process = subprocess.Popen(
            _command(folder, limits, by),
            stdin=program,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=ENVIRONMENT | {"HOME": folder, "TMPDIR": folder, TAG: os.environ.get(TAG, "")},
            start_new_session=True,
        )
        try:
            output, reason = _collected(process, folder, limits)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
            assert process.stdout is not None
            process.stdout.close()
    if not reason and not output and status:
        reason = f"it ended with status {status}"
    return output, reason


def _command(folder: str, limits: Limits, by: str) -> list[str]:
    given = {
        "memory_bytes": limits.memory_bytes,
        "file_bytes": limits.file_bytes,
        "cpu_s": int(limits.time_s) + 1,
        "disk_bytes": limits.disk_bytes,
        "mounts": by == "unshare",
        "trees": [sys.prefix, sys.base_prefix] if LANDLOCK else None,
    }
    options = {
        "bwrap": [
            *("--unshare-all", "--die-with-parent", "--ro-bind", "/", "/"),
            *("--dev", "/dev", "--proc", "/proc", "--size", str(limits.disk_bytes)),
            *("--tmpfs", folder, "--chdir", folder),
        ],
        "unshare": [
            *("--user", "--map-root-user", "--mount", "--net", "--ipc", "--pid"),
            *("--fork", "--kill-child"),
        ],
    }.get(by, [])
    outer = [shutil.which(by) or by] if by else []
    return [*outer, *options, sys.executable, "-I", "-S", str(GUARD), json.dumps(given)]


def _collected(process: subprocess.Popen[bytes], folder: str, limits: Limits) -> tuple[bytes, str]:
    """Return what it writes until it ends or passes a limit, and which."""
    assert process.stdout is not None
    output, deadline = bytearray(), time.monotonic() + limits.time_s
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return bytes(output), f"stopped after {limits.time_s:g} s"
            if selector.select(min(left, INTERVAL_S)):
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    return bytes(output), ""
                output += chunk
                if len(output) > limits.output_bytes:
                    return bytes(output), f"stopped after {limits.output_bytes:,} bytes of output"
            elif process.poll() is not None:
                return bytes(output), ""
            if _size(folder, process) > limits.disk_bytes:
                return bytes(output), f"stopped after {limits.disk_bytes >> 20} MiB of files"


def _size(folder: str, process: subprocess.Popen[bytes]) -> int:
    """Bytes of the files below a directory; every file and folder counts as one block at least.

    A holder mounts a file system of its own there, which bounds bytes and not the number of
    folders: it is asked through a process that sees it.
    """
    total = 0
    with contextlib.suppress(OSError, psutil.Error):  # ended since
        for child in psutil.Process(process.pid).children(recursive=True)[-1:]:
            inside = f"/proc/{child.pid}/root{folder}"
            if os.stat(inside).st_dev != os.stat(folder).st_dev:
                mounted = os.statvfs(inside)
                total = (mounted.f_files - mounted.f_ffree) * SMALLEST_FILE
    try:
        for root, folders, names in os.walk(folder):
            for name in names + folders:
                with contextlib.suppress(OSError):  # gone since
                    total += max(os.lstat(Path(root) / name).st_blocks * 512, SMALLEST_FILE)
    except RecursionError:  # folders in folders
        return sys.maxsize
    return total
