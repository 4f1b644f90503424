"""The audit of one attention implementation: features, errors against float64, determinism."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from mismatch.errors import named_line
from mismatch.experiments.kernels import ATTENTION_COLUMNS, Audit, Finding, Verdict, causes_of
from mismatch.processes.kernels import findings as shared
from mismatch.processes.kernels.cases import (
    DTYPES,
    Candidate,
    Case,
    Inputs,
    allowed,
    full,
    inputs_of,
)
from mismatch.processes.kernels.checks import features
from mismatch.processes.kernels.costs import costs
from mismatch.processes.kernels.findings import OUT, STEPS, DtypeErrors, Gap, Tensors, leaves_of
from mismatch.processes.kernels.geometry import ModelGeometry, Options
from mismatch.processes.kernels.runner import Runner

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
    runs = [errors.dtype for errors in measured]
    backward = not all(errors.raised for errors in measured)
    return replace(
        audit,
        verdict=verdict,
        reason=candidate.refused or next((f.detail for f in causes_of(wrong)), ""),
        usable=not candidate.refused,
        findings=findings,
        errors=tuple(errors.error for errors in measured),
        costs=costs(attention.runner, geometry, options, runs) if backward else (),
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
