"""The audit's process with made-up work: kernels that pass, raise, crash, hang or leave."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace

import mismatch.features.kernels.worker as worker
from mismatch.errors import MismatchError
from mismatch.features.kernels.isolation import AuditSpec
from mismatch.features.kernels.results import Audit, AuditReport
from mismatch.run.messages import exit_worker
from tests.kernels_fixture import make_audit_report

NO_SHAPE = "no such shape"


class MadeUp:
    """Does what the name of a step says."""

    def __init__(self, spec: AuditSpec) -> None:
        self.names = spec.kernels

    @classmethod
    def of(cls, spec: AuditSpec) -> MadeUp:
        if "unplanned" in spec.names:
            raise MismatchError("there is no such model", "name another")
        act(spec.model)
        return cls(spec)

    def report(self) -> AuditReport:
        made = make_audit_report()
        audits = [Audit(name, "attention", "yours", "unusable", "", False) for name in self.names]
        return replace(made, audits=(made.audits[3], *audits))

    def audit(self, planned: Audit) -> Audit:
        act(planned.name)
        return make_audit_report(planned.name).audits[4]


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
