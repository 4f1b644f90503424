"""Determinism: the same bits from run to run, and for a row whatever else is in its batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mismatch.experiments.kernels.types import Finding
from mismatch.processes.kernels import reference as truth
from mismatch.processes.kernels.cases import DTYPES, Inputs, Scene, full, inputs_of
from mismatch.processes.kernels.checks import line, percent
from mismatch.processes.kernels.geometry import ModelGeometry
from mismatch.processes.kernels.precision import Measured, gradients, leaves_of, weights_of
from mismatch.processes.kernels.runner import Runner

OUT = "out"


@dataclass(frozen=True, slots=True)
class Gap:
    """Two results that should be equal: their relative difference, and the limit of rounding."""

    what: str
    dtype: str
    off: float
    limit: float

    @property
    def beyond(self) -> float:
        """1 at the limit."""
        return self.off / self.limit


def repeats(
    runner: Runner,
    geometry: ModelGeometry,
    device: str,
    measured: list[Measured],
    seed: int,
    times: int,
) -> Finding:
    """Output and gradients of the same inputs, again.

    A difference is reported. It makes the kernel wrong only beyond rounding: sums in any order
    (atomic adds) are common in backward passes of fast kernels.
    """
    gaps, scene = [], full(geometry)[0]
    for errors in measured:
        inputs = inputs_of(geometry, scene, device, DTYPES[errors.dtype], seed)
        try:
            first, *others = (
                _all(runner, scene, inputs, errors, seed) for _ in range(max(2, times))
            )
        except Exception as error:
            return Finding(
                "repeats", "failed", f"does not run again in {errors.dtype}: {line(error)}"
            )
        gaps += [
            Gap(name, errors.dtype, _difference(other[name], tensor), errors.limit(name))
            for other in others
            for name, tensor in first.items()
            if not torch.equal(other[name], tensor)
        ]
    if not gaps:
        detail = f"the same bits in {max(2, times)} runs, output and gradients"
        return Finding("repeats", "passed", detail, 0.0)
    return _finding("repeats", gaps, "differs from run to run")


def batches(
    runner: Runner, geometry: ModelGeometry, device: str, measured: list[Measured], seed: int
) -> Finding:
    """A row alone, beside two others, and padded beside longer ones.

    A difference is reported: matrix products of other shapes sum in another order. Beyond rounding
    it makes the kernel wrong: then a row depends on its neighbours.
    """
    base = replace(full(geometry)[0], rows=3)
    gaps = []
    for errors in measured:
        inputs = inputs_of(geometry, base, device, DTYPES[errors.dtype], seed)
        short = base.keys - 9
        cases = (
            ("beside two others", base, base.keys),
            ("beside longer ones", replace(base, lengths=(base.keys, short, short - 3)), short),
        )
        for words, scene, length in cases:
            try:
                off, same = _in_company(runner, scene, inputs, length)
            except Exception as error:
                detail = f"does not run on three rows in {errors.dtype}: {line(error)}"
                return Finding("batches", "failed", detail)
            if not same:
                gaps.append(Gap(words, errors.dtype, off, errors.limit(OUT)))
    if not gaps:
        return Finding("batches", "passed", "the same bits alone and in a batch of three", 0.0)
    return _finding("batches", gaps, "gives a row other numbers")


def _finding(column: str, gaps: list[Gap], words: str) -> Finding:
    worst = max(gaps, key=lambda gap: gap.beyond)
    where = f"the gradient of {worst.what}" if worst.what not in (OUT,) else "the output"
    detail = (
        f"{where} {words}, by {percent(worst.off)} in {worst.dtype}"
        if column == "repeats"
        else f"{words} {worst.what}, by {percent(worst.off)} in {worst.dtype}"
    )
    critical = not worst.beyond <= 1
    if not critical:
        detail = f"{detail}: no more than rounding"
    value = worst.off if worst.off < float("inf") else None
    return Finding(column, "failed", detail, value, worst.limit, critical)


def _all(
    runner: Runner, scene: Scene, inputs: Inputs, errors: Measured, seed: int
) -> dict[str, torch.Tensor]:
    """Output and those gradients that arrive."""
    leaves = leaves_of(inputs)
    out = runner(scene, leaves)
    results = {OUT: out.detach()}
    if not errors.raised:
        grads = gradients(out, leaves, weights_of(out, seed))
        results |= {name: grad for name, grad in grads.items() if grad is not None}
    return results


def _in_company(runner: Runner, scene: Scene, inputs: Inputs, length: int) -> tuple[float, bool]:
    """Relative difference of row 1 in a batch and alone, and whether their bits are equal."""
    query, key, value = (x[1:2, :, :length] for x in inputs[:3])
    single = replace(scene, rows=1, queries=length, keys=length, lengths=())
    with torch.no_grad():
        alone = runner(single, Inputs(query, key, value, inputs.sinks))
        beside = runner(scene, inputs)[1:2, :length]
    return _difference(beside, alone), torch.equal(beside, alone)


def _difference(left: torch.Tensor, right: torch.Tensor) -> float:
    return truth.relative_error(left, right)
