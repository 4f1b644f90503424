"""Work on several blocks at a time: numpy lets other threads run while it computes.

Results come in the order of the blocks, whatever the number of threads, so that whoever adds them
up gets the same bits.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST = 4  # threads; each holds a block's arrays, and Python itself runs on one at a time


def usable() -> int:
    """Processors that this process may run on, at most ``MOST``."""
    allowed = getattr(os, "sched_getaffinity", None)
    return min(len(allowed(0)) if allowed else os.cpu_count() or 1, MOST)


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], threads: int
) -> Iterator[Result]:
    """``map(work, items)``, a few items ahead. Items are drawn by the calling thread."""
    if threads < 2:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[Result]] = deque()
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
