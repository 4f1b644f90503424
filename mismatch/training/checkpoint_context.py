"""Running a part of a forward pass a second time, in a backward pass, as it ran the first time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch


def capture_rng_and_autocast(
    device: torch.device, random: bool = False
) -> Callable[[], AbstractContextManager[None]]:
    """What enters the autocast of this moment again, and where asked the random numbers.

    Within the block random numbers are those that are about to be drawn now; after it those
    outside go on as if nothing had been drawn.
    """
    enabled = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type)
    state = _generator_states(device) if random else None

    @contextmanager
    def again() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(device.type, dtype, enabled=enabled))
            if state is not None:
                devices = [device] if device.type == "cuda" else []
                stack.enter_context(torch.random.fork_rng(devices))
                torch.set_rng_state(state[0])
                if devices:
                    torch.cuda.set_rng_state(state[1], device)
            yield

    return again


def _generator_states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states
