"""The audit's process with made-up work: kernels that pass, raise, crash, hang or leave."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import asdict
from typing import Any

import mismatch.features.kernels.worker as worker
from mismatch.codec import to_json
from mismatch.errors import MismatchError
from mismatch.features.kernels.isolation import AuditSpec, Step
from mismatch.run.messages import exit_worker
from tests.kernels_fixture import make_audit_report

NO_SHAPE = "no such shape"


class MadeUp:
    """Does what the name of a step says."""

    def __init__(self, spec: AuditSpec) -> None:
        self.spec = spec

    @classmethod
    def of(cls, spec: AuditSpec) -> MadeUp:
        if "unplanned" in spec.names:
            raise MismatchError("there is no such model", "name another")
        act(spec.model)
        return cls(spec)

    def plan(self) -> dict[str, Any]:
        steps = [
            asdict(Step(number, name, "attention", "yours"))
            for number, name in enumerate(self.spec.kernels)
        ]
        report = make_audit_report()
        return {
            "model": "made-up", "device": "cpu", "geometry": {}, "facts": {}, "not_tested": [],
            "steps": steps, "unavailable": [to_json(report.audits[3])],
        }  # fmt: skip

    def audit(self, step: Step) -> dict[str, Any]:
        act(step.name)
        return to_json(make_audit_report(step.name).audits[4])


def act(name: str) -> None:
    print(f"doing {name}", flush=True)
    if name == "raises":
        raise ValueError(f"{NO_SHAPE}\nsecond line")
    if name == "exits":
        sys.exit(3)
    if name == "leaves":
        os._exit(0)
    if name == "hangs":
        time.sleep(600)
    if name.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, name))


if __name__ == "__main__":
    worker.AuditPlan = MadeUp  # type: ignore[misc, assignment]
    exit_worker(worker.main(sys.argv[1:]))
