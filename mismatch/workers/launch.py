"""Start a child process, show its progress, and leave nothing behind whatever happens.

Each engine and each training world is a process of its own: its memory is given back when it ends,
and its crash is an error message here and not the end of the tool.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from mismatch.errors import MismatchError

TAIL_LINES = 12
GRACE_S = 10.0  # between asking a process to end and ending it
PROGRESS = "progress "
OUT_OF_MEMORY = (
    "a killed process is often out of memory: "
    "lower --num-prompts, --max-tokens or --micro-batch-tokens"
)
TAG = "MISMATCH_WORKER"  # in the environment of every descendant: how none is forgotten

if TYPE_CHECKING:
    import psutil

Progress = Callable[[str], None]


def run_worker(
    label: str,
    command: Sequence[str],
    run_dir: Path,
    on_progress: Progress = lambda line: None,
    env: dict[str, str] | None = None,
) -> None:
    """Run ``command`` to its end; its output goes to ``logs/<label>.log``.

    Lines that start with ``progress `` are handed to ``on_progress`` without that word.

    Raises:
        MismatchError: the worker failed. Its own words if it left an error file, else its last
            lines and what its exit status means.
    """
    log_path = run_dir / "logs" / f"{label}.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    clear_errors(run_dir)
    tag = uuid.uuid4().hex
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {}), "PYTHONUNBUFFERED": "1", TAG: tag},
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        assert process.stdout is not None
        reader = threading.Thread(
            target=_relay, args=(process.stdout, log, on_progress), daemon=True
        )
        reader.start()
        try:
            code = process.wait()
        finally:
            kill_tree(process, tag)
            reader.join(GRACE_S)
    if code != 0:
        raise _failure(label, code, run_dir, log_path)


def _relay(stream: IO[bytes], log: IO[bytes], on_progress: Progress) -> None:
    # A progress bar of a library ends its lines with \r; both ends count here.
    for raw in stream:
        for piece in raw.replace(b"\r", b"\n").splitlines():
            line = piece.decode("utf-8", "replace")
            if line.startswith(PROGRESS):
                on_progress(line.removeprefix(PROGRESS))
            else:
                log.write(piece + b"\n")
        log.flush()


def kill_tree(process: subprocess.Popen[bytes], tag: str) -> None:
    """End the process and all its descendants: first asked, then forced."""
    import psutil

    family = [child for child in _tagged(tag) if child.pid != process.pid]
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _, alive = psutil.wait_procs(family, timeout=0.2)
    for child in alive:
        _quietly(child.terminate)
    _, alive = psutil.wait_procs(alive, timeout=GRACE_S / 2)
    for child in alive:
        _quietly(child.kill)


def _tagged(tag: str) -> list[psutil.Process]:
    """Processes started under this worker, also those whose parent is already gone."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(TAG) == tag:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _quietly(action: Callable[[], object]) -> None:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        action()


def _die_with_parent() -> None:
    """Ask the kernel to end this worker if the tool itself is killed (Linux only)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG


# ---------------------------------------------------------------- errors of workers


def error_path(run_dir: Path | str, label: str) -> Path:
    return Path(run_dir) / "errors" / f"{label}.json"


def write_error(run_dir: Path | str, label: str, error: MismatchError) -> None:
    """Called by a worker: leave an error that the parent will raise as its own."""
    path = error_path(run_dir, label)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"message": error.message, "fix": error.fix}))


def clear_errors(run_dir: Path) -> None:
    for path in (run_dir / "errors").glob("*.json"):
        path.unlink()


def _failure(label: str, code: int, run_dir: Path, log_path: Path) -> MismatchError:
    # Of several ranks the first to fail knows why; the others only lost their peer.
    errors = sorted((run_dir / "errors").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        said = json.loads(errors[0].read_text())
        return MismatchError(said["message"], said["fix"])
    tail = log_path.read_text(errors="replace").strip().splitlines()[-TAIL_LINES:]
    shown = "\n".join(f"    {line[:200]}" for line in tail)
    memory = f"; {OUT_OF_MEMORY}" if code in (-9, 128 + 9) else ""
    return MismatchError(
        f"the {label} process {_meaning(code)}; its last lines:\n{shown}",
        f"the whole log is {log_path}{memory}",
    )


def _meaning(code: int) -> str:
    if code < 0:
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"failed with exit code {code}"
