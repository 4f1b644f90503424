"""Experts implementations against float64: output, gradients, determinism, time and memory.

The module is the model family's own with random weights, reduced in size; the router before it has
fixed choices and differentiable weights. The reference runs every expert on every token. Costs are
measured at the model's own sizes, where they fit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from mismatch.errors import MismatchError
from mismatch.experiments.kernels.types import EXPERT_COLUMNS, Audit, Error, Finding, Origin
from mismatch.processes.kernels import expert_layer as layer
from mismatch.processes.kernels.cases import DTYPES
from mismatch.processes.kernels.checks import line, percent
from mismatch.processes.kernels.costs import expert_costs
from mismatch.processes.kernels.geometry import ModelGeometry, Options
from mismatch.processes.kernels.reference import limit_of, relative_error
from mismatch.training.user_kernels import is_user_kernel, register_experts

TOKENS = 61
ROUTER = "router"


@dataclass
class Measured:
    """Errors in one dtype.

    Attributes:
        off, floors: "out", "hidden", "router", "gate_up", … -> relative error of the
            implementation, of a plain one in the same dtype.
        raised: error of its backward pass, one line.
        repeats: largest relative difference between two runs on the same inputs.
        batches: likewise of tokens alone and in a larger batch.
    """

    dtype: str
    off: dict[str, float] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    raised: str = ""
    repeats: float = 0.0
    batches: float = 0.0

    def limit(self, name: str) -> float:
        """No floor is below one rounding, and in float64 sums may go in any order."""
        least = torch.finfo(DTYPES[self.dtype]).eps
        return limit_of(max(self.floors[name], 1e-11 if self.dtype == "fp64" else least))

    def badness(self, name: str) -> float:
        return self.off[name] / self.limit(name)

    @property
    def error(self) -> Error:
        finite = {name: x for name, x in self.off.items() if x < float("inf")}
        gradients = {name: x for name, x in finite.items() if name != "out"}
        return Error(self.dtype, finite.get("out"), gradients, self.floors.get("out"))


def audit_experts(geometry: ModelGeometry, options: Options, name: str) -> Audit:
    """Audit one experts implementation.

    Args:
        name: "eager", "grouped_mm", "batched_mm", "bounded", or ``package.module:function``.

    Raises:
        MismatchError: a user's function that is not there.
    """
    start = time.monotonic()
    origin: Origin = "transformers"
    if is_user_kernel(name):
        origin = "yours"
    elif name == "bounded":
        origin = "ours"
    registered = register_experts(name) if origin == "yours" else name
    refused = _refused(geometry, name, origin)
    try:
        sizes = layer.sizes_of(geometry)
        measured, fault = _all_dtypes(geometry, options, registered, sizes.reduced())
    except MismatchError as error:  # nothing can be measured
        reason = refused or error.message
        return Audit(name, "experts", origin, "unusable", reason, usable=False)
    seconds = time.monotonic() - start
    if not measured:
        accepts = Finding("accepts", "failed", fault)
        absent = (Finding(c, "not_tested", "it does not run") for c in EXPERT_COLUMNS[1:])
        findings = (accepts, *absent)
        return Audit(
            name, "experts", origin, "unusable", fault, False, findings=findings, seconds=seconds
        )
    findings = tuple(_findings(measured, refused, fault))
    spent = tuple(expert_costs(geometry, options, registered, sizes))
    verdict, reason = _verdict(findings, refused)
    return Audit(
        name=name,
        kind="experts",
        origin=origin,
        verdict=verdict,  # type: ignore[arg-type]
        reason=reason,
        usable=not refused,
        chosen=not refused and name == _chosen(geometry),
        findings=findings,
        errors=tuple(errors.error for errors in measured),
        costs=spent,
        seconds=time.monotonic() - start,
    )


def _refused(geometry: ModelGeometry, name: str, origin: Origin) -> str:
    """Why the model would not take it; "" where it does."""
    from mismatch.training.experts import implementations_for, register

    register()
    possible = implementations_for(geometry.bare)
    if origin != "yours" and name not in possible:
        return f"{geometry.model_type} takes {', '.join(possible) or 'none'}"
    if origin == "yours" and len(possible) < 2:
        return f"the experts of {geometry.model_type} are behind no interface of transformers"
    if origin == "yours":
        return ""
    try:
        geometry.bare.get_correct_experts_implementation(name)
    except (ValueError, ImportError) as error:
        return line(error)
    return ""


def _chosen(geometry: ModelGeometry) -> str:
    """The implementation that a trainer gets by default."""
    return str(geometry.bare.get_correct_experts_implementation(None))


def _verdict(findings: tuple[Finding, ...], refused: str) -> tuple[str, str]:
    failed = [f for f in findings if f.outcome == "failed" and f.critical]
    wrong = [f for f in failed if f.column != "accepts"]
    if wrong:
        return "wrong", wrong[0].detail
    if refused:
        return "unusable", refused
    remarks = [finding.detail for finding in findings if finding.outcome == "failed"]
    return "sound", "; ".join(remarks) or "nothing wrong"


def _all_dtypes(
    geometry: ModelGeometry, options: Options, registered: str, sizes: layer.Sizes
) -> tuple[list[Measured], str]:
    """Errors by dtype, and why another dtype does not run."""
    measured, fault = [], ""
    for name in options.dtypes:
        try:
            measured.append(_measure(geometry, options, registered, sizes, name))
        except MismatchError:
            raise
        except Exception as error:  # an implementation may raise anything
            fault = f"does not run in {name}: {line(error)}"
    return measured, fault


def _measure(
    geometry: ModelGeometry, options: Options, registered: str, sizes: layer.Sizes, name: str
) -> Measured:
    dtype, errors = DTYPES[name], Measured(name)
    module = layer.build(geometry, sizes, options.device, dtype, options.seed)
    inputs = layer.random_inputs(sizes, TOKENS, options.device, dtype, options.seed)
    exact = layer.build(geometry, sizes, options.device, dtype, options.seed).double()
    right, expected = _reference(exact, _exact(inputs))
    plain, floors = _reference(module, inputs)
    out, own, errors.raised = layer.run_backward(module, registered, inputs)
    errors.off["out"] = relative_error(out, right)
    errors.floors["out"] = relative_error(plain, right)
    for key, gradient in expected.items():
        assert gradient is not None
        errors.floors[key] = relative_error(floors[key], gradient)
        errors.off[key] = relative_error(own.get(key), gradient)
        if own.get(key) is None:
            errors.missing.add(key)
    for _ in range(options.repeats - 1):
        again, gradients, _ = layer.run_backward(module, registered, inputs)
        gaps = [
            _difference(again, out),
            *(_difference(gradients.get(k), x) for k, x in own.items()),
        ]
        errors.repeats = max(errors.repeats, *gaps)
    errors.batches = _batches(module, registered, inputs, out)
    return errors


def _exact(inputs: layer.ExpertInputs) -> layer.ExpertInputs:
    return inputs._replace(hidden=inputs.hidden.double(), router=inputs.router.double())


def _reference(
    module: Any, inputs: layer.ExpertInputs
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    inputs = layer.leaf_copies(inputs)
    out = layer.definition(module, inputs)
    return out.detach(), layer.gradients(module, inputs, out)


def _batches(
    module: Any, registered: str, inputs: layer.ExpertInputs, together: torch.Tensor
) -> float:
    """The first tokens by themselves."""
    few = TOKENS // 3
    alone = inputs._replace(hidden=inputs.hidden[:few], ids=inputs.ids[:few])
    with torch.no_grad():
        return _difference(layer.run(module, registered, alone), together[:few])


def _difference(left: torch.Tensor | None, right: torch.Tensor | None) -> float:
    """0 for the same bits; otherwise the relative difference, never 0."""
    if left is None or right is None:
        return 0.0 if left is right else 1.0
    if torch.equal(left, right):
        return 0.0
    return max(relative_error(left, right.double()), torch.finfo(torch.float64).tiny)


def _findings(measured: list[Measured], refused: str, fault: str) -> Iterator[Finding]:
    if refused:
        yield Finding("accepts", "failed", refused)
    else:
        runs = f"runs in {', '.join(errors.dtype for errors in measured)}"
        yield Finding("accepts", "passed", f"{runs}; {fault}" if fault else runs)
    worst = max(measured, key=lambda errors: errors.badness("out"))
    yield _compared("forward", worst, "out", "output")
    names = [name for name in measured[0].off if name not in ("out", ROUTER)]
    yield _backward("gradient", measured, names)
    yield _backward("router_gradient", measured, [ROUTER])
    yield _same("repeats", measured, "twice the same inputs")
    yield _same("batches", measured, "the same tokens with others beside them")


def _compared(column: str, worst: Measured, name: str, what: str) -> Finding:
    off, limit = worst.off[name], worst.limit(name)
    detail = f"{what} off by {percent(off)} in {worst.dtype}; "
    detail += f"rounding alone: {percent(worst.floors[name])}"
    if name in worst.missing:
        detail = f"no gradient arrives at {name}"
    value = off if off < float("inf") else None
    return Finding(column, "passed" if off <= limit else "failed", detail, value, limit)


def _backward(column: str, measured: list[Measured], names: list[str]) -> Finding:
    for errors in measured:
        if errors.raised:
            detail = f"its backward pass does not run in {errors.dtype}: {errors.raised}"
            return Finding(column, "failed", detail)
    pairs = [(errors, name) for errors in measured for name in names]
    worst, name = max(pairs, key=lambda pair: pair[0].badness(pair[1]))
    return _compared(column, worst, name, f"gradient of {name}")


def _same(column: str, measured: list[Measured], what: str) -> Finding:
    """A difference is reported; beyond rounding it makes the implementation wrong."""
    worst = max(measured, key=lambda errors: getattr(errors, column) / errors.limit("out"))
    gap, limit = float(getattr(worst, column)), worst.limit("out")
    if gap == 0:
        return Finding(column, "passed", f"{what}: the same bits", 0.0, 0.0)
    detail = f"{what}: results differ by {percent(gap)} in {worst.dtype}"
    return Finding(column, "failed", detail, gap, limit, critical=not gap <= limit)
