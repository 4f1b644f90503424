"""Experts implementations against float64: output, gradients, the same bits, time and memory.

The module is the model family's own with random weights, reduced in size; the router before it has
fixed choices and weights that are differentiated. The truth runs every expert on every token. Costs
are taken at the model's own sizes, where they fit.
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
from mismatch.processes.kernels.expert_costs import costs
from mismatch.processes.kernels.geometry import ModelGeometry, Options
from mismatch.processes.kernels.limits import limit_of
from mismatch.processes.kernels.reference import relative_error
from mismatch.training.user_kernels import is_user_kernel, register_experts

TOKENS = 61
ROUTER = "router"


@dataclass
class Measured:
    """One dtype.

    Attributes:
        off, floors: "out", "hidden", "router", "gate_up", … -> relative error of the
            implementation, of a plain one in the same dtype.
        raised: what its backward pass raised.
        repeats: largest relative difference between two runs on the same inputs.
        batches: of tokens' outputs, alone and with others beside them.
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
    """Everything about one experts implementation.

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
    except MismatchError as error:  # nothing that could be measured
        reason = refused or error.message
        return Audit(name, "experts", origin, "unusable", reason, usable=False)
    seconds = time.monotonic() - start
    if not measured:
        accepts = Finding("accepts", "failed", fault)
        absent = (Finding(c, "not_tested", "it does not run") for c in EXPERT_COLUMNS[1:])
        found = (accepts, *absent)
        return Audit(
            name, "experts", origin, "unusable", fault, False, findings=found, seconds=seconds
        )
    findings = tuple(_findings(measured, refused, fault))
    taken = tuple(costs(geometry, options, registered, sizes))
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
        errors=tuple(one.error for one in measured),
        costs=taken,
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
    """What a trainer gets that names none."""
    return str(geometry.bare.get_correct_experts_implementation(None))


def _verdict(findings: tuple[Finding, ...], refused: str) -> tuple[str, str]:
    failed = [one for one in findings if one.outcome == "failed" and one.critical]
    wrong = [one for one in failed if one.column != "accepts"]
    if wrong:
        return "wrong", wrong[0].detail
    if refused:
        return "unusable", refused
    told = [one.detail for one in findings if one.outcome == "failed"]
    return "sound", "; ".join(told) or "nothing wrong"


# ---------------------------------------------------------------- numbers


def _all_dtypes(
    geometry: ModelGeometry, options: Options, registered: str, sizes: layer.Sizes
) -> tuple[list[Measured], str]:
    """Of every dtype that it takes, and why it takes no others."""
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
    dtype, found = DTYPES[name], Measured(name)
    module = layer.build(geometry, sizes, options.device, dtype, options.seed)
    inputs = layer.given(sizes, TOKENS, options.device, dtype, options.seed)
    exact = layer.build(geometry, sizes, options.device, dtype, options.seed).double()
    right, wanted = _right(exact, _exact(inputs))
    plain, floors = _right(module, inputs)
    out, got, found.raised = layer.ran(module, registered, inputs)
    found.off["out"] = relative_error(out, right)
    found.floors["out"] = relative_error(plain, right)
    for key, gradient in wanted.items():
        assert gradient is not None
        found.floors[key] = relative_error(floors[key], gradient)
        found.off[key] = relative_error(got.get(key), gradient)
        if got.get(key) is None:
            found.missing.add(key)
    for _ in range(options.repeats - 1):
        again, gradients, _ = layer.ran(module, registered, inputs)
        gaps = [_apart(again, out), *(_apart(gradients.get(k), x) for k, x in got.items())]
        found.repeats = max(found.repeats, *gaps)
    found.batches = _batches(module, registered, inputs, out)
    return found


def _exact(inputs: layer.Given) -> layer.Given:
    return inputs._replace(hidden=inputs.hidden.double(), router=inputs.router.double())


def _right(module: Any, inputs: layer.Given) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    inputs = layer.fresh(inputs)
    out = layer.definition(module, inputs)
    return out.detach(), layer.gradients(module, inputs, out)


def _batches(module: Any, registered: str, inputs: layer.Given, together: torch.Tensor) -> float:
    """The first tokens by themselves."""
    few = TOKENS // 3
    alone = inputs._replace(hidden=inputs.hidden[:few], ids=inputs.ids[:few])
    with torch.no_grad():
        return _apart(layer.run(module, registered, alone), together[:few])


def _apart(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """0 for the same bits; otherwise the relative difference, never 0."""
    if one is None or other is None:
        return 0.0 if one is other else 1.0
    if torch.equal(one, other):
        return 0.0
    return max(relative_error(one, other.double()), torch.finfo(torch.float64).tiny)


# ---------------------------------------------------------------- findings


def _findings(measured: list[Measured], refused: str, fault: str) -> Iterator[Finding]:
    if refused:
        yield Finding("accepts", "failed", refused)
    else:
        runs = f"runs in {', '.join(one.dtype for one in measured)}"
        yield Finding("accepts", "passed", f"{runs}; {fault}" if fault else runs)
    worst = max(measured, key=lambda one: one.badness("out"))
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
    for one in measured:
        if one.raised:
            detail = f"its backward pass does not run in {one.dtype}: {one.raised}"
            return Finding(column, "failed", detail)
    pairs = [(one, name) for one in measured for name in names]
    worst, name = max(pairs, key=lambda pair: pair[0].badness(pair[1]))
    return _compared(column, worst, name, f"gradient of {name}")


def _same(column: str, measured: list[Measured], what: str) -> Finding:
    """Other bits are told; beyond rounding they make the implementation wrong."""
    worst = max(measured, key=lambda one: getattr(one, column) / one.limit("out"))
    gap, limit = float(getattr(worst, column)), worst.limit("out")
    if gap == 0:
        return Finding(column, "passed", f"{what}: the same bits", 0.0, 0.0)
    detail = f"{what}: results differ by {percent(gap)} in {worst.dtype}"
    return Finding(column, "failed", detail, gap, limit, critical=not gap <= limit)
