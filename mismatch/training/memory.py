"""Peak memory of a block of code, and the state under which a part is recomputed to save it."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

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


class MemoryPeak:
    """Peak memory of a block of code, above what was in use before it, and its duration.

    On a GPU the allocator counts; on a CPU the process's anonymous memory is sampled (mapped
    checkpoint files are not counted: the kernel can drop them at any time). Free memory that the C
    library holds is returned to the system first: its reuse would not show.

    Attributes:
        bytes: None until the block has ended, or if not active.
        seconds: wall clock of the block; 0.0 until it has ended.
    """

    INTERVAL_S = 0.005

    def __init__(self, device: torch.device, active: bool) -> None:
        self.bytes: int | None = None
        self.seconds = 0.0
        self._read: Callable[[], int] | None = None
        self._device = device
        self._thread: threading.Thread | None = None
        if active:
            self._read = _anonymous_bytes if device.type == "cpu" else self._allocated

    def _allocated(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def __enter__(self) -> MemoryPeak:
        self._start = time.monotonic()
        if self._read is None:
            return self
        if self._device.type == "cpu":
            _return_free_memory()
            self._thread = threading.Thread(target=self._sample, daemon=True)
        else:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._base, self._highest = self._read(), 0
        self._done = threading.Event()
        if self._thread is not None:
            self._thread.start()
        return self

    def _sample(self) -> None:
        assert self._read is not None
        while True:
            self._highest = max(self._highest, self._read())
            if self._done.wait(self.INTERVAL_S):
                return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.seconds = time.monotonic() - self._start
        if self._read is None:
            return
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        self.bytes = max(self._highest, self._read()) - self._base


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _return_free_memory() -> None:
    """Let glibc return free memory to the system; other C libraries have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
