"""Start child processes, show their progress, and leave nothing behind whatever happens.

Each engine and each training world is a separate process: its memory is given back when it ends,
and its crash is an error message here and not the end of the tool. What a worker
says: mismatch.run.messages.

A process that waits for something that will never come (a rank that was stopped, a peer that died,
a lock) is idle. Loading, compiling and waiting for a GPU are not: they take processor time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import psutil

from mismatch.engines.registry import engine_info
from mismatch.errors import MismatchError
from mismatch.run.machine import BUS_ORDER
from mismatch.run.messages import (
    ERROR,
    OUT_OF_MEMORY,
    PHASES,
    PROGRESS,
    READY,
    TIMING_LINE,
    clear_errors,
    error_files,
    error_in,
    remedy,
)
from mismatch.run.provenance import redact
from mismatch.specs import EngineSpec

ROOT = Path(__file__).parents[2]


# What containers set to have TF32 in place of float32 (NVIDIA's NGC images).
EXACT = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0", "NVIDIA_TF32_OVERRIDE": "0"}
# Triton's products of float32 are TF32 unless told: vLLM's attention and experts in float32.
EXACT_TRITON = {"TRITON_F32_DEFAULT": "ieee"}


def rendezvous_args() -> list[str]:
    """Return how the ranks of one machine find each other."""
    here = ["--nnodes", "1", "--node-rank", "0"]  # whatever PET_NNODES says of a pod
    port = os.environ.get("MASTER_PORT")
    if port is None:
        return [*here, "--standalone"]
    return [*here, "--master-addr", "127.0.0.1", "--master-port", port]


def package_path() -> dict[str, str]:
    """Return what a worker needs to find this package where only the working directory holds it."""
    return {} if str(ROOT) in sys.path[1:] else interpreter_environment(sys.executable)


def interpreter_environment(python: str | None) -> dict[str, str]:
    """Return what another interpreter needs to find this package where it runs from a checkout."""
    if python is None or ROOT.name in ("site-packages", "dist-packages"):
        return {}
    path = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *([path] if path else [])])}


def worker_path(directory: Path) -> dict[str, str]:
    """Return what any interpreter needs to import this package and nothing else from here.

    A link in ``directory`` leads to the package alone, so that no other package of this environment
    takes the place of one of the user's.
    """
    room = directory.resolve() / "package"
    room.mkdir(exist_ok=True)
    link = room / "mismatch"
    for other in room.iterdir():  # of a copied run: a module here would be imported
        if other != link or not link.is_symlink():
            shutil.rmtree(other) if other.is_dir() and not other.is_symlink() else other.unlink()
    if not link.is_symlink() or link.resolve() != ROOT / "mismatch":
        link.unlink(missing_ok=True)
        link.symlink_to(ROOT / "mismatch", target_is_directory=True)
    path = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(room), *([path] if path else [])])}


def engine_python(spec: EngineSpec) -> str:
    """Return the interpreter of the engine's process."""
    return own_python(spec) or sys.executable


def own_python(spec: EngineSpec) -> str | None:
    """Return the interpreter of an environment that holds the engine; None: this interpreter.

    The one that was named, else that of ``.venv-NAME`` next to this environment, as
    `make env-sglang` makes it, for an engine that declares so and is not installed here.
    """
    info = engine_info(spec.engine)
    here = info.module is None or find_spec(info.module) is not None
    if spec.python is not None or here or not info.own_environment:
        return spec.python
    suffix = "-cpu" if Path(sys.prefix).name == ".venv-cpu" else ""  # as tools/make_env.py names it
    beside = Path(sys.prefix).parent / f".venv-{spec.engine}{suffix}" / "bin" / "python"
    return str(beside) if beside.exists() else None


TAIL_LINES = 12
GRACE_S = 10.0  # between asking a process to end and ending it
POLL_S = 0.05
SUPERVISOR = Path(__file__).with_name("supervisor.py")
TAG = "MISMATCH_WORKER"  # in the environment of every descendant: found if the supervisor is killed
# setproctitle, which engines use, overwrites the environment unless it is told not to.
# And no file of the working directory (tokenizers.py, random.py) takes the place of a module.
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "SPT_NOENV": "1", "PYTHONSAFEPATH": "1"}
HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Progress = Callable[[str], None]


def _silent(line: str) -> None:
    pass


class Worker:
    """A child process that is at work; made by :func:`started`.

    Attributes:
        on_progress: called with every progress line, from a separate thread; see :meth:`show`.
        timings: seconds of the parts of its work, as it said; ``ready``: of its start-up.
        lines: how many it has put out.
    """

    def __init__(
        self,
        label: str,
        command: Sequence[str],
        run_dir: Path,
        on_progress: Progress = _silent,
        env: dict[str, str] | None = None,
    ) -> None:
        self.label = label
        self.run_dir = run_dir
        self.timings: dict[str, float] = {}
        self.lines = 0
        self.log_path = run_dir / "logs" / f"{label}.log"
        self._phase = "starting"  # until it is ready
        self.show(on_progress)
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._errors: list[MismatchError] = []
        self._tag = uuid.uuid4().hex
        clear_errors(run_dir, label)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = open(self.log_path, "wb")  # noqa: SIM115 (closed by stop)
        self._start = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(SUPERVISOR)],
            stdin=subprocess.PIPE,  # closed by the kernel when the tool dies, however it does
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **BUS_ORDER, **package_path(), **(env or {}), **ENVIRONMENT}
            | {TAG: self._tag},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = json.dumps({"command": [str(part) for part in command], "grace_s": GRACE_S})
        with contextlib.suppress(OSError):  # ended already: poll says how
            self._process.stdin.write(job.encode() + b"\n")
            self._process.stdin.flush()
        self._reader = threading.Thread(
            target=self._relay, args=(self._process.stdout,), daemon=True
        )
        self._reader.start()

    def show(self, on_progress: Progress) -> None:
        """Hand progress lines to another reader, which first gets the phase that it starts in."""
        self.on_progress = on_progress
        with contextlib.suppress(Exception):  # a display that fails does not stop the worker
            if READY not in self.timings:
                on_progress(f"{self._phase} · log logs/{self.log_path.name}")

    def ended(self) -> bool:
        """Return whether it is done.

        Raises:
            MismatchError: it failed. With the error that it left, else its last lines and what
                its exit status means.
        """
        code = self._process.poll()
        if code is None:
            return False
        self.stop()
        if code != 0:
            raise self._failure(code)
        return True

    @property
    def fate(self) -> str:
        """How its process ended, in words; only for one that has."""
        return _meaning(self._process.wait())

    def watch(self, more_s: float = 0.0) -> StallWatch:
        """How long it is idle from now on; ``more_s``: what it may wait for others."""
        return StallWatch(self._process.pid, lambda: self.lines, stall_limit() + more_s)

    def require_activity(self, watch: StallWatch) -> None:
        """End it where it has stopped working.

        Raises:
            MismatchError: it has.
        """
        idle = watch.idle_s()
        if idle <= watch.limit_s:
            return
        shown = self._shown()
        self.stop()
        raise MismatchError(
            f"the {self.label} process stalled: no output and no processor time "
            f"for {idle:.0f} s; it has been ended",
            f"the whole log is {self.log_path}; continue with --resume; "
            f"{VARIABLE}=SECONDS waits longer",
            log=shown,
        )

    def stop(self) -> None:
        """End the process and all its descendants, whatever they are doing."""
        with _interrupts_held():
            kill_tree(self._process, self._tag)
            for folder in Path(tempfile.gettempdir()).glob(f"mismatch-{self._tag[:8]}-*"):
                shutil.rmtree(folder, ignore_errors=True)  # of a supervisor that was killed
            self._reader.join(GRACE_S)
            with contextlib.suppress(OSError):
                self._process.stdin.close()  # type: ignore[union-attr]
            with contextlib.suppress(OSError):
                self._log.close()

    def _relay(self, stream: IO[bytes]) -> None:
        # A progress bar of a library ends its lines with \r; both ends count here.
        for raw in stream:
            for piece in raw.replace(b"\r", b"\n").splitlines():
                line = redact(piece.decode("utf-8", "replace"))
                self.lines += 1
                # Nothing may stop the reading, no odd line, no terminal that is gone, no full
                # disk: the worker would wait on its output for ever.
                try:
                    self._line(line)
                except Exception:
                    self._note(line)
            with contextlib.suppress(OSError, ValueError):
                self._log.flush()

    def _line(self, line: str) -> None:
        if line.startswith(PROGRESS):
            self.on_progress(line.removeprefix(PROGRESS))
        elif line == READY:
            self.timings[READY] = round(time.monotonic() - self._start, 3)
        elif timing := TIMING_LINE.fullmatch(line):
            self.timings[timing[1]] = float(timing[2])
        elif line.startswith(ERROR) and (error := error_in(line.removeprefix(ERROR))):
            self._errors.append(error)
        else:
            if phase := next((words for sign, words in PHASES if sign in line), ""):
                self._phase = phase
                self.show(self.on_progress)
            self._note(line)

    def _note(self, line: str) -> None:
        self._tail.append(line)
        with contextlib.suppress(OSError, ValueError):
            self._log.write(line.encode() + b"\n")

    def _failure(self, code: int) -> MismatchError:
        # Of several ranks the first to fail knows why; the others only lost their peer.
        files = sorted(error_files(self.run_dir, self.label), key=lambda f: f.stat().st_mtime_ns)
        written = [error_in(file.read_text(errors="replace")) for file in files]
        for error in [*written, *self._errors]:
            if error is not None:
                return error
        memory = f"; {OUT_OF_MEMORY}" if code in (-9, 128 + 9) else ""
        fix = remedy(self._shown(), f"the whole log is {self.log_path}{memory}")
        return MismatchError(f"the {self.label} process {_meaning(code)}", fix, log=self._shown())

    def _shown(self) -> str:
        """Its last lines."""
        return "\n".join(f"    {line[:200]}" for line in self._tail if line.strip())


@contextmanager
def started(
    label: str,
    command: Sequence[str],
    run_dir: Path,
    on_progress: Progress = _silent,
    env: dict[str, str] | None = None,
) -> Iterator[Worker]:
    """Run a worker within the block, which it does not outlive."""
    worker = Worker(label, command, run_dir, on_progress, env)
    try:
        yield worker
    finally:
        worker.stop()


def finish(
    worker: Worker, *beside: Worker, more_s: float = 0.0, until: str = "", end: float = math.inf
) -> None:
    """Wait until a worker is done.

    Args:
        beside: workers that wait for this worker, or work meanwhile; they may be idle.
        more_s: what the worker may itself wait for others.
        until: or until it has reported a timing of this name.
        end: time (monotonic) at which it is ended.

    Raises:
        MismatchError: it failed, stalled or took too long, or another worker failed: whichever was
            first.
    """
    watch = worker.watch(more_s)
    while not worker.ended() and until not in worker.timings:
        worker.require_activity(watch)
        if time.monotonic() > end:
            worker.stop()
            raise MismatchError(f"the {worker.label} process exceeded its time limit")
        for other in beside:
            other.ended()
        time.sleep(POLL_S)


def kill_tree(process: subprocess.Popen[bytes], tag: str) -> None:
    """End a supervisor, which ends its family; and what is left where it was killed itself."""
    process.terminate()
    try:
        process.wait(2 * GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    family = []  # processes started under this worker, also those whose parent is already gone
    for candidate in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if candidate.environ().get(TAG) == tag:
                family.append(candidate)
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()
    _, alive = psutil.wait_procs(family, timeout=GRACE_S / 2)
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C, TERM and HUP take effect after the block: half a clean-up would leave orphans.

    They are kept and not ignored, so that one that comes while a stage ends well still counts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals never interrupt another thread, nor could it change what they do
        return
    came: list[int] = []
    before = {}
    try:
        for number in HELD:
            before[number] = signal.signal(number, lambda got, frame: came.append(got))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if came:
            signal.raise_signal(came[0])


def _meaning(code: int) -> str:
    if code < 0:
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"failed with exit code {code}"


VARIABLE = "MISMATCH_STALL_S"
STALL_S = 900.0  # longer than a request to a server takes with its retries at the defaults
INTERVAL_S = 10.0
BUSY = 0.05  # of one core, all processes of the worker together


def stall_limit() -> float:
    """Return seconds of idleness after which a worker is ended.

    Raises:
        MismatchError: the environment names no positive number.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        limit = float(text) if text else STALL_S
    except ValueError:
        limit = math.nan
    if not limit > 0:
        raise MismatchError(f"{VARIABLE}={text} is no time", "give seconds, e.g. 3600; inf: never")
    return limit


class StallWatch:
    """How long a worker has been idle.

    Args:
        pid: of its supervisor.
        lines: how many lines it has put out so far.
    """

    def __init__(self, pid: int, lines: Callable[[], int], limit_s: float) -> None:
        self.pid, self.lines, self.limit_s = pid, lines, limit_s
        self.interval_s = min(INTERVAL_S, limit_s / 5)
        self.last = self.active = time.monotonic()
        self.seen, self.used = lines(), processor_seconds(pid)

    def idle_s(self) -> float:
        """Return seconds since it was last seen at work."""
        now = time.monotonic()
        if now - self.last >= self.interval_s:
            seen, used = self.lines(), processor_seconds(self.pid)
            # Less than before: a process that had used more has ended, which is activity too.
            worked = abs(used - self.used) > BUSY * (now - self.last)
            if seen != self.seen or worked:
                self.active = now
            self.last, self.seen, self.used = now, seen, used
        return now - self.active


def processor_seconds(pid: int) -> float:
    """Return the processor time of all descendants, user and system."""
    total = 0.0
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
    return total
