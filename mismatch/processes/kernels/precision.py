"""Output and gradients against float64, dtype by dtype, and gradients against differences."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mismatch.experiments.kernels.types import Error, Finding, Outcome
from mismatch.processes.kernels import reference as truth
from mismatch.processes.kernels.cases import DTYPES, Inputs, Scene, allowed, full, inputs_of
from mismatch.processes.kernels.checks import line, percent
from mismatch.processes.kernels.geometry import ModelGeometry
from mismatch.processes.kernels.limits import DIFFERENCES, STEPS, limit_of
from mismatch.processes.kernels.runner import Runner

SINKS = "sinks"


@dataclass
class Measured:
    """One dtype; errors and floors are the worst over the scenes.

    Attributes:
        off, floors: "out", "q", "k", "v", "sinks" -> relative error of the kernel, of rounding.
        differences: "q", "k", "v", "sinks" -> how far the kernel's gradient is from the differences
            of its own output, relative.
        raised: what its backward pass raised.
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
        """Without what is infinite, which no report can hold."""
        finite = {name: x for name, x in self.off.items() if x < float("inf")}
        gradients = {name: x for name, x in finite.items() if name != "out"}
        return Error(self.dtype, finite.get("out"), gradients, self.floors.get("out"))


def measure(runner: Runner, geometry: ModelGeometry, device: str, name: str, seed: int) -> Measured:
    """Run all scenes of the model forward and backward in one dtype.

    Raises:
        Exception: whatever the kernel's forward pass raises.
    """
    dtype, found = DTYPES[name], Measured(name)
    for scene in full(geometry):
        inputs = inputs_of(geometry, scene, device, dtype, seed)
        _forward_and_backward(runner, scene, inputs, found, device, seed)
    if dtype in STEPS and not found.raised:
        scene = full(geometry)[0]
        _differences(runner, scene, inputs_of(geometry, scene, device, dtype, seed), found, seed)
    return found


def _forward_and_backward(
    runner: Runner, scene: Scene, inputs: Inputs, found: Measured, device: str, seed: int
) -> None:
    looks = allowed(scene, device)
    numbers = truth.exact(inputs)
    right = truth.attention(numbers, looks, scene.scaling)
    leaves, plain_leaves = leaves_of(inputs), leaves_of(inputs)
    out = runner(scene, leaves)
    plain = truth.rounded(plain_leaves, looks, scene.scaling)
    found.add("out", truth.relative_error(out, right), truth.relative_error(plain, right))
    weights = weights_of(right, seed)
    wanted, floors = gradients(right, numbers, weights), gradients(plain, plain_leaves, weights)
    try:
        got = gradients(out, leaves, weights)
    except Exception as error:  # no backward pass, none in this dtype, no gradient at all …
        found.raised = found.raised or line(error)
        return
    for name, exact in wanted.items():
        assert exact is not None
        if got[name] is None:
            found.missing.add(name)
        floor = truth.relative_error(floors[name], exact)
        found.add(name, truth.relative_error(got[name], exact), floor)


def leaves_of(inputs: Inputs) -> Inputs:
    return Inputs(*(None if x is None else x.detach().clone().requires_grad_() for x in inputs))  # type: ignore[arg-type]


def weights_of(like: torch.Tensor, seed: int) -> torch.Tensor:
    """What the output is multiplied by to be one number; around 1, so that nothing cancels out."""
    draw = torch.Generator().manual_seed(seed + 1)
    return (1.0 + torch.randn(like.shape, generator=draw, dtype=torch.float64)).to(like.device)


def gradients(
    out: torch.Tensor, inputs: Inputs, weights: torch.Tensor
) -> dict[str, torch.Tensor | None]:
    named = inputs.named
    grads = torch.autograd.grad(out, list(named.values()), weights.to(out.dtype), allow_unused=True)
    return dict(zip(named, grads, strict=True))


def _differences(runner: Runner, scene: Scene, inputs: Inputs, found: Measured, seed: int) -> None:
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
                runner(scene, _moved(inputs, name, sign * step * along)).double()
                for sign in (1, -1)
            )
        slope = float(((ahead - behind) * weights).sum()) / (2 * step)
        grad = grads[name]
        told = 0.0 if grad is None else float((grad.double() * along.double()).sum())
        # A random direction may be nearly flat; the gradient's norm is its usual slope.
        usual = 0.0 if grad is None else float(grad.double().norm())
        size = max(abs(slope), abs(told), usual)
        found.differences[name] = abs(slope - told) / size if size else 0.0


def _moved(inputs: Inputs, name: str, by: torch.Tensor) -> Inputs:
    named = inputs.named
    named[name] = named[name] + by
    return Inputs(named["q"], named["k"], named["v"], named.get(SINKS))


# ---------------------------------------------------------------- findings


def forward_finding(measured: list[Measured]) -> Finding:
    """The dtype that is furthest beyond its limit, or nearest to it."""
    worst = max(measured, key=lambda one: one.off["out"] / one.limit("out"))
    off, limit = worst.off["out"], worst.limit("out")
    said = f"output off by {percent(off)} in {worst.dtype}; rounding alone: "
    detail = said + percent(worst.floors["out"])
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
    for one in measured:
        if one.raised:
            detail = f"its backward pass does not run in {one.dtype}: {one.raised}"
            return Finding(column, "failed", detail)
    pairs = [(one, name) for one in measured for name in names]
    worst, name = max(pairs, key=lambda pair: pair[0].off[pair[1]] / pair[0].limit(pair[1]))
    off, limit = worst.off[name], worst.limit(name)
    detail = f"gradient of {name} off by {percent(off)} in {worst.dtype}"
    if name in worst.missing:
        detail = f"no gradient arrives at {name}"
    elif off == 1.0:
        detail = f"the gradient of {name} is 0 everywhere"
    unlike = _unlike_differences(measured, column, names)
    if off <= limit and unlike is None:
        said = f"{detail}; rounding alone: {percent(worst.floors[name])}"
        return Finding(column, "passed", said, off, limit)
    if off <= limit:
        assert unlike is not None
        return unlike
    return Finding(column, "failed", detail + _own(worst, name), _finite(off), limit)


def _unlike_differences(
    measured: list[Measured], column: str, names: tuple[str, ...]
) -> Finding | None:
    """Failed, where a gradient is not that of the kernel's own output."""
    for one in measured:
        for name in names:
            gap = one.differences.get(name)
            if gap is not None and not gap <= DIFFERENCES[DTYPES[one.dtype]]:
                where = f"of its own output in {one.dtype}"
                said = f"gradient of {name} off by {percent(gap)} from finite differences {where}"
                return Finding(column, "failed", said, _finite(gap), DIFFERENCES[DTYPES[one.dtype]])
    return None


def _own(one: Measured, name: str) -> str:
    """Whether the fault is in the backward pass or before it."""
    gap = one.differences.get(name)
    if gap is None:
        return ""
    if gap <= DIFFERENCES[DTYPES[one.dtype]]:
        return "; it is the gradient of its own output, which is wrong itself"
    return f"; and off by {percent(gap)} from finite differences of its own output"


def _outcome(passed: bool) -> Outcome:
    return "passed" if passed else "failed"


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
