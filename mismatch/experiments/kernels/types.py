"""Results of a kernel audit; plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

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
class Cost:
    """Time and memory of one forward and backward pass of one layer.

    Attributes:
        tokens: length of the one sequence.
        seconds: median over repeats; None where it did not run.
        peak_bytes: most memory beyond inputs and their gradients; None where it did not run.
        note: why it did not run.
    """

    tokens: int
    seconds: float | None
    peak_bytes: int | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Harm:
    """The impact of a kernel on the whole model, against the float32 reference.

    Attributes:
        tokens: action tokens it was measured on.
        mean_abs_delta: mean |logprob - reference|, nats.
        k3_kl: nats, KL(reference ‖ kernel) as k3.
        gradient_error: relative error of the gradient of the mean logprob.
        gradient_cosine: of that gradient to the reference's.
        sink_gradient_error: relative error of the sinks' part; None without sinks.
        baseline: the same numbers of the trainer's default kernel; None for that kernel.
    """

    tokens: int
    mean_abs_delta: float
    k3_kl: float
    gradient_error: float | None
    gradient_cosine: float | None
    sink_gradient_error: float | None
    baseline: Harm | None = None


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
    """

    name: str
    kind: Kind
    origin: Origin
    verdict: Verdict
    reason: str
    usable: bool
    chosen: bool = False
    findings: tuple[Finding, ...] = ()
    errors: tuple[Error, ...] = ()
    costs: tuple[Cost, ...] = ()
    harm: Harm | None = None
    seconds: float = 0.0

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
