"""Results of a kernel audit, their document and their verdict; plain data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mismatch.analysis.plugins import Analysis
from mismatch.codec import status_schema, to_json, with_verdict, without_verdict
from mismatch.errors import MismatchError

if TYPE_CHECKING:
    from mismatch.specs import CheckSpec

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
    "grouped_queries",  # query heads read their own group's keys
    "scaling",  # the given scale is used
    "forward",  # output against float64
    "gradient",  # gradients of q, k, v against float64 autograd and finite differences
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
    """The result of one check.

    >>> Finding("sinks", "failed", "the sinks change nothing", 1.0, 0.01).outcome
    'failed'

    Attributes:
        column: of :data:`ATTENTION_COLUMNS` or :data:`EXPERT_COLUMNS`.
        detail: one sentence; the reason, where it was not tested.
        value: the measured number, mostly a relative error; None where there is none.
        limit: of that number.
        critical: whether a failure makes the kernel wrong; otherwise it is only reported (e.g.
            other bits in another batch).
    """

    column: str
    outcome: Outcome
    detail: str
    value: float | None = None
    limit: float | None = None
    critical: bool = True


@dataclass(frozen=True, slots=True)
class Error:
    """Relative errors against float64 in one dtype, ``|x - truth| / |truth|`` in the 2-norm.

    Attributes:
        dtype: "fp64", "fp32", "bf16", "fp16".
        forward: of the output.
        gradients: name ("q", "k", "v", "sinks"; "hidden", "router", "gate_up", "down") -> error;
            1.0: no gradient arrives.
        floor: error of a plain implementation in the same dtype: rounding alone.
    """

    dtype: str
    forward: float | None
    gradients: dict[str, float] = field(default_factory=dict)
    floor: float | None = None


@dataclass(frozen=True, slots=True)
class Audit:
    """The audit of one implementation.

    Attributes:
        name: as in ``--attention NAME``, ``--experts-implementation NAME`` or
            ``--kernel package.module:function``.
        verdict: "unusable": it cannot run here, or the model refuses it; see ``reason``. One that
            the model refuses may still have findings, measured without the model.
        usable: a training run could use it here for this model.
        chosen: whether ``auto`` resolves to it.
        crashed: it took its process with it, or had no end.
    """

    GONE = frozenset({"costs", "harm"})  # see mismatch/codec.py

    name: str
    kind: Kind
    origin: Origin
    verdict: Verdict
    reason: str
    usable: bool
    chosen: bool = False
    findings: tuple[Finding, ...] = ()
    errors: tuple[Error, ...] = ()
    seconds: float = 0.0
    crashed: bool = False

    def finding(self, column: str) -> Finding | None:
        """The finding of one column, or None where there is none."""
        return next((finding for finding in self.findings if finding.column == column), None)

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The critical failures."""
        return tuple(f for f in self.findings if f.outcome == "failed" and f.critical)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """All implementations for one model on one machine.

    Attributes:
        geometry: sizes of the model: heads, kv_heads, head_dim, window,
            sinks, scaling, layers; experts, top_k, hidden, intermediate.
        facts: versions, device, threads, seed, seconds.
        not_tested: one sentence each.
    """

    model: str
    device: str
    geometry: dict[str, Any]
    audits: tuple[Audit, ...]
    facts: dict[str, Any]
    not_tested: tuple[str, ...] = ()

    @property
    def wrong(self) -> tuple[Audit, ...]:
        """Usable implementations that are wrong: they decide the exit code."""
        return tuple(audit for audit in self.audits if audit.usable and audit.verdict == "wrong")


SCHEMA = "mismatch.kernels/1"
FILE = "kernels.json"
COMMAND, PAGE = "mismatch kernels", "docs/kernels.md"


def schema() -> dict[str, Any]:
    """The JSON Schema of the document."""
    definitions: dict[str, Any] = {}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA}
    return {**head, **kernels_schema(definitions), "$defs": definitions}


def kernels_schema(definitions: dict[str, Any]) -> dict[str, Any]:
    """The same as a part of another schema."""
    return with_verdict(AuditReport, SCHEMA, status_schema(("sound", "wrong")), definitions)


def kernels_to_json(report: AuditReport) -> dict[str, Any]:
    """The audit as JSON data; numbers are finite or null.

    Raises:
        MismatchError: nothing was audited.
    """
    verdict = judge(report)
    head = {"status": verdict.status, "reason": verdict.reason}
    return {"schema": SCHEMA, "verdict": head, **to_json(report)}


def kernels_from_json(document: Any) -> AuditReport:
    """The inverse of :func:`kernels_to_json`; raises as :func:`mismatch.codec.without_verdict`."""
    return without_verdict(AuditReport, document, SCHEMA, command=COMMAND, page=PAGE)


def of_run(run_dir: Path, spec: CheckSpec) -> AuditReport | None:
    """The audit that ``mismatch kernels --run`` left in a run directory; None where there is none.

    Raises:
        MismatchError: it is damaged.
    """
    from mismatch.run import store

    if not (run_dir / FILE).exists():
        return None
    return kernels_from_json(store.load_document(run_dir, FILE))


class _Kernels(Analysis[AuditReport]):
    """The document of ``mismatch kernels``, its schema's name and verdict with it."""

    def write(self, result: AuditReport) -> dict[str, Any]:
        return {self.id: kernels_to_json(result)}

    def read(self, document: dict[str, Any]) -> AuditReport | None:
        entry = document.get(self.id)
        return None if entry is None else kernels_from_json(entry)

    def schema(self, definitions: dict[str, Any]) -> dict[str, Any]:
        return {self.id: kernels_schema(definitions)}


ANALYSES = (
    _Kernels(
        "kernels",
        AuditReport,
        section="mismatch.features.kernels.section:section",
        order=7,
        from_run=of_run,
        chapter="why",
    ),
)


SHORT = {
    "forward": "output",
    "grouped_queries": "grouped queries",
    "sink_gradient": "sinks' gradient",
    "router_gradient": "router's gradient",
}
# A kernel that ignores a feature has another output too, and another gradient.
CONSEQUENCES = ("forward", "gradient", "sink_gradient")


@dataclass(frozen=True, slots=True)
class KernelVerdict:
    """The last line.

    >>> KernelVerdict("sound", "2 of 2 are right", 0).code
    0

    Attributes:
        code: of the command: 0 or 1.
    """

    status: Literal["sound", "wrong"]
    reason: str
    code: int

    @property
    def line(self) -> str:
        """As it is printed."""
        return f"verdict: {self.status} – {self.reason}"


def judge(report: AuditReport) -> KernelVerdict:
    """Wrong as soon as a run could use one that is wrong, or one of the user's own did not pass.

    Raises:
        MismatchError: no implementation was run at all.
    """
    ran = [audit for audit in report.audits if was_run(audit)]
    if not ran:
        reasons = "; ".join(f"{audit.name}: {audit.reason}" for audit in report.audits[:4])
        reasons = f" ({reasons})" if reasons else ""
        raise MismatchError(
            f"no implementation was audited for {report.model}{reasons}",
            "drop --only and --name, or name one that runs here: eager",
        )
    bad = blamed(report)
    if not bad:
        sound = [audit for audit in ran if audit.verdict == "sound"]
        if not sound:
            reason = f"none of the {len(ran)} that ran can be used here for this model"
            return KernelVerdict("wrong", reason, 1)
        return KernelVerdict("sound", f"{_named(sound)}: nothing wrong{_refused(ran)}", 0)
    named = "; ".join(f"{audit.name}: {why(audit)}" for audit in bad[:3])
    more = f"; and {len(bad) - 3} more" if len(bad) > 3 else ""
    return KernelVerdict("wrong", named + more, 1)


def _named(sound: Sequence[Audit]) -> str:
    """Names by kind: both have an ``eager``."""
    kinds = dict.fromkeys(audit.kind for audit in sound)
    names = {kind: ", ".join(a.name for a in sound if a.kind == kind) for kind in kinds}
    if len(names) == 1:
        return next(iter(names.values()))
    return "; ".join(f"{kind} {named}" for kind, named in names.items())


def _refused(ran: Sequence[Audit]) -> str:
    """Those that are wrong and decide nothing, since no run could use them."""
    names = [a.name for a in ran if not a.usable and a.failed and answered(a)]
    return f" ({', '.join(names)}: wrong, but not usable here)" if names else ""


def causes_of(failed: Sequence[Finding]) -> list[Finding]:
    """The failures that are no consequence of another one."""
    causes = [finding for finding in failed if finding.column not in CONSEQUENCES]
    return causes or list(failed)


def blamed(report: AuditReport) -> list[Audit]:
    """Audits that make the verdict wrong: usable and wrong, or the user's own and not sound."""
    yours = [a for a in report.audits if a.origin == "yours" and a.verdict != "sound"]
    return [audit for audit in report.audits if audit in report.wrong or audit in yours]


def was_run(audit: Audit) -> bool:
    """Whether it was run: it has findings, its process ended, or it is the user's own."""
    return answered(audit) or audit.crashed or audit.origin == "yours"


def answered(audit: Audit) -> bool:
    """Whether any check beside "accepts" was run."""
    return any(f.outcome != "not_tested" for f in audit.findings if f.column != "accepts")


def why(audit: Audit) -> str:
    """The first two failed checks, or the reason."""
    if audit.failed:
        named = ", ".join(SHORT.get(f.column, f.column) for f in audit.failed[:2])
        more = len(audit.failed) - 2
        return f"{named} and {more} more" if more > 0 else named
    return audit.reason
