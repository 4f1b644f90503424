"""Experts implementations against float64: output, gradients, determinism.

The module is the model family's own with random weights, reduced in size; the router before it has
fixed choices and differentiable weights. The reference runs every expert on every token.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mismatch.errors import MismatchError, named_line
from mismatch.features.kernels import expert_layer as layer
from mismatch.features.kernels import findings as shared
from mismatch.features.kernels.findings import DTYPES, OUT, DtypeErrors, Options
from mismatch.features.kernels.geometry import ModelGeometry
from mismatch.features.kernels.results import EXPERT_COLUMNS, Audit, Finding, Origin
from mismatch.training.experts import NAME, register
from mismatch.training.user_kernels import is_user_kernel, load_function, registered_name

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
    origin, registered, refused = origin_of(name), name, ""
    sizes = layer.reduced_sizes(geometry)
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
    device, seed = options.device, options.seed

    def measure(dtype_name: str) -> DtypeErrors:
        """Compare output and gradients in one dtype; note what changes with runs and batches."""
        dtype = DTYPES[dtype_name]
        # No floor is below one rounding, and in float64 sums may go in any order.
        least = 1e-11 if dtype_name == "fp64" else torch.finfo(dtype).eps
        errors = DtypeErrors(dtype_name, least)
        module = layer.build(geometry, sizes, device, dtype, seed)
        exact = layer.build(geometry, sizes, device, dtype, seed).double()
        inputs = layer.random_inputs(sizes, TOKENS, device, dtype, seed)
        wide = inputs._replace(hidden=inputs.hidden.double(), router=inputs.router.double())
        own, raised = layer.results(module, registered, inputs)
        errors.raised = named_line(raised) if raised else ""
        defined = (layer.results(*each) for each in ((exact, None, wide), (module, None, inputs)))
        errors.compare(own, *(tensors for tensors, _ in defined))
        errors.repeat(own, layer.results(module, registered, inputs)[0])
        few = TOKENS // 3
        some = inputs._replace(hidden=inputs.hidden[:few], ids=inputs.ids[:few])
        together = own[OUT]
        assert together is not None
        with torch.no_grad():
            off = shared.difference(layer.run(module, registered, some), together[:few])
        if off:
            gap = shared.Gap("with others in the batch", dtype_name, off, errors.limit(OUT))
            errors.batches.append(gap)
        return errors

    return shared.audited(about, EXPERT_COLUMNS, options.dtypes, measure, findings)


def findings(measured: list[DtypeErrors]) -> Iterator[Finding]:
    """In the order of ``EXPERT_COLUMNS``, from the second."""
    yield shared.forward_finding(measured)
    names = [name for name in measured[0].off if name not in (OUT, ROUTER)]
    yield shared.backward_finding(measured, "gradient", names)
    yield shared.backward_finding(measured, "router_gradient", [ROUTER])
    yield from shared.determinism(measured)


def origin_of(name: str) -> Origin:
    """Return whose an experts implementation is."""
    if is_user_kernel(name):
        return "yours"
    return "ours" if name == NAME else "transformers"


def register_experts(text: str) -> str:
    """Make the function known to transformers; its name there, always the same for the same text.

    Raises:
        MismatchError: see :func:`load_function`; or a mask, which experts have none of.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if "@" in text:
        raise MismatchError(f"{text}: experts take no mask", "leave out what follows @")
    function, _ = load_function(text)
    name = registered_name(text)
    ALL_EXPERTS_FUNCTIONS.register(name, function)
    return name
