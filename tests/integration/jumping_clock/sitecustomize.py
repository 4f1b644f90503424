"""On the path of a command under test: a clock that is set a day back and forth while it runs.

Each second question for the time is answered with another day. Waiting must go by the clock that
nobody sets (``time.monotonic``).
"""

import itertools
import os
import time

if os.environ.get("CLOCK_JUMPS"):
    told, days = time.time, itertools.cycle((0, 86400, 0, -86400))

    def jumping() -> float:
        return told() + next(days)

    time.time = jumping
    time.time_ns = lambda: int(jumping() * 1e9)
