"""The audit of one attention implementation."""

from __future__ import annotations

import time
from collections.abc import Iterator

from mismatch.experiments.kernels.types import ATTENTION_COLUMNS, Audit, Finding, Verdict, causes_of
from mismatch.processes.kernels.cases import Candidate, names_here
from mismatch.processes.kernels.checks import features, line
from mismatch.processes.kernels.costs import costs
from mismatch.processes.kernels.determinism import batches, repeats
from mismatch.processes.kernels.geometry import ModelGeometry, Options
from mismatch.processes.kernels.precision import (
    Measured,
    forward_finding,
    gradient_finding,
    measure,
    sink_gradient_finding,
)
from mismatch.processes.kernels.runner import Runner

__all__ = ["Candidate", "audit_attention", "names_here"]


def audit_attention(geometry: ModelGeometry, options: Options, candidate: Candidate) -> Audit:
    """Run one implementation through all columns; errors of the kernel become findings.

    A kernel that the model refuses is measured too, and is not usable.
    """
    start = time.monotonic()
    name, origin = candidate.name, candidate.origin
    if candidate.unavailable:
        return Audit(name, "attention", origin, "unusable", candidate.unavailable, usable=False)
    measured, refusals = _measured(geometry, options, candidate)
    if not measured:
        return _not_accepted(candidate, refusals, time.monotonic() - start)
    runner = Runner(geometry, candidate.registered)
    accepted = [errors.dtype for errors in measured]
    findings = tuple(_findings(runner, geometry, options, measured, refusals))
    wrong = [f for f in findings if f.outcome == "failed" and f.critical]
    spent = (
        ()
        if all(errors.raised for errors in measured)
        else costs(runner, geometry, options, accepted)
    )
    verdict: Verdict = "unusable" if candidate.refused else "wrong" if wrong else "sound"
    reason = candidate.refused or _cause(wrong)
    return Audit(
        name,
        "attention",
        origin,
        verdict,
        reason,
        usable=not candidate.refused,
        chosen=candidate.chosen,
        findings=findings,
        errors=tuple(errors.error for errors in measured),
        costs=spent,
        seconds=time.monotonic() - start,
    )


def _cause(wrong: list[Finding]) -> str:
    """The first finding that is not the consequence of another; "" where nothing is wrong."""
    return next((finding.detail for finding in causes_of(wrong)), "")


def _measured(
    geometry: ModelGeometry, options: Options, candidate: Candidate
) -> tuple[list[Measured], dict[str, str]]:
    """Errors by dtype, and why the other dtypes do not run."""
    measured: list[Measured] = []
    refusals: dict[str, str] = {}
    for dtype in options.dtypes:
        try:
            runner = Runner(geometry, candidate.registered)
            measured.append(measure(runner, geometry, options.device, dtype, options.seed))
        except Exception as error:  # a kernel may raise anything
            refusals[dtype] = line(error)
    return measured, refusals


def _not_accepted(candidate: Candidate, refusals: dict[str, str], seconds: float) -> Audit:
    first = next(iter(refusals.items()))
    detail = f"does not run in {', '.join(refusals)}: {first[1]}"
    findings = [Finding("accepts", "failed", detail)]
    for column in ATTENTION_COLUMNS[1:]:
        findings.append(Finding(column, "not_tested", "it does not run"))
    return Audit(
        candidate.name,
        "attention",
        candidate.origin,
        "unusable",
        candidate.refused or detail,
        usable=False,
        chosen=candidate.chosen,
        findings=tuple(findings),
        seconds=seconds,
    )


def _findings(
    runner: Runner,
    geometry: ModelGeometry,
    options: Options,
    measured: list[Measured],
    refusals: dict[str, str],
) -> Iterator[Finding]:
    """In the order of :data:`mismatch.experiments.kernels.types.ATTENTION_COLUMNS`."""
    device, seed = options.device, options.seed
    forward = {errors.dtype: errors.off["out"] for errors in measured}
    detail = f"runs in {', '.join(forward)}"
    for dtype, reason in refusals.items():
        detail += f"; not in {dtype}: {reason}"
    yield Finding("accepts", "passed", detail)
    yield from features(runner, geometry, device, forward, seed)
    yield forward_finding(measured)
    yield gradient_finding(measured)
    yield sink_gradient_finding(measured, geometry.sinks)
    again = repeats(runner, geometry, device, measured, seed, options.repeats)
    yield again
    if again.outcome == "failed" and again.critical:
        yield Finding("batches", "not_tested", "its numbers change from run to run")
    else:
        yield batches(runner, geometry, device, measured, seed)
