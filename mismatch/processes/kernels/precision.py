"""Errors of output and gradients against float64, by dtype, and against finite differences."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mismatch.experiments.kernels.types import Error, Finding, Outcome
from mismatch.processes.kernels import reference as truth
from mismatch.processes.kernels.cases import DTYPES, Inputs, Scene, allowed, full, inputs_of
from mismatch.processes.kernels.checks import line, percent
from mismatch.processes.kernels.geometry import ModelGeometry
from mismatch.processes.kernels.reference import DIFFERENCES, STEPS, limit_of
from mismatch.processes.kernels.runner import Runner

SINKS = "sinks"


@dataclass
class Measured:
    """Errors in one dtype, the maximum over the cases.

    Attributes:
        off, floors: "out", "q", "k", "v", "sinks" -> relative error of the kernel, of rounding.
        differences: "q", "k", "v", "sinks" -> relative difference of the kernel's gradient from
            finite differences of its own output.
        missing: inputs that get no gradient.
        raised: error of its backward pass, one line.
    """

    dtype: str
    off: dict[str, float] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    differences: dict[str, float] = field(default_factory=dict)
    raised: str = ""

    def limit(self, name: str) -> float:
        return limit_of(self.floors[name])

    def add(self, name: str, off: float, floor: float) -> None:
        self.off[name] = max(off, self.off.get(name, 0.0))
        self.floors[name] = max(floor, self.floors.get(name, 0.0))

    @property
    def error(self) -> Error:
        """For the report, without infinite values."""
        finite = {name: x for name, x in self.off.items() if x < float("inf")}
        gradients = {name: x for name, x in finite.items() if name != "out"}
        return Error(self.dtype, finite.get("out"), gradients, self.floors.get("out"))


def measure(runner: Runner, geometry: ModelGeometry, device: str, name: str, seed: int) -> Measured:
    """Run all scenes of the model forward and backward in one dtype.

    Raises:
        Exception: whatever the kernel's forward pass raises.
    """
    dtype, errors = DTYPES[name], Measured(name)
    for scene in full(geometry):
        inputs = inputs_of(geometry, scene, device, dtype, seed)
        _forward_and_backward(runner, scene, inputs, errors, device, seed)
    if dtype in STEPS and not errors.raised:
        scene = full(geometry)[0]
        _differences(runner, scene, inputs_of(geometry, scene, device, dtype, seed), errors, seed)
    return errors


def _forward_and_backward(
    runner: Runner, scene: Scene, inputs: Inputs, errors: Measured, device: str, seed: int
) -> None:
    mask = allowed(scene, device)
    numbers = truth.exact(inputs)
    right = truth.attention(numbers, mask, scene.scaling)
    leaves, plain_leaves = leaves_of(inputs), leaves_of(inputs)
    out = runner(scene, leaves)
    plain = truth.rounded(plain_leaves, mask, scene.scaling)
    errors.add("out", truth.relative_error(out, right), truth.relative_error(plain, right))
    weights = weights_of(right, seed)
    expected, floors = gradients(right, numbers, weights), gradients(plain, plain_leaves, weights)
    try:
        own = gradients(out, leaves, weights)
    except Exception as error:  # no backward pass, none in this dtype, no gradient at all …
        errors.raised = errors.raised or line(error)
        return
    for name, exact in expected.items():
        assert exact is not None
        if own[name] is None:
            errors.missing.add(name)
        floor = truth.relative_error(floors[name], exact)
        errors.add(name, truth.relative_error(own[name], exact), floor)


def leaves_of(inputs: Inputs) -> Inputs:
    return Inputs(*(None if x is None else x.detach().clone().requires_grad_() for x in inputs))  # type: ignore[arg-type]


def weights_of(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Random weights around 1 that reduce the output to one number without cancellation."""
    draw = torch.Generator().manual_seed(seed + 1)
    return (1.0 + torch.randn(like.shape, generator=draw, dtype=torch.float64)).to(like.device)


def gradients(
    out: torch.Tensor, inputs: Inputs, weights: torch.Tensor
) -> dict[str, torch.Tensor | None]:
    named = inputs.named
    grads = torch.autograd.grad(out, list(named.values()), weights.to(out.dtype), allow_unused=True)
    return dict(zip(named, grads, strict=True))


def _differences(runner: Runner, scene: Scene, inputs: Inputs, errors: Measured, seed: int) -> None:
    """Directional derivatives of the kernel itself: of q, k and v together, and of the sinks."""
    leaves = leaves_of(inputs)
    out = runner(scene, leaves)
    weights = weights_of(out, seed)
    grads = gradients(out, leaves, weights)
    draw = torch.Generator().manual_seed(seed + 2)
    directions = {
        name: torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x)
        for name, x in inputs.named.items()
    }
    step = STEPS[inputs.query.dtype]
    for name, along in directions.items():
        with torch.no_grad():
            ahead, behind = (
                runner(scene, _shifted(inputs, name, sign * step * along)).double()
                for sign in (1, -1)
            )
        slope = float(((ahead - behind) * weights).sum()) / (2 * step)
        grad = grads[name]
        predicted = 0.0 if grad is None else float((grad.double() * along.double()).sum())
        # A random direction may be nearly flat; the gradient's norm is its usual slope.
        usual = 0.0 if grad is None else float(grad.double().norm())
        size = max(abs(slope), abs(predicted), usual)
        errors.differences[name] = abs(slope - predicted) / size if size else 0.0


def _shifted(inputs: Inputs, name: str, by: torch.Tensor) -> Inputs:
    named = inputs.named
    named[name] = named[name] + by
    return Inputs(named["q"], named["k"], named["v"], named.get(SINKS))


def forward_finding(measured: list[Measured]) -> Finding:
    """The dtype that is furthest beyond its limit, or nearest to it."""
    worst = max(measured, key=lambda errors: errors.off["out"] / errors.limit("out"))
    off, limit = worst.off["out"], worst.limit("out")
    floor = percent(worst.floors["out"])
    detail = f"output off by {percent(off)} in {worst.dtype}; rounding alone: {floor}"
    return Finding("forward", _outcome(off <= limit), detail, _finite(off), limit)


def gradient_finding(measured: list[Measured]) -> Finding:
    """Of q, k and v."""
    return _backward(measured, "gradient", ("q", "k", "v"))


def sink_gradient_finding(measured: list[Measured], sinks: bool) -> Finding:
    """Of the sinks."""
    if not sinks:
        return Finding("sink_gradient", "not_tested", "the model has no attention sinks")
    return _backward(measured, "sink_gradient", (SINKS,))


def _backward(measured: list[Measured], column: str, names: tuple[str, ...]) -> Finding:
    for errors in measured:
        if errors.raised:
            detail = f"its backward pass does not run in {errors.dtype}: {errors.raised}"
            return Finding(column, "failed", detail)
    pairs = [(errors, name) for errors in measured for name in names]
    worst, name = max(pairs, key=lambda pair: pair[0].off[pair[1]] / pair[0].limit(pair[1]))
    off, limit = worst.off[name], worst.limit(name)
    detail = f"gradient of {name} off by {percent(off)} in {worst.dtype}"
    if name in worst.missing:
        detail = f"no gradient arrives at {name}"
    elif off == 1.0:
        detail = f"the gradient of {name} is 0 everywhere"
    unlike = _unlike_differences(measured, column, names)
    if off <= limit and unlike is None:
        detail = f"{detail}; rounding alone: {percent(worst.floors[name])}"
        return Finding(column, "passed", detail, off, limit)
    if off <= limit:
        assert unlike is not None
        return unlike
    return Finding(column, "failed", detail + _own(worst, name), _finite(off), limit)


def _unlike_differences(
    measured: list[Measured], column: str, names: tuple[str, ...]
) -> Finding | None:
    """Failed, where a gradient is not that of the kernel's own output."""
    for errors in measured:
        limit = DIFFERENCES.get(DTYPES[errors.dtype], float("inf"))
        for name in names:
            gap = errors.differences.get(name)
            if gap is not None and not gap <= limit:
                where = f"of its own output in {errors.dtype}"
                detail = f"gradient of {name} off by {percent(gap)} from finite differences {where}"
                return Finding(column, "failed", detail, _finite(gap), limit)
    return None


def _own(errors: Measured, name: str) -> str:
    """Whether the fault is in the backward pass or before it."""
    gap = errors.differences.get(name)
    if gap is None:
        return ""
    if gap <= DIFFERENCES[DTYPES[errors.dtype]]:
        return "; it is the gradient of its own output, which is wrong itself"
    return f"; and off by {percent(gap)} from finite differences of its own output"


def _outcome(passed: bool) -> Outcome:
    return "passed" if passed else "failed"


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
