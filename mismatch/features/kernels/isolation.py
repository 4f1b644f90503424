"""Isolation: implementations are audited in a child process that may die; no torch here.

The worker (:mod:`mismatch.features.kernels.worker`) goes through its steps and writes the
result of each to a file. Where a kernel crashes, hangs or is killed, that becomes its result, and a
new process continues with the next step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mismatch.codec import from_json
from mismatch.errors import MismatchError
from mismatch.features.kernels.results import Audit, AuditReport, Kind
from mismatch.processes.launch import POLL_S, Worker, started
from mismatch.run.store import read_json, write_json

LABEL = "kernels"
WORKER = "mismatch.features.kernels.worker"
PLAN, NOW, DONE = "plan.json", "now.json", "done.json"
START_S = 300.0  # torch, transformers and a model's configuration, on a slow disk
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class AuditSpec:
    """What to audit.

    >>> AuditSpec(model="tiny-gpt-oss", kernels=("my.kernels:attend@flash",)).limit_s
    900.0

    Attributes:
        model: path or hub id, resolved.
        only: attention or experts; None: both.
        names: implementations, as the trainer's flags name them; empty: all of this machine. The
            user's own are audited in any case.
        kernels, expert_kernels: the user's own, ``package.module:function``.
        dtypes: "fp32", "bf16" …; empty: by the device.
        limit_s: longest time for one implementation.
    """

    model: str
    revision: str | None = None
    trust_remote_code: bool = False
    only: Kind | None = None
    names: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    expert_kernels: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    seed: int = 0
    limit_s: float = 900.0


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the worker.

    Attributes:
        number: of the implementation, in the order of the plan.
    """

    number: int
    name: str
    kind: Kind
    origin: Literal["ours", "transformers", "yours"]

    @property
    def file(self) -> str:
        """Of its result."""
        return f"{self.number:03d}.json"


def run_audit(spec: AuditSpec, out: Path, progress: Progress, worker: str = WORKER) -> AuditReport:
    """Audit everything that ``spec`` asks for.

    Args:
        out: an empty or new directory for jobs, logs and results of the steps.
        worker: module of the child process.

    Raises:
        MismatchError: planning failed: unknown model, a function that cannot be imported …
    """
    folder = out / LABEL
    folder.mkdir(parents=True, exist_ok=True)
    job = write_json(out / "jobs" / f"{LABEL}.json", {"place": str(out), "spec": asdict(spec)})
    command = [sys.executable, "-m", worker, str(job)]
    while not (folder / DONE).exists():
        (folder / NOW).unlink(missing_ok=True)
        with started(LABEL, command, out, progress) as process:
            fate = _wait(process, folder, spec.limit_s)
        if fate:
            write_json(folder / _current(folder).file, {"failed": fate, "crashed": True})
    return collected(folder)


def _wait(worker: Worker, folder: Path, limit_s: float) -> str:
    """Wait for a worker; returns how the current step ended its process, "" where all are done.

    Raises:
        MismatchError: it failed outside of any step.
    """
    step, since = None, time.monotonic()
    while True:
        now = _running_step(folder)
        if now != step:
            step, since = now, time.monotonic()
        try:
            if worker.ended():
                if (folder / DONE).exists():
                    return ""
                raise MismatchError("the process of the audit ended before its work was done")
        except MismatchError:
            if _running_step(folder) is None:
                raise
            often = "; often that is out of memory" if "SIGKILL" in worker.fate else ""
            return f"crashed: its process {worker.fate}{often}"
        waited = time.monotonic() - since
        if step is None and waited > max(limit_s, START_S):
            raise MismatchError(
                f"the audit did nothing for {waited:.0f} s", "is one of your modules waiting?"
            )
        if step is not None and waited > limit_s:
            worker.stop()
            return f"timed out: no end after {limit_s:g} s"
        time.sleep(POLL_S)


def _running_step(folder: Path) -> str | None:
    """The step that is running, from a file that the worker writes and removes."""
    try:
        return (folder / NOW).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _current(folder: Path) -> Step:
    return Step(**read_json(folder / NOW))


def collected(folder: Path) -> AuditReport:
    """The report, from the results of the steps.

    Raises:
        MismatchError: a file is damaged.
    """
    plan = read_json(folder / PLAN)
    audits = [from_json(Audit, entry) for entry in plan["unavailable"]]
    for entry in plan["steps"]:
        step = Step(**entry)
        result = read_json(folder / step.file)
        audits.append(_unusable(step, result) if "failed" in result else from_json(Audit, result))
    return AuditReport(
        model=plan["model"],
        device=plan["device"],
        geometry=plan["geometry"],
        audits=tuple(audits),
        facts=plan["facts"],
        not_tested=tuple(plan["not_tested"]),
    )


def _unusable(step: Step, result: dict[str, Any]) -> Audit:
    """An implementation whose step failed, or ended its process: it cannot be used here."""
    reason, crashed = result["failed"], result.get("crashed", False)
    return Audit(step.name, step.kind, step.origin, "unusable", reason, False, crashed=crashed)
