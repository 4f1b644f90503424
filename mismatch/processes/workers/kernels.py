"""Audits implementations one by one, in a process that any of them may end.

Started by :mod:`mismatch.processes.kernels.isolation`::

    python -m mismatch.processes.workers.kernels JOB.json

JOB.json: ``{"place": DIR, "spec": {…AuditSpec…}}``. What there is to do goes to
``DIR/kernels/plan.json``, the result of each step to a file beside it; ``now.json`` holds the step
that is at work, ``done.json`` appears at the end. Started again, it goes on where it stopped.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from mismatch.codec import from_json
from mismatch.errors import MismatchError
from mismatch.processes.kernels.isolation import DONE, HARM, LABEL, NOW, PLAN, AuditSpec, Step
from mismatch.run.messages import PROGRESS, leave, report_ready, say, write_error
from mismatch.run.store import read_json, write_json

EXIT_FAILED = 2


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m mismatch.processes.workers.kernels JOB.json", file=sys.stderr)
        return EXIT_FAILED
    job = read_json(Path(arguments[0]))
    try:
        run(from_json(AuditSpec, job["spec"]), Path(job["place"]) / LABEL)
    except MismatchError as error:
        write_error(job["place"], LABEL, error)
        return EXIT_FAILED
    return 0


def run(spec: AuditSpec, folder: Path) -> None:
    """Plan, if that is not done, and then every step that has no result.

    Raises:
        MismatchError: there is nothing to audit, or no way to begin.
    """
    work = _work().of(spec)
    if not (folder / PLAN).exists():
        write_json(folder / PLAN, work.plan())
    report_ready()
    steps = [Step(**entry) for entry in read_json(folder / PLAN)["steps"]]
    for count, step in enumerate(steps, start=1):
        say(f"{PROGRESS}{count}/{len(steps)} {step.name}")
        _do(step, folder, partial(work.audit, step))
        found = read_json(folder / step.file)
        if work.harmful(found):
            say(f"{PROGRESS}{count}/{len(steps)} {step.name}, on the model")
            _do(replace(step, what=HARM), folder, partial(work.harm, step, found))
    write_json(folder / DONE, {})


def _work() -> Any:
    from mismatch.processes.kernels.worker import Work

    return Work


def _do(step: Step, folder: Path, work: Callable[[], Any]) -> None:
    """One step with a result of its own, whatever happens in it."""
    if (folder / step.file).exists():
        return
    write_json(folder / NOW, asdict(step))
    try:
        result = work()
    except KeyboardInterrupt:
        raise
    except MismatchError as error:
        result = {"failed": error.message}
    except BaseException as error:  # a kernel may raise anything, SystemExit too
        traceback.print_exc()
        text = (str(error).strip().splitlines() or [""])[0]
        result = {"failed": f"crashed: {type(error).__name__}: {text}"}
    write_json(folder / step.file, result)
    (folder / NOW).unlink()


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
