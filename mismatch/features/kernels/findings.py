"""What audits of attention and of experts share: errors by dtype, and the findings from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from mismatch.errors import MismatchError, named_line
from mismatch.features.kernels.results import Audit, Error, Finding, causes_of
from mismatch.training.attention.trial import relative_error as relative_error

# A right kernel rounds in other places than plain attention with a float32 softmax does, and may
# keep its softmax in the inputs' dtype (gpt-oss' own eager does: it stays below 3 times that
# floor). A feature that is ignored moves the output by 10 % and more, 4 times this in bfloat16.
TIMES_FLOOR = 8.0
# A missing gradient has an error of 1: no floor may pass it.
HIGHEST = 0.5
OUT = "out"
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
Tensors = dict[str, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Options:
    """How an audit is done."""

    device: str = "cpu"
    dtypes: tuple[str, ...] = ("fp64", "fp32", "bf16")
    """Those that a kernel refuses are left out."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Gap:
    """Two results that should be equal: their relative difference, and the limit of rounding."""

    what: str
    dtype: str
    off: float
    limit: float


@dataclass
class DtypeErrors:
    """Errors of an implementation in one dtype, the maximum over the cases."""

    dtype: str
    least: float = 0.0
    """What a floor cannot be below."""
    off: dict[str, float] = field(default_factory=dict)
    """"out" and the names of the inputs that get gradients -> relative error."""
    floors: dict[str, float] = field(default_factory=dict)
    """Likewise, of a plain implementation in the same dtype: rounding alone."""
    lost: dict[str, str] = field(default_factory=dict)
    """Name -> a sentence, where no gradient arrives or it is 0."""
    raised: str = ""
    """Error of its backward pass, one line."""
    repeats: list[Gap] = field(default_factory=list)
    """Differences between two runs on the same inputs."""
    batches: list[Gap] = field(default_factory=list)
    """Differences between a row alone and in a batch."""
    alone: str = ""
    """Why it does not run on a batch; "" where it does."""

    def limit(self, name: str) -> float:
        return limit_of(max(self.floors[name], self.least))

    def compare(self, own: Tensors, exact: Tensors, plain: Tensors) -> None:
        """Add the errors of one case: of the output, and of gradients where there are any."""
        for name in [OUT] if self.raised else exact:
            truth, result = exact[name], own.get(name)
            assert truth is not None
            if result is None:
                self.lost[name] = f"no gradient arrives at {name}"
            elif name != OUT and not result.any():
                self.lost[name] = f"the gradient of {name} is 0 everywhere"
            off, floor = relative_error(result, truth), relative_error(plain[name], truth)
            self.off[name] = max(off, self.off.get(name, 0.0))
            self.floors[name] = max(floor, self.floors.get(name, 0.0))

    def repeat(self, first: Tensors, again: Tensors) -> None:
        """Note where output or gradients of the same inputs are not the same bits."""
        for name, tensor in first.items():
            if off := difference(again.get(name), tensor):
                what = "the output" if name == OUT else f"the gradient of {name}"
                self.repeats.append(Gap(what, self.dtype, off, self.limit(name)))


def limit_of(floor: float) -> float:
    """Limit of a relative error, from the floor: rounding alone on the same inputs."""
    return min(TIMES_FLOOR * floor, HIGHEST)


def audited(
    about: Audit,
    columns: Sequence[str],
    dtypes: Iterable[str],
    measure: Callable[[str], DtypeErrors],
    findings: Callable[[list[DtypeErrors]], Iterable[Finding]],
) -> Audit:
    """Measure an implementation in each dtype that it takes, and judge it.

    Args:
        about: the implementation; its reason: why the model refuses it, "" where it does not.
        findings: of the columns after "accepts".
    """
    start = time.monotonic()
    measured: list[DtypeErrors] = []
    refusals: dict[str, str] = {}
    for dtype in dtypes:
        try:
            measured.append(measure(dtype))
        except MismatchError:
            raise
        except Exception as error:  # an implementation may raise anything
            refusals[dtype] = named_line(error)
    if measured:
        detail = f"runs in {', '.join(errors.dtype for errors in measured)}"
        detail += "".join(f"; not in {dtype}: {reason}" for dtype, reason in refusals.items())
        found = (Finding("accepts", "passed", detail), *findings(measured))
    else:
        detail = f"does not run in {', '.join(refusals)}: {next(iter(refusals.values()))}"
        absent = (Finding(column, "not_tested", "it does not run") for column in columns[1:])
        found = (Finding("accepts", "failed", detail), *absent)
    errors = []
    for each in measured:  # without infinite values
        known = {name: x for name, x in each.off.items() if x < float("inf")}
        gradients = {name: x for name, x in known.items() if name != OUT}
        errors.append(Error(each.dtype, known.get(OUT), gradients, each.floors.get(OUT)))
    wrong = [finding for finding in found if finding.outcome == "failed" and finding.critical]
    usable = bool(measured) and not about.reason
    return replace(
        about,
        verdict="unusable" if not usable else "wrong" if wrong else "sound",
        reason=about.reason or next((finding.detail for finding in causes_of(wrong)), ""),
        usable=usable,
        findings=found,
        errors=tuple(errors),
        seconds=round(time.monotonic() - start, 2),
    )


def forward_finding(measured: list[DtypeErrors]) -> Finding:
    """Judge the output in the dtype that is furthest beyond its limit, or nearest to it."""
    worst = max(measured, key=lambda errors: errors.off[OUT] / errors.limit(OUT))
    return _compared("forward", worst, OUT, "output")


def backward_finding(
    measured: list[DtypeErrors], column: str, names: Sequence[str], absent: str = ""
) -> Finding:
    """Judge the gradients of some inputs; ``absent``: why there are none to test."""
    if absent:
        return Finding(column, "not_tested", absent)
    for errors in measured:
        if errors.raised:
            detail = f"its backward pass does not run in {errors.dtype}: {errors.raised}"
            return Finding(column, "failed", detail)
    pairs = [(errors, name) for errors in measured for name in names]
    worst, name = max(pairs, key=lambda pair: pair[0].off[pair[1]] / pair[0].limit(pair[1]))
    return _compared(column, worst, name, f"gradient of {name}")


def _compared(column: str, worst: DtypeErrors, name: str, what: str) -> Finding:
    off, limit, floor = worst.off[name], worst.limit(name), worst.floors[name]
    detail = f"{what} off by {percent(off)} in {worst.dtype}; rounding alone: {percent(floor)}"
    if off <= limit:
        return Finding(column, "passed", detail, off, limit)
    return Finding(column, "failed", worst.lost.get(name, detail), finite(off), limit)


def determinism(measured: list[DtypeErrors]) -> tuple[Finding, Finding]:
    """Judge "repeats" and "batches".

    Other bits are reported. They make an implementation wrong only beyond rounding: sums in any
    order (atomic adds) are common in backward passes of fast kernels, and matrix products of other
    shapes sum in another order. Beyond rounding a row depends on its neighbours.
    """
    gaps = [gap for errors in measured for gap in errors.repeats]
    same = "the same bits in 2 runs, output and gradients"
    repeats = _gaps("repeats", gaps, same, "{} differs from run to run")
    if repeats.outcome == "failed" and repeats.critical:
        detail = "its numbers change from run to run"
        return repeats, Finding("batches", "not_tested", detail)
    for errors in measured:
        if errors.alone:
            detail = f"does not run on three rows in {errors.dtype}: {errors.alone}"
            return repeats, Finding("batches", "failed", detail)
    gaps = [gap for errors in measured for gap in errors.batches]
    same = "the same bits alone and in a batch"
    return repeats, _gaps("batches", gaps, same, "gives a row other numbers {}")


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
    """Return 0 for the same bits; otherwise the relative difference, never 0."""
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
    """For messages: 3 digits; large numbers as they are."""
    return f"{100 * error:.3g} %" if error < float("inf") else "infinitely much (no numbers)"


def finite(value: float) -> float | None:
    return value if value < float("inf") else None
