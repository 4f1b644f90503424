"""Many requests to several servers: a queue per server, stolen work, backoff, verification.

One thread (the caller's) owns all state; every request runs in a thread of its own and hands its
outcome back through a queue, so nothing here needs a lock.

Every server has a queue of neighbouring jobs, so that the samples of one prompt share its prefix
cache; an idle server steals from the end of a queue that its owner cannot begin soon. No request is
ever sent to two servers at once: the first of two answers is more often the shorter one, and taking
it would bias the sample.

A server that fails backs off, longer each time, and is verified before it gets work again. After
``DROP_AFTER`` failures in a row it is dropped and its work goes to the others; its answers count,
``unconfirmed`` says how many no later verification has confirmed. A server that turns out to be
another one is dropped at once, and its answers since the last verification are asked for again.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mismatch.engines.servers.http import Refused, Unavailable, backoff_s
from mismatch.errors import MismatchError

DROP_AFTER = 6  # failures in a row
DROP_BUSY_AFTER = 30  # busy answers in a row
ATTEMPTS = 4  # of one job, on any server
VERIFY_EVERY_S = 60.0
COUNTS = ("answers", "failures", "timeouts", "busy", "void")


class ServerChanged(Exception):
    """A server is not what it was: other weights, version or settings. Its text is one phrase."""


class NoServerLeft(MismatchError):
    """Every server was dropped."""


@dataclass
class ServerState:
    """One server at work.

    Attributes:
        name: how it is called in messages.
        unconfirmed: jobs that it answered since it was last verified.
        in_flight: requests that it has now.
        failures, busy: in a row.
        backoff_until: gets no request before that (monotonic seconds).
        needs_verification: has to be verified before it gets work again.
        dropped: why it gets no work any more; None: it does.
        counts: of ``COUNTS``, for the fingerprint.
    """

    name: str
    server: Any
    queue: deque[int] = field(default_factory=deque)
    unconfirmed: list[int] = field(default_factory=list)
    in_flight: int = 0
    failures: int = 0
    busy: int = 0
    backoff_until: float = 0.0
    last_failure: float = 0.0
    last_verified: float = 0.0
    needs_verification: bool = False
    verifying: bool = False
    dropped: str | None = None
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))


@dataclass(frozen=True)
class JobCallbacks:
    """What a run's jobs (integers) do.

    Attributes:
        ask: (server, job) -> answer; in a thread of its own.
        done: takes (job, state, answer) once.
        void: takes (jobs, state): these answers do not count any more.
    """

    ask: Callable[[Any, int], Any]
    done: Callable[[int, ServerState, Any], None]
    void: Callable[[list[int], ServerState], None]


class Scheduler:
    """Runs jobs on servers.

    Args:
        verify: raises ``ServerChanged`` where a server is not what it was, ``Unavailable`` where it
            cannot say.
        concurrency: requests at a time, per server.
        log: one line for the user.
    """

    def __init__(
        self,
        states: Sequence[ServerState],
        verify: Callable[[Any], None],
        concurrency: int,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.states = list(states)
        self._verify = verify
        self._concurrency = concurrency
        self._log = log

    def run(self, jobs: Sequence[int], work: JobCallbacks) -> None:
        """Until every job has an answer of a server that was the same before and after it.

        Raises:
            NoServerLeft: all servers were dropped.
            MismatchError: a job failed on ``ATTEMPTS`` tries, or was refused.
        """
        self._work = work
        self._open = set(jobs)  # jobs without an answer that counts
        self._attempts: dict[int, list[str]] = {}
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._deal(sorted(jobs))
        while self._open or any(s.unconfirmed or s.verifying for s in self._alive()):
            if self._open and not self._alive():
                reasons = "; ".join(f"{state.name}: {state.dropped}" for state in self.states)
                raise NoServerLeft(f"no server is left ({reasons})", "start the servers again")
            for state in self._alive():
                self._assign(state)
            now = time.monotonic()
            pauses = [s.backoff_until - now for s in self._alive() if s.backoff_until > now]
            try:
                handle = self._events.get(timeout=min(pauses, default=1.0))
            except queue.Empty:
                continue
            handle()

    def _deal(self, jobs: Sequence[int]) -> None:
        """Neighbouring jobs to the same server, equal shares."""
        alive = self._alive()
        share = -(-len(jobs) // max(1, len(alive))) or 1
        for number, state in enumerate(alive):
            state.queue = deque(jobs[number * share : (number + 1) * share])
            state.last_verified = time.monotonic()

    def _alive(self) -> list[ServerState]:
        return [state for state in self.states if state.dropped is None]

    # ------------------------------------------------------------ what a server does next

    def _assign(self, state: ServerState) -> None:
        now = time.monotonic()
        if state.verifying or now < state.backoff_until:
            return
        answered = not self._open and state.unconfirmed
        overdue = self._open and now - state.last_verified > VERIFY_EVERY_S
        if state.needs_verification or overdue or answered:
            state.verifying = True
            seen = len(state.unconfirmed)  # later answers are confirmed by the next verification
            self._start(
                partial(self._verify, state.server), partial(self._verified, state, seen, now)
            )
            return
        while state.in_flight < self._concurrency and (job := self._take(state)) is not None:
            state.in_flight += 1
            self._start(
                partial(self._work.ask, state.server, job), partial(self._answered, state, job, now)
            )

    def _take(self, state: ServerState) -> int | None:
        """Its own next job, or the last of the server that has most beyond what it can begin."""
        if state.queue:
            return state.queue.popleft()
        victim = max(self._alive(), key=self._excess)
        return victim.queue.pop() if self._excess(victim) > 0 else None

    def _excess(self, state: ServerState) -> int:
        idle = state.needs_verification or time.monotonic() < state.backoff_until
        return len(state.queue) - (0 if idle else self._concurrency - state.in_flight)

    def _start(
        self, call: Callable[[], Any], then: Callable[[Any, BaseException | None], None]
    ) -> None:
        """``call`` in a thread, and its outcome to ``then`` in this one."""
        events = self._events

        def run() -> None:
            try:
                result, error = call(), None
            except BaseException as caught:
                result, error = None, caught
            events.put(lambda: then(result, error))

        threading.Thread(target=run, daemon=True).start()

    # ------------------------------------------------------------ outcomes

    def _verified(
        self, state: ServerState, seen: int, started: float, _: Any, error: BaseException | None
    ) -> None:
        state.verifying = False
        match error:
            case None:
                del state.unconfirmed[:seen]
                state.needs_verification, state.failures, state.busy = False, 0, 0
                state.last_verified = time.monotonic()
            case ServerChanged():
                self._replace(state, str(error))
            case Unavailable():
                self._failed(state, error, started)
            case _:
                raise error

    def _answered(
        self, state: ServerState, job: int, started: float, answer: Any, error: BaseException | None
    ) -> None:
        state.in_flight -= 1
        match error:
            case None if state.dropped is None:
                state.failures = state.busy = 0
                state.counts["answers"] += 1
                state.unconfirmed.append(job)
                self._open.discard(job)
                self._work.done(job, state, answer)
            case None:  # it was dropped meanwhile
                self._queue_again(state, job)
            case Unavailable():
                self._queue_again(state, job, None if error.kind == "busy" else error.reason)
                self._failed(state, error, started)
            case ServerChanged():
                self._queue_again(state, job)
                self._replace(state, str(error))
            case Refused():
                raise MismatchError(
                    f"{state.name} refuses a request (HTTP {error.status}): {error.reason}",
                    "look into the server's log; its version may not know what is asked for",
                ) from error
            case _:
                raise error

    def _queue_again(self, state: ServerState, job: int, failure: str | None = None) -> None:
        """Queue a job again: after a failure at another server, if there is one."""
        others = [other for other in self._alive() if other is not state]
        if failure is not None:
            attempts = self._attempts.setdefault(job, [])
            attempts.append(f"{state.name}: {failure}")
            if len(attempts) >= ATTEMPTS:
                raise MismatchError(
                    f"one request failed {len(attempts)} times: {'; '.join(attempts)}",
                    "look into the servers' logs; --server-timeout gives a request more time",
                )
        if others and (failure is not None or state.dropped is not None):
            state = min(others, key=lambda other: len(other.queue))
        state.queue.appendleft(job)

    def _failed(self, state: ServerState, error: Unavailable, started: float) -> None:
        """Count a failure; those of requests sent before the last one are the same failure."""
        now = time.monotonic()
        state.counts[{"slow": "timeouts", "busy": "busy"}.get(error.kind, "failures")] += 1
        if started < state.last_failure or state.dropped is not None:
            return
        state.last_failure = now
        if error.kind == "busy":
            state.busy += 1
        else:
            state.failures += 1
            state.needs_verification = True
        if state.failures >= DROP_AFTER or state.busy >= DROP_BUSY_AFTER:
            self._drop(state, error.reason)
        state.backoff_until = now + backoff_s(state.failures + state.busy, error.retry_after_s)

    def _drop(self, state: ServerState, reason: str) -> None:
        """Its queue goes to the others, if there are any."""
        if state.dropped is not None:
            return
        state.dropped = reason
        self._log(f"{state.name} is dropped: {reason}")
        others = self._alive()
        for number in range(len(state.queue) if others else 0):
            others[number % len(others)].queue.append(state.queue.popleft())

    def _replace(self, state: ServerState, reason: str) -> None:
        """It is another server now: its answers since it was last verified do not count."""
        self._drop(state, reason)
        void, state.unconfirmed = state.unconfirmed, []
        if void:
            state.counts["void"] += len(void)
            self._work.void(void, state)
            self._open.update(void)
            next(iter(self._alive()), state).queue.extend(void)
