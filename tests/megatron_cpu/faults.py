"""Faults of a parallel layout, planted in Megatron-Core's own objects by ``MEGATRON_FAULT``.

Most are of the second rank of a group alone, where a test on one rank cannot see them; on one rank
there is no such rank and no fault.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import cross_entropy, layers
from megatron.core.transformer.moe.router import TopKRouter


def experts(model: torch.nn.Module, part: str) -> list[Any]:
    """Return one linear layer of every local expert, by layer."""
    return [
        [getattr(expert, part).weight for expert in module.local_experts]
        for module in model.modules()
        if hasattr(module, "local_experts")
    ]


def dropped(model: torch.nn.Module) -> None:
    """Rank 1's experts of the last layer add nothing."""
    for weight in experts(model, "linear_fc2")[-1]:
        weight.zero_()


def permuted(model: torch.nn.Module) -> None:
    """Rank 1's experts stand in the other order, as after a wrong offset on loading."""
    for part in ("linear_fc1", "linear_fc2"):
        for weights in experts(model, part):
            others = [each.clone() for each in weights[::-1]]
            for weight, other in zip(weights, others, strict=True):
                weight.copy_(other)


def biased(model: torch.nn.Module) -> None:
    """Rank 1's routers add a bias that those of rank 0 do not have."""
    gating = TopKRouter.gating

    def with_bias(self: Any, given: torch.Tensor) -> torch.Tensor:
        logits = gating(self, given)
        return logits + torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)

    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.gating = with_bias.__get__(module)


def stale(model: torch.nn.Module) -> None:
    """Rank 1 holds the first layer's shard where the second layer's belongs."""
    decoder: Any = model.get_submodule("decoder")
    first, second = decoder.layers[0].self_attention, decoder.layers[1].self_attention
    second.linear_qkv.weight.copy_(first.linear_qkv.weight)


def unreduced_head(model: torch.nn.Module) -> None:
    """The sum of exponentials is each rank's own: its part of the vocabulary is all there is."""

    class Part:
        """torch.distributed whose last reduction of a cross-entropy does nothing."""

        ReduceOp = dist.ReduceOp
        calls = 0

        def all_reduce(self, tensor: torch.Tensor, **named: Any) -> None:
            self.calls += 1
            if self.calls % 3:  # the maximum, the chosen logit, the sum
                dist.all_reduce(tensor, **named)

    class Torch:
        distributed = Part()

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    cross_entropy.torch = Torch()


def unreduced_rows(model: torch.nn.Module) -> None:
    """Row-parallel layers of the last block return the rank's own part of the sum."""
    decoder: Any = model.get_submodule("decoder")
    last = decoder.layers[-1].self_attention.linear_proj
    run, reduce = last.forward, layers.reduce_from_tensor_model_parallel_region

    def forward(*given: Any, **named: Any) -> Any:
        layers.reduce_from_tensor_model_parallel_region = lambda tensor, group=None: tensor
        try:
            return run(*given, **named)
        finally:
            layers.reduce_from_tensor_model_parallel_region = reduce

    last.forward = forward


OF_EXPERTS = {"dropped": dropped, "permuted": permuted, "biased": biased}
OF_TENSORS = {"stale": stale}
OF_ALL = {"unreduced_head": unreduced_head, "unreduced_rows": unreduced_rows}


def plant(adapter: Any) -> None:
    """Let the adapter's class plant the fault after loading."""
    right = adapter.Megatron

    class Megatron(right):  # type: ignore[misc]
        def __init__(self, job: Any) -> None:
            super().__init__(job)
            fault = os.environ["MEGATRON_FAULT"]
            model = getattr(self.model, "module", self.model)
            if fault == "dies" and dist.get_rank() == 1:
                os._exit(9)
            with torch.no_grad():
                if fault in OF_ALL:
                    OF_ALL[fault](model)
                if fault in OF_EXPERTS and parallel_state.get_expert_model_parallel_rank() == 1:
                    OF_EXPERTS[fault](model)
                if fault in OF_TENSORS and parallel_state.get_tensor_model_parallel_rank() == 1:
                    OF_TENSORS[fault](model)

    adapter.Megatron = Megatron
