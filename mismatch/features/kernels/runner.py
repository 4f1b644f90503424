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
    """One registered attention implementation at a model's geometry.

    Args:
        registered: its name in transformers' registry.
    """

    def __init__(self, geometry: ModelGeometry, registered: str) -> None:
        self.geometry, self.registered = geometry, registered
        self._function = function_of(geometry, registered)

    def __call__(self, case: Case, inputs: Inputs) -> torch.Tensor:
        """[B, T, H, Dv].

        Raises:
            Exception: whatever the kernel raises.
            ValueError: it returns another shape.
        """
        device = str(inputs.query.device)
        config = self._config(case, inputs.query.dtype)
        extra = {} if inputs.sinks is None else {"s_aux": inputs.sinks}
        result = self._function(
            _layer(self.geometry, config, inputs),
            *inputs[:3],
            self.mask(case, config, inputs),
            dropout=0.0,
            scaling=case.scaling,
            sliding_window=case.window,
            position_ids=positions_of(case, device),
            **extra,
        )
        out = result[0] if isinstance(result, tuple) else result
        wanted = (case.rows, case.queries, self.geometry.heads, self.geometry.value_dim)
        if not isinstance(out, torch.Tensor) or tuple(out.shape) != wanted:
            shape = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
            raise ValueError(f"it returns {shape}, not [B, T, H, Dv] = {wanted}")
        return out

    def mask(self, case: Case, config: Any, inputs: Inputs) -> Any:
        """What transformers makes for this implementation, from positions, padding and cache."""
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        query = inputs.query
        build: Any = create_sliding_window_causal_mask if case.window else create_causal_mask
        return build(
            config=config,
            inputs_embeds=query.new_empty(case.rows, case.queries, 1),
            attention_mask=_padding(case, query.device),
            past_key_values=_Cache(case) if case.queries < case.keys else None,
            position_ids=positions_of(case, str(query.device)),
        )

    def _config(self, case: Case, dtype: torch.dtype) -> Any:
        return SimpleNamespace(
            _attn_implementation=self.registered,
            sliding_window=case.window,
            dtype=dtype,
            is_causal=True,
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
    """The function behind a name; ``eager`` is the family's own.

    Raises:
        KeyError: no such name, or a family without a function for eager attention.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if registered != "eager":
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[registered]
        return function
    for module in geometry.bare.modules():
        home = sys.modules[type(module).__module__]
        if "attention" in type(module).__name__.lower() and hasattr(
            home, "eager_attention_forward"
        ):
            own: Callable[..., Any] = home.eager_attention_forward
            return own
    raise KeyError(f"{geometry.model_type} has no eager attention behind transformers' interface")


def _layer(geometry: ModelGeometry, config: Any, inputs: Inputs) -> torch.nn.Module:
    """What kernels ask of the attention layer that calls them."""
    layer: Any = torch.nn.Linear(1, 1, dtype=inputs.query.dtype)  # flash looks for a weight's dtype
    layer.config, layer.layer_idx, layer.is_causal = config, 0, True
    layer.num_key_value_groups = geometry.heads // geometry.kv_heads
    layer.head_dim, layer.scaling = geometry.head_dim, geometry.scaling
    layer.sliding_window = config.sliding_window
    layer.train()
    if inputs.sinks is not None:
        layer.sinks = inputs.sinks  # eager reads it here
    return layer  # type: ignore[no-any-return]


def _padding(case: Case, device: torch.device) -> torch.Tensor | None:
    """[B, S] 1 for real tokens; None where there is no padding."""
    if not case.lengths:
        return None
    lengths = torch.tensor(case.lengths, device=device)
    return (torch.arange(case.keys, device=device) < lengths[:, None]).long()
