"""How much memory a block of code takes at its worst."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch


class MemoryPeak:
    """Most memory that a block of code takes, above what was in use before it.

    On a GPU the allocator knows; on a CPU the process's anonymous memory is sampled (mapped
    checkpoint files are not counted: the kernel can drop them at any time).
    """

    INTERVAL_S = 0.005

    def __init__(self, device: torch.device, active: bool) -> None:
        self.bytes: int | None = None
        self._read: Callable[[], int] | None = None
        self._device = device
        if active:
            self._read = _anonymous_bytes if device.type == "cpu" else self._allocated

    def _allocated(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def __enter__(self) -> MemoryPeak:
        if self._read is None:
            return self
        if self._device.type != "cpu":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._base, self._highest = self._read(), 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
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
        if self._read is None:
            return
        self._done.set()
        self._thread.join()
        self.bytes = max(self._highest, self._read()) - self._base


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
