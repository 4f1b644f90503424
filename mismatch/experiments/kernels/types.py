"""What an audit of kernels finds; plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["attention", "experts"]
Origin = Literal["ours", "transformers", "yours"]
Outcome = Literal["passed", "failed", "not_tested"]
Verdict = Literal["sound", "wrong", "unusable"]

# What is asked of each implementation, in the order of the table.
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
    """One answer.

    >>> Finding("sinks", "failed", "the sinks change nothing", 1.0, 0.01).outcome
    'failed'

    Attributes:
        column: of :data:`ATTENTION_COLUMNS` or :data:`EXPERT_COLUMNS`.
        detail: one sentence; why, where it was not tested.
        value: the number that decided, mostly a relative error; None where there is none.
        limit: what it was held against.
        critical: a failure makes the kernel wrong; otherwise it is only told (other bits in another
            batch, say).
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
            1.0: no gradient arrives at all.
        floor: what the dtype's rounding alone gives: a plain float64-free implementation with the
            same roundings of inputs and output.
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
    """What the kernel does to the model as a whole, against the float32 reference.

    Attributes:
        tokens: action tokens it was measured on.
        mean_abs_delta: mean |logprob - reference|, nats.
        k3_kl: nats, KL(reference ‖ kernel) as k3.
        gradient_error: relative error of the gradient of the mean logprob.
        gradient_cosine: of that gradient to the reference's.
        sink_gradient_error: relative error of the sinks' part; None without sinks.
        baseline: the same numbers of the kernel that the trainer would take by itself; None for
            that kernel.
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
    """Everything about one implementation.

    Attributes:
        name: as one asks for it: ``--attention NAME``, ``--experts-implementation NAME`` or
            ``--kernel package.module:function``.
        verdict: "unusable": it cannot run here, or the model refuses it; ``reason`` says why. One
            that the model refuses may still have been measured by itself: its findings are there.
        usable: a training run could be using it here for this model.
        chosen: what ``auto`` resolves to.
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
        """The answer of one column, or None where it was not asked."""
        return next((one for one in self.findings if one.column == column), None)

    @property
    def failed(self) -> tuple[Finding, ...]:
        """What it gets wrong."""
        return tuple(one for one in self.findings if one.outcome == "failed" and one.critical)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """All implementations for one model on one machine.

    Attributes:
        geometry: what the synthetic inputs take from the model: heads, kv_heads, head_dim, window,
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
        """Implementations that a run could use and must not: they decide the exit code."""
        return tuple(one for one in self.audits if one.usable and one.verdict == "wrong")
