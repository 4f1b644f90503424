"""Isolation: implementations are audited in a child process that may die; no torch here.

The worker (:mod:`mismatch.features.kernels.worker`) writes its plan, an audit of each
implementation without results, and then the result of each to a file of its number. Where a kernel
crashes, hangs or is killed, that is its result, and a new process goes on with the next one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mismatch.codec import from_json, to_json
from mismatch.errors import MismatchError
from mismatch.features.kernels.results import Audit, AuditReport, Kind
from mismatch.processes.launch import EXACT, POLL_S, Worker, started
from mismatch.run.store import read_json, write_json

LABEL = "kernels"
WORKER = "mismatch.features.kernels.worker"
PLAN, NOW, DONE = "plan.json", "now.json", "done.json"
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class AuditSpec:
    """What to audit."""

    model: str
    """Path or hub id, resolved."""
    revision: str | None = None
    trust_remote_code: bool = False
    only: Kind | None = None
    """Attention or experts; None: both."""
    names: tuple[str, ...] = ()
    """As the trainer's flags name them; empty: all of this machine. The user's own are always
    audited."""
    kernels: tuple[str, ...] = ()
    """The user's own attention, ``package.module:function``; likewise ``expert_kernels``."""
    expert_kernels: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    """Empty: by the device."""
    seed: int = 0
    limit_s: float = 900.0
    """Longest time for one implementation."""


def result_file(folder: Path, number: int) -> Path:
    """Return where the result of the plan's audit of this number is."""
    return folder / f"{number:03d}.json"


def run_audit(spec: AuditSpec, out: Path, progress: Progress, worker: str = WORKER) -> AuditReport:
    """Audit everything that ``spec`` asks for, in a new directory.

    Raises:
        MismatchError: planning failed: unknown model, a function that cannot be imported …
    """
    folder = out / LABEL
    folder.mkdir(parents=True, exist_ok=True)
    job = write_json(out / "jobs" / f"{LABEL}.json", {"place": str(out), "spec": asdict(spec)})
    command = [sys.executable, "-m", worker, str(job)]
    while not (folder / DONE).exists():
        (folder / NOW).unlink(missing_ok=True)
        with started(LABEL, command, out, progress, EXACT) as process:
            fate = _wait(process, folder, spec.limit_s)
        number = _running(folder)
        if number is not None:
            plan = from_json(AuditReport, read_json(folder / PLAN))
            ended = replace(plan.audits[number], reason=fate, crashed=True)
            write_json(result_file(folder, number), to_json(ended))
    plan = from_json(AuditReport, read_json(folder / PLAN))
    audits = (
        audit if audit.reason else from_json(Audit, read_json(result_file(folder, number)))
        for number, audit in enumerate(plan.audits)
    )
    return replace(plan, audits=tuple(audits))


def _wait(worker: Worker, folder: Path, limit_s: float) -> str:
    """Wait for a worker; return how the current step ended its process, "" where all are done."""
    step, since, watch = None, time.monotonic(), worker.watch()
    while True:
        now = _running(folder)
        if now != step:
            step, since = now, time.monotonic()
        try:
            if worker.ended():
                if (folder / DONE).exists():
                    return ""
                raise MismatchError("the process of the audit ended before its work was done")
        except MismatchError:
            if _running(folder) is None:
                raise
            often = "; often that is out of memory" if "SIGKILL" in worker.fate else ""
            return f"crashed: its process {worker.fate}{often}"
        waited = time.monotonic() - since
        if step is None:
            worker.require_activity(watch)
        elif waited > limit_s:
            worker.stop()
            return f"timed out: no end after {limit_s:g} s"
        time.sleep(POLL_S)


def _running(folder: Path) -> int | None:
    """Return the number at work, from a file that the worker writes and removes."""
    try:
        return int((folder / NOW).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
