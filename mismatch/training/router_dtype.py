"""Routers in float32 inside a model that computes in less: an intervention on the blocks.

The linear map onto the experts is multiplied in float32 from the weights and hidden states as they
are (their rounding to the dtype of the computation stays: that comes before), and nothing rounds
its logits again before the softmax and the choice. The experts then get float32 weights, as vLLM's
do. It needs no other load of the model.
"""

from __future__ import annotations

from typing import Any

import torch

from mismatch.training.answering import Answering, RouterChange
from mismatch.training.routing import MoeLayer


class RouterDtype(RouterChange):
    """Every router's linear map in ``dtype``, for one forward pass."""

    unreached = (
        "--router-dtype: the router{where} has no linear map onto its experts",
        "this family's router is built in a way that is not known: leave it out",
    )

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def answering(self, layer: MoeLayer, block: torch.nn.Module) -> Answering:
        return _Upcast(self, layer)


class _Upcast(Answering):
    def __init__(self, change: RouterDtype, layer: MoeLayer) -> None:
        super().__init__()
        self.change, self.layer = change, layer

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is not torch.nn.functional.linear:
            return func(*args, **kwargs)
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        if weight.shape[0] != self.layer.num_experts:
            return func(*args, **kwargs)
        self.change.reached(self.layer)
        dtype = self.change.dtype
        upcast = [_to(value, dtype) for value in args]
        named = {name: _to(value, dtype) for name, value in kwargs.items()}
        with torch.autocast(weight.device.type, enabled=False):
            return func(*upcast, **named)


def _to(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) else value
