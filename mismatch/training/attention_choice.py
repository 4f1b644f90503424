"""Which kernel with sinks ``--attention auto`` takes: the fastest that is right on this machine.

Candidates are tried in the order of their speed, forward and backward, at the model's geometry (see
:mod:`mismatch.training.attention_check`). One kernel then serves all passes of its dtype, with
gradients and without, whatever the length (docs/decisions, number 4): so all of it must be right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import distributed

from mismatch.training.attention_check import Geometry, Trial, try_kernel

FLASH = "kernels-community/vllm-flash-attn3"


@cache
def trial(
    implementation: str, geometry: Geometry, device: torch.device, dtype: torch.dtype
) -> Trial:
    """Of one kernel, once per process."""
    return try_kernel(implementation, geometry, device, dtype)


def first_right(
    candidates: Mapping[str, Callable[[], str]],
    geometry: Geometry,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[str | None, tuple[str, ...]]:
    """The first candidate that passes on every rank, and what was found of each.

    Args:
        candidates: name -> what gives its registered name, or raises where it cannot run.

    Returns:
        The registered name, None if none passes; one line per candidate that was tried.
    """
    tried: list[str] = []
    for name, register in candidates.items():
        implementation = ""
        try:
            implementation = register()
        except Exception as error:  # not installed, not downloadable, not for this family
            fault = getattr(error, "message", None) or str(error).strip() or type(error).__name__
        else:
            found = trial(implementation, geometry, device, dtype)
            fault = found.fault or found.backward_fault
        if _everywhere(not fault, device):
            return implementation, (*tried, f"{name}: passed")
        tried.append(f"{name}: {fault.splitlines()[0] if fault else 'failed on another rank'}")
    return None, tuple(tried)


def _everywhere(passed: bool, device: torch.device) -> bool:
    """Whether it holds on all ranks: they must not run different kernels."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return passed
    vote = torch.tensor(int(passed), device=device)
    distributed.all_reduce(vote, distributed.ReduceOp.MIN)
    return bool(vote)
