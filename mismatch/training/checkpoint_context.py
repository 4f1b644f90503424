"""The state under which a part of a forward pass is recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch


def capture_rng_and_autocast(
    device: torch.device, random: bool = False
) -> Callable[[], AbstractContextManager[None]]:
    """Record the current autocast state, and the RNG state if ``random``.

    Returns:
        A context manager that restores both. Within it the random numbers are those that follow
        this call; the generators outside are not moved.
    """
    enabled = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type)
    state = _generator_states(device) if random else None

    @contextmanager
    def restored() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(device.type, dtype, enabled=enabled))
            if state is not None:
                devices = [device] if device.type == "cuda" else []
                stack.enter_context(torch.random.fork_rng(devices))
                torch.set_rng_state(state[0])
                if devices:
                    torch.cuda.set_rng_state(state[1], device)
            yield

    return restored


def _generator_states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states
