"""What audits of attention and of experts share: errors by dtype, and findings from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from mismatch.errors import MismatchError, named_line
from mismatch.features.kernels.cases import DTYPES, Inputs
from mismatch.features.kernels.results import Error, Finding
from mismatch.training.attention.trial import definition
from mismatch.training.attention.trial import relative_error as relative_error

# A right kernel rounds in other places than plain attention with a float32 softmax does, and may
# keep its softmax in the inputs' dtype (gpt-oss' own eager does: it stays below 3 times that
# floor). A feature that is ignored moves the output by 10 % and more, 4 times this in bfloat16.
TIMES_FLOOR = 8.0
# A missing gradient has an error of 1: no floor may pass it.
HIGHEST = 0.5
# Central differences: truncation goes with the square of the step, rounding with its inverse. Also
# in float64 the rounding may be float32's: most families' eager attention has its softmax there.
STEPS = {torch.float64: 2e-3, torch.float32: 2e-2}
DIFFERENCES = {torch.float64: 1e-3, torch.float32: 2e-2}
OWN_GRADIENT = "; it is the gradient of its own output, which is wrong itself"


def attention(
    inputs: Inputs,
    mask: torch.Tensor,
    scaling: float,
    *,
    sinks: bool = True,
    neighbours: bool = True,
) -> torch.Tensor:
    """[B, T, H, Dv] by :func:`definition`; without ``sinks`` as in a kernel that drops them."""
    return definition(inputs.given(sinks), mask, scaling, neighbours=neighbours)


def rounded(inputs: Inputs, mask: torch.Tensor, scaling: float) -> torch.Tensor:
    """The same in the inputs' dtype with a float32 softmax, as a trainer's plain attention.

    Its error is the floor: what rounding alone costs in this dtype. In float64 too the softmax is
    in float32, as in the families' own eager attention.
    """
    return definition(inputs.given(), mask, scaling, softmax=torch.float32)


def leaves_of(inputs: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    """Copies of the kernel's inputs that require gradients, in another dtype if one is given."""
    return Inputs(
        *(
            None if x is None else x.detach().to(dtype or x.dtype, copy=True).requires_grad_()
            for x in inputs
        )  # type: ignore[arg-type]
    )


def limit_of(floor: float) -> float:
    """Limit of a relative error, from the floor: rounding alone on the same inputs."""
    return min(TIMES_FLOOR * floor, HIGHEST)


OUT = "out"
Tensors = dict[str, torch.Tensor | None]


@dataclass
class DtypeErrors:
    """Errors of an implementation in one dtype, the maximum over the cases.

    Attributes:
        off, floors: "out" and the names of the inputs that get gradients -> relative error of the
            implementation, of a plain one in the same dtype (rounding alone).
        differences: name -> relative difference of the gradient from finite differences of the
            implementation's own output.
        lost: name -> a sentence, where no gradient arrives or it is 0.
        raised: error of its backward pass, one line.
        least: what a floor cannot be below.
    """

    dtype: str
    off: dict[str, float] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    raised: str = ""
    least: float = 0.0

    def limit(self, name: str) -> float:
        return limit_of(max(self.floors[name], self.least))

    def beyond(self, name: str) -> float:
        """1 at the limit."""
        return self.off[name] / self.limit(name)

    def add(self, name: str, off: float, floor: float) -> None:
        self.off[name] = max(off, self.off.get(name, 0.0))
        self.floors[name] = max(floor, self.floors.get(name, 0.0))

    def add_gradients(self, own: Tensors, plain: Tensors, exact: Tensors) -> None:
        for name, truth in exact.items():
            assert truth is not None
            gradient = own.get(name)
            if gradient is None:
                self.lost[name] = f"no gradient arrives at {name}"
            elif not gradient.any():
                self.lost[name] = f"the gradient of {name} is 0 everywhere"
            self.add(name, relative_error(gradient, truth), relative_error(plain[name], truth))

    @property
    def error(self) -> Error:
        """For the report, without infinite values."""
        finite = {name: x for name, x in self.off.items() if x < float("inf")}
        gradients = {name: x for name, x in finite.items() if name != OUT}
        return Error(self.dtype, finite.get(OUT), gradients, self.floors.get(OUT))


@dataclass(frozen=True, slots=True)
class Gap:
    """Two results that should be equal: their relative difference, and the limit of rounding."""

    what: str
    dtype: str
    off: float
    limit: float


def in_dtypes(
    dtypes: Iterable[str], measure: Callable[[str], DtypeErrors]
) -> tuple[list[DtypeErrors], dict[str, str]]:
    """Errors by dtype, and why the other dtypes do not run."""
    measured, refusals = [], {}
    for dtype in dtypes:
        try:
            measured.append(measure(dtype))
        except MismatchError:
            raise
        except Exception as error:  # an implementation may raise anything
            refusals[dtype] = named_line(error)
    return measured, refusals


def not_accepted(columns: Sequence[str], refusals: dict[str, str]) -> tuple[Finding, ...]:
    """Findings on what runs in no dtype; the first has the reason."""
    detail = f"does not run in {', '.join(refusals)}: {next(iter(refusals.values()))}"
    absent = (Finding(column, "not_tested", "it does not run") for column in columns[1:])
    return Finding("accepts", "failed", detail), *absent


def accepted(measured: list[DtypeErrors], refusals: dict[str, str]) -> Finding:
    detail = f"runs in {', '.join(errors.dtype for errors in measured)}"
    parts = (f"; not in {dtype}: {reason}" for dtype, reason in refusals.items())
    return Finding("accepts", "passed", detail + "".join(parts))


def forward_finding(measured: list[DtypeErrors]) -> Finding:
    """The dtype that is furthest beyond its limit, or nearest to it."""
    worst = max(measured, key=lambda errors: errors.beyond(OUT))
    return _compared("forward", worst, OUT, f"output off by {percent(worst.off[OUT])}")


def backward_finding(
    measured: list[DtypeErrors], column: str, names: Sequence[str], absent: str = ""
) -> Finding:
    """Gradients of some inputs; ``absent``: why there are none to test."""
    if absent:
        return Finding(column, "not_tested", absent)
    for errors in measured:
        if errors.raised:
            detail = f"its backward pass does not run in {errors.dtype}: {errors.raised}"
            return Finding(column, "failed", detail)
    pairs = [(errors, name) for errors in measured for name in names]
    worst, name = max(pairs, key=lambda pair: pair[0].beyond(pair[1]))
    finding = _compared(
        column, worst, name, f"gradient of {name} off by {percent(worst.off[name])}"
    )
    return finding if finding.outcome == "failed" else _unlike(pairs, column) or finding


def _compared(column: str, worst: DtypeErrors, name: str, words: str) -> Finding:
    off, limit = worst.off[name], worst.limit(name)
    detail = f"{words} in {worst.dtype}; rounding alone: {percent(worst.floors[name])}"
    if off <= limit:
        return Finding(column, "passed", detail, off, limit)
    detail = worst.lost.get(name, detail) + _origin(worst, name)
    return Finding(column, "failed", detail, finite(off), limit)


def _unlike(pairs: list[tuple[DtypeErrors, str]], column: str) -> Finding | None:
    """Failed, where a gradient is not that of the implementation's own output."""
    for errors, name in pairs:
        gap = errors.differences.get(name)
        limit = DIFFERENCES.get(DTYPES[errors.dtype], float("inf"))
        if gap is not None and not gap <= limit:
            where = f"of its own output in {errors.dtype}"
            detail = f"gradient of {name} off by {percent(gap)} from finite differences {where}"
            return Finding(column, "failed", detail, finite(gap), limit)
    return None


def _origin(errors: DtypeErrors, name: str) -> str:
    """Whether the fault is in the backward pass or before it."""
    gap = errors.differences.get(name)
    if gap is None:
        return ""
    if gap <= DIFFERENCES[DTYPES[errors.dtype]]:
        return OWN_GRADIENT
    return f"; and off by {percent(gap)} from finite differences of its own output"


def repeat_gaps(errors: DtypeErrors, first: Tensors, others: Iterable[Tensors]) -> list[Gap]:
    """Where output or gradients of the same inputs are not the same bits."""
    return [
        Gap(
            "the output" if name == OUT else f"the gradient of {name}",
            errors.dtype,
            off,
            errors.limit(name),
        )
        for results in others
        for name, tensor in first.items()
        if (off := difference(results.get(name), tensor))
    ]


def repeats_finding(gaps: list[Gap], times: int) -> Finding:
    """A difference is reported. It makes an implementation wrong only beyond rounding: sums in any
    order (atomic adds) are common in backward passes of fast kernels.
    """
    same = f"the same bits in {times} runs, output and gradients"
    return _gaps("repeats", gaps, same, "{} differs from run to run")


def batches_finding(gaps: list[Gap]) -> Finding:
    """A difference is reported: matrix products of other shapes sum in another order. Beyond
    rounding it makes an implementation wrong: then a row depends on its neighbours.
    """
    return _gaps(
        "batches", gaps, "the same bits alone and in a batch", "gives a row other numbers {}"
    )


def _gaps(column: str, gaps: list[Gap], same: str, words: str) -> Finding:
    if not gaps:
        return Finding(column, "passed", same, 0.0)
    worst = max(gaps, key=lambda gap: gap.off / gap.limit)
    detail = f"{words.format(worst.what)}, by {percent(worst.off)} in {worst.dtype}"
    critical = not worst.off <= worst.limit
    if not critical:
        detail += ": no more than rounding"
    return Finding(column, "failed", detail, finite(worst.off), worst.limit, critical)


def difference(left: torch.Tensor | None, right: torch.Tensor | None) -> float:
    """0 for the same bits; otherwise the relative difference, never 0."""
    if left is None or right is None:
        return 0.0 if left is right else 1.0
    if torch.equal(left, right):
        return 0.0
    return max(relative_error(left, right.double()), torch.finfo(torch.float64).tiny)


def gradients(named: dict[str, torch.Tensor], out: torch.Tensor, weights: torch.Tensor) -> Tensors:
    """Of the output's sum with these weights; None where none arrives."""
    grads = torch.autograd.grad(out, list(named.values()), weights.to(out.dtype), allow_unused=True)
    return dict(zip(named, grads, strict=True))


def percent(error: float) -> str:
    """For messages: 3 digits; large ones as they are."""
    return f"{100 * error:.3g} %" if error < float("inf") else "infinitely much (no numbers)"


def finite(value: float) -> float | None:
    return value if value < float("inf") else None
