"""Experts implementations against float64: output, gradients, determinism.

The module is the model family's own with random weights, reduced in size; the router before it has
fixed choices and differentiable weights. The reference runs every expert on every token.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mismatch.errors import named_line
from mismatch.features.kernels import expert_layer as layer
from mismatch.features.kernels import findings as shared
from mismatch.features.kernels.findings import DTYPES, OUT, DtypeErrors, Options, Tensors
from mismatch.features.kernels.geometry import ModelGeometry
from mismatch.features.kernels.results import EXPERT_COLUMNS, Audit, Finding, Origin
from mismatch.training.experts import NAME, register
from mismatch.training.user_kernels import is_user_kernel, register_experts

TOKENS = 61
ROUTER = "router"


def audit_experts(geometry: ModelGeometry, options: Options, name: str) -> Audit:
    """Audit one experts implementation.

    Args:
        name: "eager", "grouped_mm", "batched_mm", "bounded", or ``package.module:function``.

    Raises:
        MismatchError: a user's function that is not there; a model without experts that
            transformers' interface serves.
    """
    sizes, refused = layer.sizes_of(geometry).reduced(), ""
    origin, registered = origin_of(name), name
    if origin == "yours":
        registered = register_experts(name)
    else:
        register()
        try:
            geometry.bare.get_correct_experts_implementation(name)
        except (ValueError, ImportError) as error:
            refused = named_line(error)
    chosen = not refused and name == geometry.bare.get_correct_experts_implementation(None)
    about = Audit(name, "experts", origin, "unusable", refused, False, chosen)
    experts = ExpertsAudit(geometry, options, registered, sizes)
    return shared.audited(about, EXPERT_COLUMNS, options.dtypes, experts.measure, experts.findings)


def origin_of(name: str) -> Origin:
    """Return whose an experts implementation is."""
    if is_user_kernel(name):
        return "yours"
    return "ours" if name == NAME else "transformers"


class ExpertsAudit:
    """Runs one registered implementation on a reduced layer of the family's own."""

    def __init__(
        self, geometry: ModelGeometry, options: Options, registered: str, sizes: layer.Sizes
    ) -> None:
        self.geometry, self.options = geometry, options
        self.registered, self.sizes = registered, sizes

    def measure(self, name: str) -> DtypeErrors:
        """Compare output and gradients in one dtype; note what changes with runs and batches."""
        dtype, device, seed = DTYPES[name], self.options.device, self.options.seed
        # No floor is below one rounding, and in float64 sums may go in any order.
        errors = DtypeErrors(name, 1e-11 if name == "fp64" else torch.finfo(dtype).eps)
        module = layer.build(self.geometry, self.sizes, device, dtype, seed)
        exact = layer.build(self.geometry, self.sizes, device, dtype, seed).double()
        inputs = layer.random_inputs(self.sizes, TOKENS, device, dtype, seed)
        wide = inputs._replace(hidden=inputs.hidden.double(), router=inputs.router.double())
        own, raised = layer.results(module, self.registered, inputs)
        errors.raised = named_line(raised) if raised else ""
        errors.compare(own, _defined(exact, wide), _defined(module, inputs))
        errors.repeat(own, layer.results(module, self.registered, inputs)[0])
        few = TOKENS // 3
        some = inputs._replace(hidden=inputs.hidden[:few], ids=inputs.ids[:few])
        together = own[OUT]
        assert together is not None
        with torch.no_grad():
            off = shared.difference(layer.run(module, self.registered, some), together[:few])
        if off:
            gap = shared.Gap("with others in the batch", name, off, errors.limit(OUT))
            errors.batches.append(gap)
        return errors

    def findings(self, measured: list[DtypeErrors]) -> Iterator[Finding]:
        """In the order of ``EXPERT_COLUMNS``, from the second."""
        yield shared.forward_finding(measured)
        names = [name for name in measured[0].off if name not in (OUT, ROUTER)]
        yield shared.backward_finding(measured, "gradient", names)
        yield shared.backward_finding(measured, "router_gradient", [ROUTER])
        yield from shared.determinism(measured)


def _defined(module: torch.nn.Module, inputs: layer.ExpertInputs) -> Tensors:
    """Return output and gradients of the definition."""
    tensors, raised = layer.results(module, None, inputs)
    if raised:
        raise raised
    return tensors
