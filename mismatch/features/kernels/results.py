"""Results of a kernel audit, their document and their verdict; plain data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mismatch.codec import to_json
from mismatch.errors import MismatchError, in_list
from mismatch.types import Judged

Kind = Literal["attention", "experts"]
Origin = Literal["ours", "transformers", "yours"]
Outcome = Literal["passed", "failed", "not_tested"]
Verdict = Literal["sound", "wrong", "unusable"]

# The checks of each implementation, in the order of the table.
ATTENTION_COLUMNS = (
    "accepts",  # it takes the model's shapes and masks
    "sinks",  # the learned sinks count in the softmax
    "window",  # exactly the sliding window's keys are seen
    "packing",  # documents of one row do not see each other
    "offsets",  # queries that start later than the keys look at the right keys
    "grouped_queries",  # query heads read the keys of the group they belong to
    "scaling",  # the given scale is used
    "forward",  # output against float64
    "gradient",  # gradients of q, k, v against float64 autograd
    "sink_gradient",  # gradient of the sinks, likewise
    "repeats",  # the same bits twice
    "batches",  # the same bits whatever else is in the batch
)
EXPERT_COLUMNS = (
    "accepts",
    "forward",
    "gradient",  # of hidden states and of the experts' weights
    "router_gradient",  # of the router's weights
    "repeats",
    "batches",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    column: str
    """Of :data:`ATTENTION_COLUMNS` or :data:`EXPERT_COLUMNS`."""
    outcome: Outcome
    detail: str
    """One sentence; the reason, where it was not tested."""
    value: float | None = None
    """Mostly a relative error."""
    limit: float | None = None
    critical: bool = True
    """Whether a failure makes the kernel wrong; otherwise it is only reported."""


@dataclass(frozen=True, slots=True)
class Error:
    """Relative errors against float64 in one dtype, ``|x - truth| / |truth|`` in the 2-norm."""

    dtype: str
    forward: float | None
    gradients: dict[str, float] = field(default_factory=dict)
    """Name ("q", "k", "v", "sinks"; "hidden", "router", "gate_up", "down") -> error; 1.0: no
    gradient arrives."""
    floor: float | None = None
    """Error of a plain implementation in the same dtype: rounding alone."""


@dataclass(frozen=True, slots=True)
class Audit:
    """The audit of one implementation."""

    name: str
    """As in ``--attention``, ``--experts-implementation`` or ``--kernel``."""
    kind: Kind
    origin: Origin
    verdict: Verdict
    """"unusable": it cannot run here, or the model refuses it; it may still have findings."""
    reason: str
    usable: bool
    """A training run could use it here for this model."""
    chosen: bool = False
    """Whether ``auto`` resolves to it."""
    findings: tuple[Finding, ...] = ()
    errors: tuple[Error, ...] = ()
    seconds: float = 0.0
    crashed: bool = False
    """It took its process with it, or had no end."""

    def finding(self, column: str) -> Finding | None:
        """Return the finding of one column, or None where there is none."""
        return next((finding for finding in self.findings if finding.column == column), None)

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The critical failures."""
        return tuple(f for f in self.findings if f.outcome == "failed" and f.critical)

    @property
    def answered(self) -> bool:
        """Whether any check other than "accepts" was run."""
        return any(f.outcome != "not_tested" for f in self.findings if f.column != "accepts")

    @property
    def was_run(self) -> bool:
        """Whether it was run: it has findings, its process ended, or it is the user's own."""
        return self.answered or self.crashed or self.origin == "yours"

    @property
    def why(self) -> str:
        """The first two failed checks, or the reason."""
        if not self.failed:
            return self.reason
        return in_list([word_of(f.column) for f in self.failed], most=2)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """All implementations for one model on one machine."""

    model: str
    device: str
    geometry: dict[str, Any]
    """Sizes of the model (``geometry.SHOWN``)."""
    audits: tuple[Audit, ...]
    facts: dict[str, Any]
    """Versions, device, threads, dtypes, seed."""
    not_tested: tuple[str, ...] = ()
    """One sentence each."""


SCHEMA = "mismatch.kernels/1"


def kernels_to_json(report: AuditReport) -> dict[str, Any]:
    """Return the audit as JSON data; numbers are finite or null.

    Raises:
        MismatchError: nothing was audited.
    """
    verdict = judge(report)
    head = {"status": verdict.status, "reason": verdict.reason}
    return {"schema": SCHEMA, "verdict": head, **to_json(report)}


WORDS = {
    "forward": "output",
    "grouped_queries": "grouped queries",
    "sink_gradient": "sinks' gradient",
    "router_gradient": "router's gradient",
}
# A kernel that ignores a feature has another output too, and other gradients.
CONSEQUENCES = ("forward", "gradient", "sink_gradient", "router_gradient")


def judge(report: AuditReport) -> Judged:
    """Judge: wrong if a run could use one that is wrong, or if a user's own did not pass.

    Raises:
        MismatchError: no implementation was run at all.
    """
    ran = [audit for audit in report.audits if audit.was_run]
    if not ran:
        reasons = "; ".join(f"{audit.name}: {audit.reason}" for audit in report.audits[:4])
        reasons = f" ({reasons})" if reasons else ""
        fault = f"no implementation was audited for {report.model}{reasons}"
        raise MismatchError(fault, "drop --only and --name, or name one that runs here: eager")
    bad = [
        audit
        for audit in report.audits
        if (audit.usable and audit.verdict == "wrong")
        or (audit.origin == "yours" and audit.verdict != "sound")
    ]
    if bad:
        named = "; ".join(f"{audit.name}: {audit.why}" for audit in bad[:3])
        more = f"; and {len(bad) - 3} more" if len(bad) > 3 else ""
        return Judged("wrong", named + more, 1)
    names = {
        kind: ", ".join(a.name for a in ran if a.verdict == "sound" and a.kind == kind)
        for kind in ("attention", "experts")
    }
    named = names["attention"] or names["experts"]
    if not named:
        reason = f"none of the {len(ran)} that ran can be used here for this model"
        return Judged("wrong", reason, 1)
    if all(names.values()):  # both kinds have an ``eager``
        named = "; ".join(f"{kind} {those}" for kind, those in names.items())
    others = ", ".join(a.name for a in ran if not a.usable and a.failed and a.answered)
    refused = f" ({others}: wrong, but not usable here)" if others else ""
    return Judged("sound", f"{named}: nothing wrong{refused}", 0)


def word_of(column: str) -> str:
    """Return what a column is called in a sentence."""
    return WORDS.get(column, column)


def causes_of(failed: Sequence[Finding]) -> list[Finding]:
    """Return the failures that are no consequence of another failure."""
    causes = [finding for finding in failed if finding.column not in CONSEQUENCES]
    return causes or list(failed)
