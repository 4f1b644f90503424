"""A module ``sgl_kernel`` for a CPU without SGLang's kernels.

SGLang 0.5.23 imports a number of names from it whatever the model, and calls one of them in plain
decoding: that one is here, in torch. Every other name can be imported and refuses to be called, so
that nothing is ever computed in another way without a word.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import torch

NAME = "sgl_kernel"
MARK = "mismatch's stand-in for SGLang's CPU kernels"


def installed() -> bool:
    """Whether ``sgl_kernel`` in this process is ours."""
    return getattr(sys.modules.get(NAME), "__doc__", None) == MARK


def install() -> None:
    """Put the module where ``import sgl_kernel`` finds it."""
    if NAME in sys.modules:
        return
    module = types.ModuleType(NAME, MARK)
    module.__spec__ = importlib.machinery.ModuleSpec(NAME, None)
    vars(module)["assign_req_to_token_pool_cpu"] = assign_req_to_token_pool_cpu
    vars(module)["__getattr__"] = refusing
    sys.modules[NAME] = module


def refusing(name: str) -> Callable[..., NoReturn]:
    """A function of that name which only says that it is missing.

    Raises:
        AttributeError: a name that Python itself asks for.
    """
    if name.startswith("_"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs SGLang's own CPU kernels")

    missing.__name__ = name
    return missing


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Note in each request's row where the keys of its new tokens lie.

    Args:
        req_pool_indices: [R] rows of ``req_to_token``.
        req_to_token: [requests, pool_len] cache slot of every token; written in place.
        start_offset, end_offset: [R] first new token, and the one behind the last.
        out_cache_loc: slots of all new tokens, request by request.
    """
    taken = 0
    bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in bounds:
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start
