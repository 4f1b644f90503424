"""Experts implementations against float64: output, gradients, determinism.

The module is the model family's own with random weights, reduced in size; the router before it has
fixed choices and differentiable weights. The reference runs every expert on every token.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from mismatch.errors import MismatchError, named_line
from mismatch.features.kernels import expert_layer as layer
from mismatch.features.kernels import findings as shared
from mismatch.features.kernels.cases import DTYPES
from mismatch.features.kernels.findings import OUT, DtypeErrors, Gap, Tensors, relative_error
from mismatch.features.kernels.geometry import ModelGeometry, Options
from mismatch.features.kernels.results import EXPERT_COLUMNS, Audit, Finding, Origin
from mismatch.training.user_kernels import is_user_kernel, register_experts

TOKENS = 61
ROUTER = "router"


def audit_experts(geometry: ModelGeometry, options: Options, name: str) -> Audit:
    """Audit one experts implementation.

    Args:
        name: "eager", "grouped_mm", "batched_mm", "bounded", or ``package.module:function``.

    Raises:
        MismatchError: a user's function that is not there.
    """
    start = time.monotonic()
    origin: Origin = "ours" if name == "bounded" else "transformers"
    origin = "yours" if is_user_kernel(name) else origin
    registered = register_experts(name) if origin == "yours" else name
    refused = _refused(geometry, name, origin)
    audit = Audit(name, "experts", origin, "unusable", refused, usable=False)
    try:
        sizes = layer.sizes_of(geometry).reduced()
        experts = ExpertsAudit(geometry, options, registered, sizes)
        measured, refusals = shared.in_dtypes(options.dtypes, experts.measure)
    except MismatchError as error:  # nothing can be measured
        return replace(audit, reason=refused or error.message)
    if not measured:
        findings = shared.not_accepted(EXPERT_COLUMNS, refusals)
        seconds = time.monotonic() - start
        return replace(audit, reason=findings[0].detail, findings=findings, seconds=seconds)
    accepts = shared.accepted(measured, refusals)
    accepts = Finding("accepts", "failed", refused) if refused else accepts
    findings = (accepts, *experts.findings(measured))
    failed = [finding for finding in findings if finding.outcome == "failed"]
    wrong = [f for f in failed if f.critical and f.column != "accepts"]
    sound = "; ".join(finding.detail for finding in failed) or "nothing wrong"
    return replace(
        audit,
        verdict="wrong" if wrong else "unusable" if refused else "sound",
        reason=wrong[0].detail if wrong else refused or sound,
        usable=not refused,
        chosen=not refused and name == _chosen(geometry),
        findings=findings,
        errors=tuple(errors.error for errors in measured),
        seconds=time.monotonic() - start,
    )


def _refused(geometry: ModelGeometry, name: str, origin: Origin) -> str:
    """Why the model would not take it; "" where it does."""
    from mismatch.training.experts import implementations_for, register

    register()
    possible = implementations_for(geometry.bare)
    if origin != "yours" and name not in possible:
        return f"{geometry.model_type} takes {', '.join(possible) or 'none'}"
    if origin == "yours" and len(possible) < 2:
        return f"the experts of {geometry.model_type} are behind no interface of transformers"
    if origin == "yours":
        return ""
    try:
        geometry.bare.get_correct_experts_implementation(name)
    except (ValueError, ImportError) as error:
        return named_line(error)
    return ""


def _chosen(geometry: ModelGeometry) -> str:
    """The implementation that a trainer gets by default."""
    return str(geometry.bare.get_correct_experts_implementation(None))


def _by_definition(
    module: torch.nn.Module, inputs: layer.ExpertInputs
) -> tuple[torch.Tensor, Tensors]:
    out, gradients, raised = layer.run_backward(module, None, inputs)
    if raised:
        raise raised
    return out, gradients


class ExpertsAudit:
    """Runs one registered implementation on a reduced layer of the family's own."""

    def __init__(
        self, geometry: ModelGeometry, options: Options, registered: str, sizes: layer.Sizes
    ) -> None:
        self.geometry, self.options = geometry, options
        self.registered, self.sizes = registered, sizes
        self._repeats: list[Gap] = []
        self._batches: list[Gap] = []

    def measure(self, name: str) -> DtypeErrors:
        """Output and gradients in one dtype; notes what changes between runs and batches."""
        dtype, device, seed = DTYPES[name], self.options.device, self.options.seed
        # No floor is below one rounding, and in float64 sums may go in any order.
        errors = DtypeErrors(name, least=1e-11 if name == "fp64" else torch.finfo(dtype).eps)
        module = layer.build(self.geometry, self.sizes, device, dtype, seed)
        inputs = layer.random_inputs(self.sizes, TOKENS, device, dtype, seed)
        wide = inputs._replace(hidden=inputs.hidden.double(), router=inputs.router.double())
        exact = layer.build(self.geometry, self.sizes, device, dtype, seed).double()
        right, expected = _by_definition(exact, wide)
        plain, floors = _by_definition(module, inputs)
        first, errors.raised = self._results(module, inputs)
        errors.add(OUT, relative_error(first[OUT], right), relative_error(plain, right))
        errors.add_gradients(first, floors, expected)
        others = [self._results(module, inputs)[0] for _ in range(self.options.repeats - 1)]
        self._repeats += shared.repeat_gaps(errors, first, others)
        few = TOKENS // 3
        alone = inputs._replace(hidden=inputs.hidden[:few], ids=inputs.ids[:few])
        together = first[OUT]
        assert together is not None
        with torch.no_grad():
            off = shared.difference(layer.run(module, self.registered, alone), together[:few])
        if off:
            self._batches.append(Gap("with others beside them", name, off, errors.limit(OUT)))
        return errors

    def _results(self, module: torch.nn.Module, inputs: layer.ExpertInputs) -> tuple[Tensors, str]:
        """Output and gradients, and the error of the backward pass."""
        out, gradients, raised = layer.run_backward(module, self.registered, inputs)
        return {OUT: out, **gradients}, named_line(raised) if raised else ""

    def findings(self, measured: list[DtypeErrors]) -> tuple[Finding, ...]:
        """In the order of ``EXPERT_COLUMNS``, from the second."""
        names = [name for name in measured[0].off if name not in (OUT, ROUTER)]
        return (
            shared.forward_finding(measured),
            shared.backward_finding(measured, "gradient", names),
            shared.backward_finding(measured, "router_gradient", [ROUTER]),
            shared.repeats_finding(self._repeats, self.options.repeats),
            shared.batches_finding(self._batches),
        )
