"""Whether a worker has stopped working: no line of output, and no processor time to speak of.

A process that waits for something that will never come (a rank that was stopped, a peer that died,
a lock) is idle. Loading, compiling and waiting for a GPU are not: they take processor time.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

from mismatch.errors import MismatchError

VARIABLE = "MISMATCH_STALL_S"
STALL_S = 900.0  # longer than a request to a server takes with its retries at the defaults
INTERVAL_S = 10.0
BUSY = 0.05  # of one core, all processes of the worker together


def stall_limit() -> float:
    """Seconds of idleness after which a worker is ended.

    Raises:
        MismatchError: the environment names no positive number.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        limit = float(text) if text else STALL_S
    except ValueError:
        limit = math.nan
    if not limit > 0:
        raise MismatchError(f"{VARIABLE}={text} is no time", "give seconds, e.g. 3600; inf: never")
    return limit


class StallWatch:
    """How long a worker has been idle.

    Args:
        pid: of its supervisor.
        lines: how many lines it has put out so far.
    """

    def __init__(self, pid: int, lines: Callable[[], int], limit_s: float) -> None:
        self.pid, self.lines, self.limit_s = pid, lines, limit_s
        self.interval_s = min(INTERVAL_S, limit_s / 5)
        self.last = self.active = time.monotonic()
        self.seen, self.used = lines(), processor_seconds(pid)

    def idle_s(self) -> float:
        """Seconds since it was last seen at work."""
        now = time.monotonic()
        if now - self.last >= self.interval_s:
            seen, used = self.lines(), processor_seconds(self.pid)
            # Less than before: a process that had used more has ended, which is activity too.
            worked = abs(used - self.used) > BUSY * (now - self.last)
            if seen != self.seen or worked:
                self.active = now
            self.last, self.seen, self.used = now, seen, used
        return now - self.active


def processor_seconds(pid: int) -> float:
    """Of all descendants, user and system."""
    import psutil

    total = 0.0
    try:
        family = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return total
    for process in family:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total
