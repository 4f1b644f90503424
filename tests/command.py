"""The command line in a process of its own, without paying for Python's start every time.

A server imports the command once and forks a child for every call, so that each call has its own
working directory, environment, signal handlers and exit code, as a shell would give it. What a test
says about the start itself (which modules are imported) needs a real interpreter.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Imported before the first call, with all that they import themselves; none of it reads the
# environment when it is imported.
PACKAGES = ("mismatch.cli", "mismatch.pipeline.commands", "mismatch.reports", "mismatch.features")
LIBRARIES = ("pandas", "pyarrow.parquet", "matplotlib.figure", "jinja2")


class Done(subprocess.CompletedProcess[str]):
    """A command that has ended, and the most memory that one of its processes held."""

    def __init__(self, command: list[str], code: int, out: str, err: str, peak: int) -> None:
        super().__init__(command, code, out, err)
        self.peak_bytes = peak


def mismatch(*arguments: object, cwd: Path | None = None, timeout: float = 120, **env: str) -> Done:
    """``mismatch ARGUMENTS`` with ``env`` added to the environment; its exit code and output."""
    command = [str(each) for each in arguments]
    with tempfile.TemporaryDirectory() as folder:
        call = {
            "argv": ["mismatch", *command],
            "cwd": str(cwd or Path.cwd()),
            "env": {**os.environ, **env},
            "place": folder,
            "timeout": timeout,
        }
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(call) + "\n")
        server.stdin.flush()
        code, peak = map(int, server.stdout.readline().split())
        out, err = ((Path(folder) / name).read_text() for name in ("out", "err"))
    if code == -signal.SIGALRM:
        raise subprocess.TimeoutExpired(command, timeout, out, err)
    return Done(command, code, out, err, peak)


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.command"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.kill)
    return server


def serve() -> None:
    """Answer every line on standard input with the exit code of the call that it describes."""
    for library in LIBRARIES:
        importlib.import_module(library)
    for package in map(importlib.import_module, PACKAGES):
        for module in pkgutil.iter_modules(getattr(package, "__path__", ())):
            importlib.import_module(f"{package.__name__}.{module.name}")
    assert "torch" not in sys.modules, "a fork after torch's threads is not safe"
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(json.loads(line))
        _, status, used = os.wait4(child, 0)
        print(os.waitstatus_to_exitcode(status), used.ru_maxrss * 1024, flush=True)


def _run(call: dict[str, object]) -> None:
    """In the child: become the command, and end."""
    code = 1
    try:
        os.chdir(str(call["cwd"]))
        os.environ.clear()
        os.environ.update(call["env"])  # type: ignore[call-overload]
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{call['place']}/{name}", os.O_WRONLY | os.O_CREAT), number)
        sys.argv = list(call["argv"])  # type: ignore[call-overload]
        signal.alarm(int(call["timeout"]))  # type: ignore[call-overload]
        from mismatch.cli.main import main

        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
