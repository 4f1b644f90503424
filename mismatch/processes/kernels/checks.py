"""Feature checks of an attention kernel: sinks, window, documents, offsets, groups, scale.

Each check runs the kernel on inputs with that feature alone, and compares the output with the
reference and with the outputs of known faults: the nearest one names what the kernel did instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from mismatch.errors import named_line
from mismatch.experiments.kernels import Finding
from mismatch.processes.kernels import findings as truth
from mismatch.processes.kernels.cases import (
    DTYPES,
    Case,
    Inputs,
    allowed,
    inputs_of,
    plain,
    short_window,
    usual_scale,
)
from mismatch.processes.kernels.findings import limit_of, percent
from mismatch.processes.kernels.geometry import ModelGeometry
from mismatch.processes.kernels.runner import Runner

Fault = Callable[[Inputs], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Check:
    """One case, and the outputs of known faults on it.

    Attributes:
        faults: description -> function from inputs in float64 to the faulty output.
    """

    column: str
    case: Case
    faults: dict[str, Fault]


COLUMNS = ("sinks", "window", "packing", "offsets", "grouped_queries", "scaling")
ABSENT = {
    "sinks": "the model has no attention sinks",
    "window": "the model has no layers with a sliding window",
    "grouped_queries": "the model has a key head for every query head",
}


def features(
    runner: Runner, geometry: ModelGeometry, device: str, forward: dict[str, float], seed: int
) -> list[Finding]:
    """One finding for each of :data:`COLUMNS`, the worst over dtypes.

    Args:
        forward: name of each dtype that the kernel takes -> relative error of its output there.
    """
    checks = list(checks_of(geometry, device))
    findings = []
    for column in COLUMNS:
        own = [check for check in checks if check.column == column]
        if not own:
            findings.append(Finding(column, "not_tested", ABSENT[column]))
            continue
        outcomes = [
            _run(Kernel(runner, geometry, device, seed, name, error), check)
            for name, error in forward.items()
            for check in own
        ]
        findings.append(max(outcomes, key=_badness))
    return findings


def _badness(finding: Finding) -> tuple[bool, float]:
    failed = finding.outcome == "failed"
    if finding.value is None or finding.limit is None:
        return failed, float("inf")
    return failed, finding.value / finding.limit


def checks_of(geometry: ModelGeometry, device: str) -> Iterator[Check]:
    """All checks that apply to the model."""
    base = plain(geometry)
    if geometry.sinks:
        yield _sinks(replace(base, sinks="on"), device)
    if geometry.window is not None:
        yield _window(replace(base, window=short_window(geometry)), device)
    third = base.keys // 3
    yield _packing(replace(base, documents=(third, 5, base.keys - third - 5)), device)
    for queries in (third, 1):
        yield _offsets(replace(base, queries=queries), device)
    if geometry.kv_heads < geometry.heads:
        yield _groups(replace(base, grouped=True), device)
    usual = usual_scale(geometry)
    for scaling in {0.6 * usual, geometry.scaling} - {usual}:
        yield _scaling(replace(base, scaling=scaling), usual, device)


def _sinks(case: Case, device: str) -> Check:
    mask = allowed(case, device)
    faults: dict[str, Fault] = {
        "drops the sinks": lambda x: truth.attention(x, mask, case.scaling, sinks=False)
    }
    return Check("sinks", case, faults)


def _window(case: Case, device: str) -> Check:
    width = case.window or 0

    def seeing(window: int | None) -> Fault:
        mask = allowed(case, device, window=window)
        return lambda x: truth.attention(x, mask, case.scaling)

    faults = {
        "sees one key more than the window": seeing(width + 1),
        "sees one key less than the window": seeing(width - 1),
        "ignores the window": seeing(None),
    }
    return Check("window", case, faults)


def _packing(case: Case, device: str) -> Check:
    mask = allowed(case, device, documents=False)
    faults: dict[str, Fault] = {
        "lets documents of one row see each other": lambda x: truth.attention(x, mask, case.scaling)
    }
    return Check("packing", case, faults)


def _offsets(case: Case, device: str) -> Check:
    first = allowed(case, device, from_start=True)
    every = torch.ones_like(first)
    faults: dict[str, Fault] = {
        "puts the first query at the first key, whatever is in the cache": lambda x: (
            truth.attention(x, first, case.scaling)
        ),
        "lets queries see keys that come after them": lambda x: truth.attention(
            x, every, case.scaling
        ),
    }
    return Check("offsets", case, faults)


def _groups(case: Case, device: str) -> Check:
    mask = allowed(case, device)
    faults: dict[str, Fault] = {
        "hands key heads out in turn, not to neighbours": lambda x: truth.attention(
            x, mask, case.scaling, neighbours=False
        )
    }
    return Check("grouped_queries", case, faults)


def _scaling(case: Case, usual: float, device: str) -> Check:
    mask = allowed(case, device)

    def scaled(scaling: float) -> Fault:
        return lambda x: truth.attention(x, mask, scaling)

    faults = {
        "uses head_dim ** -0.5 whatever scale is given": scaled(usual),
        "does not scale at all": scaled(1.0),
        "applies head_dim ** -0.5 beside the scale": scaled(case.scaling * usual),
    }
    return Check("scaling", case, faults)


# An error as large as that with all features on is left to the column "forward", as long as the
# output is clearly nearer to the reference than to that of a kernel with a known fault.
ELSEWHERE = 3.0
NEARER = 3.0
UNNAMED = {
    "sinks": "the sinks do not count as they should",
    "window": "does not see exactly the window",
    "packing": "documents of one row are not kept apart as they should be",
    "offsets": "queries after cached keys do not look at the right ones",
    "grouped_queries": "query heads do not read their own group's keys",
    "scaling": "the given scale is not used as it should be",
}
RIGHT = {
    "sinks": "the sinks count in the softmax",
    "window": "each query sees exactly its window",
    "packing": "documents of one row do not see each other",
    "offsets": "queries after cached keys look at the right ones",
    "grouped_queries": "query heads read their own group's keys",
    "scaling": "the given scale is used",
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel in one dtype.

    Attributes:
        forward: relative error of its output with all features on.
    """

    runner: Runner
    geometry: ModelGeometry
    device: str
    seed: int
    dtype: str
    forward: float


def _run(kernel: Kernel, check: Check) -> Finding:
    column, case, device = check.column, check.case, kernel.device
    inputs = inputs_of(kernel.geometry, case, device, DTYPES[kernel.dtype], kernel.seed)
    with torch.no_grad():
        try:
            out = kernel.runner(case, inputs)
        except Exception as error:  # a kernel may raise anything
            detail = f"does not run with {case.label} in {kernel.dtype}: {named_line(error)}"
            return Finding(column, "failed", detail)
        numbers, mask = truth.leaves_of(inputs, torch.float64), allowed(case, device)
        right = truth.attention(numbers, mask, case.scaling)
        floor = truth.relative_error(truth.rounded(inputs, mask, case.scaling), right)
        off, limit = truth.relative_error(out, right), limit_of(floor)
        outputs = {words: fault(numbers) for words, fault in check.faults.items()}
        faults = {  # only those that change this case: a last query has no keys after it
            words: truth.relative_error(out, wrong)
            for words, wrong in outputs.items()
            if truth.relative_error(wrong, right) > limit
        }
    if off <= limit:
        return Finding(column, "passed", RIGHT[column], off, limit)
    if off == float("inf"):
        detail = f"gives NaN or inf with {case.label} in {kernel.dtype}"
        return Finding(column, "failed", detail, None, limit)
    nearest = min(faults, key=lambda words: faults[words])
    elsewhere = min(ELSEWHERE * kernel.forward, faults[nearest] / NEARER)
    if off <= elsewhere:
        detail = f"{RIGHT[column]}; the output is off by {percent(off)} for another reason"
        return Finding(column, "passed", detail, off, elsewhere)
    fault = nearest if faults[nearest] <= max(limit, off / NEARER) else UNNAMED[column]
    detail = f"{fault}: output off by {percent(off)} with {case.label} in {kernel.dtype}"
    return Finding(column, "failed", detail, off, limit)
