"""Attention kernels that misbehave in ways that no feature has, for the audit's tests."""

from __future__ import annotations

from typing import Any

import torch

from tests.planted_attention import right

CALLS: list[int] = []
RAISED = "no kernel for this head size"
NOT_HALF = "bfloat16 is not supported"
RAGGED = "queries and keys differ in length"


def raises(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(RAISED)


def no_half(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
    """Right, but not for bfloat16."""
    if query.dtype == torch.bfloat16:
        raise TypeError(NOT_HALF)
    return right(module, query, *args, **kwargs)


def transposed(*args: Any, **kwargs: Any) -> Any:
    """Right numbers in the wrong order of axes."""
    return right(*args, **kwargs)[0].transpose(1, 2), None


def no_numbers(*args: Any, **kwargs: Any) -> Any:
    """NaN everywhere."""
    return right(*args, **kwargs)[0] * float("nan"), None


def detached(*args: Any, **kwargs: Any) -> Any:
    """Right forward, and nothing to go back through."""
    return right(*args, **kwargs)[0].detach(), None


def last_bit(*args: Any, **kwargs: Any) -> Any:
    """Right up to rounding, which changes from call to call."""
    CALLS.append(1)
    out = right(*args, **kwargs)[0]
    return out * (1 + len(CALLS) % 2 * torch.finfo(out.dtype).eps), None


def no_cache(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
    """Raises where there are fewer queries than keys."""
    if query.shape[2] != key.shape[2]:
        raise ValueError(RAGGED)
    return right(module, query, key, *args, **kwargs)


def neighbours(*args: Any, **kwargs: Any) -> Any:
    """A row gets a little of the row before it in its batch."""
    out = right(*args, **kwargs)[0]
    return out + 0.05 * out.roll(1, 0) * (len(out) > 1), None


def halved_scale(*args: Any, **kwargs: Any) -> Any:
    """Half the scale it is given: a fault that has no name."""
    return right(*args, **kwargs | {"scaling": 0.5 * kwargs["scaling"]})


def half_detached(*args: Any, **kwargs: Any) -> Any:
    """The right gradient of another output."""
    out = right(*args, **kwargs)[0]
    return out + 0.02 * out.detach(), None


def from_positions(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    """Right, and takes no mask: where to look comes from positions and window, as for flash."""
    rows, keys = kwargs["position_ids"][0], key.shape[2]
    distance = rows[:, None] - torch.arange(keys)
    if len(rows) == keys:
        document = (rows == 0).cumsum(0)
        distance = rows[:, None] - rows
        distance = torch.where(document[:, None] == document, distance, -1)
    window = kwargs["sliding_window"]
    looks = (distance >= 0) & (distance < (window or keys))
    return right(module, query, key, value, looks[None, None], **kwargs)


def adds_its_mask(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    """Right, with a mask of numbers: 0 or the least."""
    return right(module, query, key, value, mask == 0, **kwargs)
