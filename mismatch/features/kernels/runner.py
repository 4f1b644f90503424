"""Run one attention implementation as transformers would, at a model's geometry."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from mismatch.features.kernels.cases import Case, Inputs, positions_of
from mismatch.features.kernels.geometry import ModelGeometry


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
