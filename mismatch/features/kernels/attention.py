"""The audit of one attention implementation: features, errors against float64, determinism.

Each check runs the kernel on inputs with that feature alone, and compares the output with the
reference and with the outputs of known faults: the nearest one names what the kernel did instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from mismatch.errors import named_line
from mismatch.features.kernels import findings as shared
from mismatch.features.kernels import findings as truth
from mismatch.features.kernels.cases import (
    DTYPES,
    Candidate,
    Case,
    Inputs,
    allowed,
    full,
    inputs_of,
    plain,
    short_window,
    usual_scale,
)
from mismatch.features.kernels.findings import (
    OUT,
    STEPS,
    DtypeErrors,
    Gap,
    Tensors,
    leaves_of,
    limit_of,
    percent,
)
from mismatch.features.kernels.geometry import ModelGeometry, Options
from mismatch.features.kernels.results import ATTENTION_COLUMNS, Audit, Finding, Verdict, causes_of
from mismatch.features.kernels.runner import Runner

NO_SINKS = "the model has no attention sinks"


def audit_attention(geometry: ModelGeometry, options: Options, candidate: Candidate) -> Audit:
    """Run one implementation through all columns; errors of the kernel become findings.

    A kernel that the model refuses is measured too, and is not usable.
    """
    start = time.monotonic()
    audit = Audit(
        candidate.name,
        "attention",
        candidate.origin,
        "unusable",
        candidate.unavailable or candidate.refused,
        usable=False,
        chosen=candidate.chosen,
    )
    if candidate.unavailable:
        return audit
    attention = AttentionAudit(geometry, options, candidate.registered)
    measured, refusals = shared.in_dtypes(options.dtypes, attention.measure)
    if not measured:
        findings = shared.not_accepted(ATTENTION_COLUMNS, refusals)
        reason = audit.reason or findings[0].detail
        return replace(audit, reason=reason, findings=findings, seconds=time.monotonic() - start)
    findings = (shared.accepted(measured, refusals), *attention.findings(measured))
    wrong = [f for f in findings if f.outcome == "failed" and f.critical]
    verdict: Verdict = "unusable" if candidate.refused else "wrong" if wrong else "sound"
    return replace(
        audit,
        verdict=verdict,
        reason=candidate.refused or next((f.detail for f in causes_of(wrong)), ""),
        usable=not candidate.refused,
        findings=findings,
        errors=tuple(errors.error for errors in measured),
        seconds=time.monotonic() - start,
    )


class AttentionAudit:
    """Runs one registered implementation on the cases of :mod:`.cases`."""

    def __init__(self, geometry: ModelGeometry, options: Options, registered: str) -> None:
        self.geometry, self.options = geometry, options
        self.runner = Runner(geometry, registered)

    def findings(self, measured: list[DtypeErrors]) -> Iterator[Finding]:
        """In the order of ``ATTENTION_COLUMNS``, from the second."""
        forward = {errors.dtype: errors.off[OUT] for errors in measured}
        device, seed = self.options.device, self.options.seed
        yield from features(self.runner, self.geometry, device, forward, seed)
        yield shared.forward_finding(measured)
        yield shared.backward_finding(measured, "gradient", ("q", "k", "v"))
        absent = "" if self.geometry.sinks else NO_SINKS
        yield shared.backward_finding(measured, "sink_gradient", ("sinks",), absent)
        again = self.repeats(measured)
        yield again
        if again.outcome == "failed" and again.critical:
            yield Finding("batches", "not_tested", "its numbers change from run to run")
        else:
            yield self.batches(measured)

    def measure(self, name: str) -> DtypeErrors:
        """All cases of the model, forward and backward in one dtype.

        Raises:
            Exception: whatever the kernel's forward pass raises.
        """
        errors = DtypeErrors(name)
        for case in full(self.geometry):
            self._compare(case, self._inputs(case, name), errors)
        if DTYPES[name] in STEPS and not errors.raised:
            case = full(self.geometry)[0]
            self._differences(case, self._inputs(case, name), errors)
        return errors

    def _inputs(self, case: Case, dtype: str) -> Inputs:
        options = self.options
        return inputs_of(self.geometry, case, options.device, DTYPES[dtype], options.seed)

    def _compare(self, case: Case, inputs: Inputs, errors: DtypeErrors) -> None:
        mask = allowed(case, self.options.device)
        exact, plain, own = leaves_of(inputs, torch.float64), leaves_of(inputs), leaves_of(inputs)
        right = shared.attention(exact, mask, case.scaling)
        out = self.runner(case, own)
        rounded = shared.rounded(plain, mask, case.scaling)
        errors.add(OUT, shared.relative_error(out, right), shared.relative_error(rounded, right))
        weights = self._weights(right)
        expected = shared.gradients(exact.named, right, weights)
        floors = shared.gradients(plain.named, rounded, weights)
        try:
            gradients = shared.gradients(own.named, out, weights)
        except Exception as error:  # no backward pass, none in this dtype, no gradient at all …
            errors.raised = errors.raised or named_line(error)
            return
        errors.add_gradients(gradients, floors, expected)

    def _weights(self, like: torch.Tensor) -> torch.Tensor:
        """Random weights around 1 that reduce the output to one number without cancellation."""
        draw = torch.Generator().manual_seed(self.options.seed + 1)
        weights = 1.0 + torch.randn(like.shape, generator=draw, dtype=torch.float64)
        return weights.to(like.device)

    def _differences(self, case: Case, inputs: Inputs, errors: DtypeErrors) -> None:
        """Directional derivatives of the kernel itself: by each of q, k, v and the sinks."""
        leaves = leaves_of(inputs)
        out = self.runner(case, leaves)
        weights = self._weights(out)
        grads = shared.gradients(leaves.named, out, weights)
        draw = torch.Generator().manual_seed(self.options.seed + 2)
        directions = {
            name: torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x)
            for name, x in inputs.named.items()
        }
        step = STEPS[inputs.query.dtype]
        for name, along in directions.items():
            with torch.no_grad():
                ahead, behind = (
                    self.runner(case, inputs.shifted(name, sign * step * along)).double()
                    for sign in (1, -1)
                )
            slope = float(((ahead - behind) * weights).sum()) / (2 * step)
            grad = grads[name]
            predicted = 0.0 if grad is None else float((grad.double() * along.double()).sum())
            # A random direction may be nearly flat; the gradient's norm is its usual slope.
            usual = 0.0 if grad is None else float(grad.double().norm())
            size = max(abs(slope), abs(predicted), usual)
            errors.differences[name] = abs(slope - predicted) / size if size else 0.0

    def repeats(self, measured: list[DtypeErrors]) -> Finding:
        """Output and gradients of the same inputs, again."""
        gaps: list[Gap] = []
        case, times = full(self.geometry)[0], max(2, self.options.repeats)
        for errors in measured:
            inputs = self._inputs(case, errors.dtype)
            try:
                first, *others = (self._results(case, inputs, errors) for _ in range(times))
            except Exception as error:
                detail = f"does not run again in {errors.dtype}: {named_line(error)}"
                return Finding("repeats", "failed", detail)
            gaps += shared.repeat_gaps(errors, first, others)
        return shared.repeats_finding(gaps, times)

    def _results(self, case: Case, inputs: Inputs, errors: DtypeErrors) -> Tensors:
        leaves = leaves_of(inputs)
        out = self.runner(case, leaves)
        results: Tensors = {OUT: out.detach()}
        if not errors.raised:
            results |= shared.gradients(leaves.named, out, self._weights(out))
        return results

    def batches(self, measured: list[DtypeErrors]) -> Finding:
        """A row alone, beside two others, and padded beside longer ones."""
        base, gaps = replace(full(self.geometry)[0], rows=3), []
        short = base.keys - 9
        padded = replace(base, lengths=(base.keys, short, short - 3))
        cases = (("beside two others", base, base.keys), ("beside longer ones", padded, short))
        for errors in measured:
            inputs = self._inputs(base, errors.dtype)
            for words, case, length in cases:
                try:
                    off = self._in_company(case, inputs, length)
                except Exception as error:
                    detail = f"does not run on three rows in {errors.dtype}: {named_line(error)}"
                    return Finding("batches", "failed", detail)
                if off:
                    gaps.append(Gap(words, errors.dtype, off, errors.limit(OUT)))
        return shared.batches_finding(gaps)

    def _in_company(self, case: Case, inputs: Inputs, length: int) -> float:
        """Relative difference of row 1 in a batch and alone; 0 for the same bits."""
        query, key, value = (x[1:2, :, :length] for x in inputs[:3])
        single = replace(case, rows=1, queries=length, keys=length, lengths=())
        with torch.no_grad():
            alone = self.runner(single, Inputs(query, key, value, inputs.sinks))
            return shared.difference(self.runner(case, inputs)[1:2, :length], alone)


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
