"""A server at work in a pool: what it has to do, how it fails, and when it is asked again."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

FIRST_REST_S, LONGEST_REST_S = 0.5, 30.0
LONGEST_WAIT_S = 300.0  # that a Retry-After is honoured for


class Changed(Exception):
    """A server is not what it was: other weights, version or settings.

    Attributes:
        reason: one phrase.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class Member:
    """One server at work in a pool.

    Attributes:
        name: how it is called in messages.
        unconfirmed: jobs that it answered since it was last verified.
        flying: requests that it has now.
        failures, busy: in a row.
        rest_until: not asked before that (monotonic seconds).
        doubtful: has to be verified before it gets work again.
        dropped: why it gets no work any more; None: it does.
        counts: answers, failures and time-outs, for the record.
    """

    name: str
    server: Any
    queue: deque[int] = field(default_factory=deque)
    unconfirmed: list[int] = field(default_factory=list)
    flying: int = 0
    failures: int = 0
    busy: int = 0
    rest_until: float = 0.0
    last_failure: float = 0.0
    last_verified: float = 0.0
    doubtful: bool = False
    verifying: bool = False
    dropped: str | None = None
    counts: dict[str, int] = field(
        default_factory=lambda: {"answers": 0, "failures": 0, "timeouts": 0, "busy": 0, "void": 0}
    )


def rest_s(failures: int, retry_after_s: float | None) -> float:
    """How long to leave a server alone: what it asked for, else twice as long each time.

    With jitter, so that several clients do not come back at the same moment.
    """
    if retry_after_s is not None:
        return min(retry_after_s, LONGEST_WAIT_S) * (1.0 + 0.1 * random.random())
    grown = min(LONGEST_REST_S, FIRST_REST_S * 2.0 ** max(0, failures - 1))
    return grown * (0.5 + random.random())
