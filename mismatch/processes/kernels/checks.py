"""Feature checks of an attention kernel: sinks, window, documents, offsets, groups, scale.

Each check runs the kernel on inputs with that feature alone, and compares the output with the
reference and with the outputs of known faults: the nearest one names what the kernel did instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from mismatch.errors import named_line
from mismatch.experiments.kernels import Finding
from mismatch.processes.kernels import findings as truth
from mismatch.processes.kernels.cases import (
    DTYPES,
    Case,
    allowed,
    inputs_of,
    plain,
    short_window,
    usual_scale,
)
from mismatch.processes.kernels.findings import limit_of, percent
from mismatch.processes.kernels.geometry import ModelGeometry
from mismatch.processes.kernels.runner import Runner

# What a faulty kernel does: options of :func:`allowed`, and of the reference.
Fault = tuple[dict[str, Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Check:
    """One case, and known faults on it by their description."""

    column: str
    case: Case
    faults: dict[str, Fault]


@dataclass(frozen=True, slots=True)
class Words:
    """Of one column: of a kernel that is right, of one with a fault of no name, of no test."""

    right: str
    wrong: str
    absent: str = ""


COLUMNS = {
    "sinks": Words(
        "the sinks count in the softmax",
        "the sinks do not count as they should",
        "the model has no attention sinks",
    ),
    "window": Words(
        "each query sees exactly its window",
        "does not see exactly the window",
        "the model has no layers with a sliding window",
    ),
    "packing": Words(
        "documents of one row do not see each other",
        "documents of one row are not kept apart as they should be",
    ),
    "offsets": Words(
        "queries after cached keys look at the right ones",
        "queries after cached keys do not look at the right ones",
    ),
    "grouped_queries": Words(
        "query heads read their own group's keys",
        "query heads do not read their own group's keys",
        "the model has a key head for every query head",
    ),
    "scaling": Words("the given scale is used", "the given scale is not used as it should be"),
}


def features(
    runner: Runner, geometry: ModelGeometry, device: str, forward: dict[str, float], seed: int
) -> list[Finding]:
    """One finding for each of :data:`COLUMNS`, the worst over dtypes.

    Args:
        forward: name of each dtype that the kernel takes -> relative error of its output there.
    """
    checks = list(checks_of(geometry))
    findings = []
    for column in COLUMNS:
        own = [check for check in checks if check.column == column]
        if not own:
            findings.append(Finding(column, "not_tested", COLUMNS[column].absent))
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


def checks_of(geometry: ModelGeometry) -> Iterator[Check]:
    """All checks that apply to the model."""
    base, usual = plain(geometry), usual_scale(geometry)
    if geometry.sinks:
        yield Check("sinks", replace(base, sinks="on"), {"drops the sinks": ({}, {"sinks": False})})
    if geometry.window is not None:
        width = short_window(geometry)
        faults: dict[str, Fault] = {
            "sees one key more than the window": ({"window": width + 1}, {}),
            "sees one key less than the window": ({"window": width - 1}, {}),
            "ignores the window": ({"window": None}, {}),
        }
        yield Check("window", replace(base, window=width), faults)
    third = base.keys // 3
    faults = {"lets documents of one row see each other": ({"documents": False}, {})}
    yield Check("packing", replace(base, documents=(third, 5, base.keys - third - 5)), faults)
    faults = {
        "puts the first query at the first key, whatever is in the cache": (
            {"from_start": True},
            {},
        ),
        "lets queries see keys that come after them": ({"causal": False}, {}),
    }
    for queries in (third, 1):
        yield Check("offsets", replace(base, queries=queries), faults)
    if geometry.kv_heads < geometry.heads:
        faults = {"hands key heads out in turn, not to neighbours": ({}, {"neighbours": False})}
        yield Check("grouped_queries", replace(base, grouped=True), faults)
    for scaling in {0.6 * usual, geometry.scaling} - {usual}:
        faults = {
            "uses head_dim ** -0.5 whatever scale is given": ({}, {"scaling": usual}),
            "does not scale at all": ({}, {"scaling": 1.0}),
            "applies head_dim ** -0.5 beside the scale": ({}, {"scaling": scaling * usual}),
        }
        yield Check("scaling", replace(base, scaling=scaling), faults)


# An error as large as that with all features on is left to the column "forward", as long as the
# output is clearly nearer to the reference than to that of a kernel with a known fault.
ELSEWHERE = 3.0
NEARER = 3.0


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
        outputs = {
            words: truth.attention(
                numbers, allowed(case, device, **masked), **{"scaling": case.scaling, **options}
            )
            for words, (masked, options) in check.faults.items()
        }
        faults = {  # only those that change this case: a last query has no keys after it
            words: truth.relative_error(out, wrong)
            for words, wrong in outputs.items()
            if truth.relative_error(wrong, right) > limit
        }
    if off <= limit:
        return Finding(column, "passed", COLUMNS[column].right, off, limit)
    if off == float("inf"):
        detail = f"gives NaN or inf with {case.label} in {kernel.dtype}"
        return Finding(column, "failed", detail, None, limit)
    nearest = min(faults, key=lambda words: faults[words])
    elsewhere = min(ELSEWHERE * kernel.forward, faults[nearest] / NEARER)
    if off <= elsewhere:
        detail = f"{COLUMNS[column].right}; the output is off by {percent(off)} for another reason"
        return Finding(column, "passed", detail, off, elsewhere)
    fault = nearest if faults[nearest] <= max(limit, off / NEARER) else COLUMNS[column].wrong
    detail = f"{fault}: output off by {percent(off)} with {case.label} in {kernel.dtype}"
    return Finding(column, "failed", detail, off, limit)
