"""The audit of one attention implementation: features, errors against float64, determinism.

Each check runs the kernel on inputs with that feature alone, and compares the output with the
reference and with the outputs of known faults: the nearest one names what the kernel did instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from mismatch.errors import named_line
from mismatch.features.kernels import cases
from mismatch.features.kernels import findings as shared
from mismatch.features.kernels.candidates import Candidate
from mismatch.features.kernels.cases import Case, Inputs, allowed, attention, positions_of
from mismatch.features.kernels.findings import DTYPES, OUT, DtypeErrors, Options, Tensors
from mismatch.features.kernels.geometry import ModelGeometry
from mismatch.features.kernels.results import ATTENTION_COLUMNS, Audit, Finding

NO_SINKS = "the model has no attention sinks"
RIGHT, UNNAMED = "as it should be", "not as it should be"
# An error as large as that with all features on is left to the column "forward", as long as the
# output is clearly nearer to the reference than to that of a kernel with a known fault.
ELSEWHERE = 3.0
NEARER = 3.0

# What a faulty kernel does: options of :func:`allowed`, and of the reference.
Fault = tuple[dict[str, Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Check:
    """One case, and known faults on it by their description."""

    column: str
    case: Case
    faults: dict[str, Fault]


COLUMNS = {  # of features -> why a model has none of it
    "sinks": NO_SINKS,
    "window": "the model has no layers with a sliding window",
    "packing": "",
    "offsets": "",
    "grouped_queries": "the model has a key head for every query head",
    "scaling": "",
}


def audit_attention(geometry: ModelGeometry, options: Options, candidate: Candidate) -> Audit:
    """Run one implementation through all columns; errors of the kernel become findings.

    A kernel that the model refuses is measured too, and is not usable.
    """
    name, origin, chosen = candidate.name, candidate.origin, candidate.chosen
    about = Audit(name, "attention", origin, "unusable", candidate.refused, False, chosen)
    kernel = AttentionAudit(geometry, options, candidate.registered)
    return shared.audited(about, ATTENTION_COLUMNS, options.dtypes, kernel.measure, kernel.findings)


class AttentionAudit:
    """Runs one registered implementation on the cases of :mod:`.cases`."""

    def __init__(self, geometry: ModelGeometry, options: Options, registered: str) -> None:
        self.geometry, self.options = geometry, options
        self.runner = Runner(geometry, registered)

    def findings(self, measured: list[DtypeErrors]) -> Iterator[Finding]:
        """In the order of ``ATTENTION_COLUMNS``, from the second."""
        checks = list(checks_of(self.geometry))
        for column, absent in COLUMNS.items():
            outcomes = [
                self._feature(check, errors)
                for errors in measured
                for check in checks
                if check.column == column
            ]
            missing = Finding(column, "not_tested", absent)
            yield max(outcomes, key=_badness, default=missing)
        yield shared.forward_finding(measured)
        yield shared.backward_finding(measured, "gradient", ("q", "k", "v"))
        absent = "" if self.geometry.sinks else NO_SINKS
        yield shared.backward_finding(measured, "sink_gradient", ("sinks",), absent)
        yield from shared.determinism(measured)

    def measure(self, dtype: str) -> DtypeErrors:
        """Run all cases of the model in one dtype; an error of the forward pass is raised."""
        errors, full = DtypeErrors(dtype), cases.full(self.geometry)
        for case in full:
            inputs, mask = self._inputs(case, dtype), allowed(case, self.options.device)
            exact, rough = inputs.leaves(torch.float64), inputs.leaves()
            right = attention(exact, mask, case.scaling)
            floor = cases.rounded(rough, mask, case.scaling)
            weights = self._weights(right)
            own = self._results(case, inputs, errors)
            errors.compare(
                own,
                {OUT: right, **shared.gradients(exact.named, right, weights)},
                {OUT: floor, **shared.gradients(rough.named, floor, weights)},
            )
            if case is full[0]:
                errors.repeat(own, self._results(case, inputs, errors))
        self._batches(errors)
        return errors

    def _inputs(self, case: Case, dtype: str) -> Inputs:
        options = self.options
        return cases.inputs_of(self.geometry, case, options.device, DTYPES[dtype], options.seed)

    def _weights(self, like: torch.Tensor) -> torch.Tensor:
        """Return random weights around 1: they reduce the output to one number, none cancels."""
        draw = torch.Generator().manual_seed(self.options.seed + 1)
        weights = 1.0 + torch.randn(like.shape, generator=draw, dtype=torch.float64)
        return weights.to(like.device)

    def _results(self, case: Case, inputs: Inputs, errors: DtypeErrors) -> Tensors:
        """Return output and gradients; an error of the backward pass is noted."""
        leaves = inputs.leaves()
        out = self.runner(case, leaves)
        results: Tensors = {OUT: out.detach()}
        try:
            return results | shared.gradients(leaves.named, out, self._weights(out))
        except Exception as error:  # no backward pass, none in this dtype, no gradient at all …
            errors.raised = errors.raised or named_line(error)
            return results

    def _batches(self, errors: DtypeErrors) -> None:
        """Compare a row alone, next to two others, and padded next to longer rows."""
        base = replace(cases.full(self.geometry)[0], rows=3)
        short = base.keys - 9
        padded = replace(base, lengths=(base.keys, short, short - 3))
        inputs = self._inputs(base, errors.dtype)
        companies = (("with two others", base, base.keys), ("with longer rows", padded, short))
        for words, case, length in companies:
            query, key, value = (x[1:2, :, :length] for x in inputs[:3])
            single = replace(case, rows=1, queries=length, keys=length, lengths=())
            with torch.no_grad():
                try:
                    alone = self.runner(single, Inputs(query, key, value, inputs.sinks))
                    together = self.runner(case, inputs)[1:2, :length]
                except Exception as error:
                    errors.alone = named_line(error)
                    return
            if off := shared.difference(together, alone):
                errors.batches.append(shared.Gap(words, errors.dtype, off, errors.limit(OUT)))

    def _feature(self, check: Check, errors: DtypeErrors) -> Finding:
        """Run one check in one dtype, and name the fault whose output is nearest."""
        column, case, device = check.column, check.case, self.options.device
        inputs = self._inputs(case, errors.dtype)
        where = f"with {case.label} in {errors.dtype}"
        with torch.no_grad():
            try:
                out = self.runner(case, inputs)
            except Exception as error:  # a kernel may raise anything
                return Finding(column, "failed", f"does not run {where}: {named_line(error)}")
            numbers, mask = inputs.leaves(torch.float64), allowed(case, device)
            right = attention(numbers, mask, case.scaling)
            floor = cases.rounded(inputs, mask, case.scaling)
            limit = shared.limit_of(shared.relative_error(floor, right))
            off = shared.relative_error(out, right)
            faults = {}
            for fault, (masked, options) in check.faults.items():
                looks, changed = (
                    allowed(case, device, **masked),
                    {"scaling": case.scaling, **options},
                )
                wrong = attention(numbers, looks, **changed)
                # Only those that change this case: a last query has no keys after it.
                if shared.relative_error(wrong, right) > limit:
                    faults[fault] = shared.relative_error(out, wrong)
        if off <= limit:
            return Finding(column, "passed", RIGHT, off, limit)
        if off == float("inf"):
            return Finding(column, "failed", f"gives NaN or inf {where}", None, limit)
        nearest = min(faults, key=lambda fault: faults[fault])
        elsewhere = min(ELSEWHERE * errors.off[OUT], faults[nearest] / NEARER)
        if off <= elsewhere:
            detail = f"{RIGHT}: the output is off by {shared.percent(off)} for another reason"
            return Finding(column, "passed", detail, off, elsewhere)
        named = faults[nearest] <= max(limit, off / NEARER)
        detail = f"{nearest if named else UNNAMED}: output off by {shared.percent(off)} {where}"
        return Finding(column, "failed", detail, off, limit)


def _badness(finding: Finding) -> tuple[bool, float]:
    failed = finding.outcome == "failed"
    if finding.value is None or finding.limit is None:
        return failed, float("inf")
    return failed, finding.value / finding.limit


def checks_of(geometry: ModelGeometry) -> Iterator[Check]:
    """Yield all checks that apply to the model."""
    base = cases.plain(geometry)
    if geometry.sinks:
        yield Check("sinks", replace(base, sinks="on"), {"drops the sinks": ({}, {"sinks": False})})
    if geometry.sizes.window is not None:
        width = cases.short_window(geometry)
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
    if geometry.sizes.kv_heads < geometry.sizes.heads:
        faults = {"hands key heads out in turn, not to neighbours": ({}, {"neighbours": False})}
        yield Check("grouped_queries", replace(base, grouped=True), faults)
    for scaling in {0.6 * base.scaling, geometry.scaling} - {base.scaling}:
        faults = {
            "uses head_dim ** -0.5 whatever scale is given": ({}, {"scaling": base.scaling}),
            "does not scale at all": ({}, {"scaling": 1.0}),
            "applies head_dim ** -0.5 and the scale": ({}, {"scaling": scaling * base.scaling}),
        }
        yield Check("scaling", replace(base, scaling=scaling), faults)


class Runner:
    """One registered attention implementation at a model's geometry."""

    def __init__(self, geometry: ModelGeometry, registered: str) -> None:
        self.geometry, self.registered = geometry, registered
        self._function = function_of(geometry, registered)

    def __call__(self, case: Case, inputs: Inputs) -> torch.Tensor:
        """[B, T, H, Dv]; raises what the kernel raises, and ValueError for another shape."""
        query, sizes = inputs.query, self.geometry.sizes
        config = SimpleNamespace(
            _attn_implementation=self.registered,
            sliding_window=case.window,
            dtype=query.dtype,
            is_causal=True,
        )
        # What kernels ask of the attention layer that calls them; flash looks for a weight's dtype.
        layer: Any = torch.nn.Linear(1, 1, dtype=query.dtype).train()
        layer.config, layer.layer_idx, layer.is_causal = config, 0, True
        layer.num_key_value_groups = sizes.heads // sizes.kv_heads
        layer.head_dim, layer.scaling = sizes.head_dim, self.geometry.scaling
        layer.sliding_window = case.window
        extra = {}
        if inputs.sinks is not None:
            layer.sinks = inputs.sinks  # eager reads it here
            extra = {"s_aux": inputs.sinks}
        result = self._function(
            layer,
            *inputs[:3],
            _mask(case, config, query),
            dropout=0.0,
            scaling=case.scaling,
            sliding_window=case.window,
            position_ids=positions_of(case, str(query.device)),
            **extra,
        )
        out = result[0] if isinstance(result, tuple) else result
        wanted = (case.rows, case.queries, sizes.heads, sizes.value_dim)
        if not isinstance(out, torch.Tensor) or tuple(out.shape) != wanted:
            shape = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
            raise ValueError(f"it returns {shape}, not [B, T, H, Dv] = {wanted}")
        return out


def _mask(case: Case, config: Any, query: torch.Tensor) -> Any:
    """Return what transformers makes for this implementation, from positions, padding and cache."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    build: Any = create_sliding_window_causal_mask if case.window else create_causal_mask
    real = None  # [B, S] 1 for real tokens; None where there is no padding
    if case.lengths:
        lengths = torch.tensor(case.lengths, device=query.device)
        real = (torch.arange(case.keys, device=query.device) < lengths[:, None]).long()
    return build(
        config=config,
        inputs_embeds=query.new_empty(case.rows, case.queries, 1),
        attention_mask=real,
        past_key_values=_Cache(case) if case.queries < case.keys else None,
        position_ids=positions_of(case, str(query.device)),
    )


class _Cache:
    """What mask builders ask of a cache that holds the keys before the queries."""

    is_compileable = False

    def __init__(self, case: Case) -> None:
        self._keys, self._before = case.keys, case.keys - case.queries

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._before

    def get_mask_sizes(self, q_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._keys, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._before


def function_of(geometry: ModelGeometry, registered: str) -> Callable[..., Any]:
    """Return the function behind a name; ``eager`` is the family's own."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if registered != "eager":
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[registered]
        return function
    for module in geometry.bare.modules():
        home: Any = sys.modules[type(module).__module__]
        named = "attention" in type(module).__name__.lower()
        if named and hasattr(home, "eager_attention_forward"):
            own: Callable[..., Any] = home.eager_attention_forward
            return own
    raise KeyError(f"{geometry.model_type} has no eager attention behind transformers' interface")
