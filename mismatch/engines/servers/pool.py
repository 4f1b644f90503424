"""Many requests to several servers: own queues, stolen work, bounded concurrency, patience.

Every server has a queue of its own, a run of neighbouring jobs, so that the samples of one prompt
meet in one prefix cache; a server whose queue is empty takes from the end of the longest other one.
A request is never sent twice at once: the first of two answers is more often the shorter one, and
taking it would bias the sample.

A server that fails rests, longer each time, and has to show that it is still the same before it
gets work again. After ``DROP_AFTER`` failures in a row it is dropped and its work goes to the
others; what it answered while it lived counts, and ``unconfirmed`` says how much of that no last
look has confirmed. A server that shows to be another is dropped at once, and what it answered since
the last good look is asked for again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mismatch.engines.servers.http import Refused, Unavailable
from mismatch.engines.servers.member import Changed, Member, rest_s
from mismatch.errors import MismatchError

DROP_AFTER = 6  # failures in a row
DROP_BUSY_AFTER = 30  # answers in a row that say "later"
ATTEMPTS = 4  # of one job, wherever
VERIFY_EVERY_S = 60.0


Ask = Callable[[Any, int], Any]  # (server, job) -> answer
Done = Callable[[int, Member, Any], None]  # called under the pool's lock
Void = Callable[[list[int], Member], None]  # answers that do not count any more; under the lock


class Pool:
    """Runs jobs (integers) on members.

    Args:
        verify: raises ``Changed`` where a server is not what it was, ``Unavailable`` where it
            cannot say.
        concurrency: requests at a time, per server.
        say: one line for the user.
    """

    def __init__(
        self,
        members: Sequence[Member],
        verify: Callable[[Any], None],
        concurrency: int,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.members = list(members)
        self._verify = verify
        self._concurrency = concurrency
        self._say = say
        self._free = threading.Condition()
        self._error: BaseException | None = None
        self._open: set[int] = set()  # jobs without an answer that counts
        self._attempts: dict[int, list[str]] = {}

    def run(self, jobs: Sequence[int], ask: Ask, done: Done, void: Void) -> None:
        """Until every job has an answer of a server that was the same before and after it.

        Raises:
            MismatchError: no server is left, a job fails everywhere, or one is refused.
        """
        self._open, self._error, self._attempts = set(jobs), None, {}
        self._deal(sorted(jobs))
        now = time.monotonic()
        for member in self.members:
            member.last_verified = now
        while self._open:
            self._work(ask, done, void)
            self._confirm(void)

    # ------------------------------------------------------------ one round

    def _deal(self, jobs: Sequence[int]) -> None:
        """Neighbouring jobs to the same server, equal shares."""
        alive = self._alive()
        if not alive:
            self._raise_nobody()
        share = -(-len(jobs) // len(alive)) or 1
        for number, member in enumerate(alive):
            member.queue = deque(jobs[number * share : (number + 1) * share])

    def _work(self, ask: Ask, done: Done, void: Void) -> None:
        """Threads until nothing is queued or in flight."""
        threads = [
            threading.Thread(target=self._serve, args=(member, ask, done, void), daemon=True)
            for member in self._alive()
            for _ in range(min(self._concurrency, len(self._open)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        if self._queued() and not self._alive():
            self._raise_nobody()

    def _confirm(self, void: Void) -> None:
        """Verify all members that answered; work of those that changed is queued again."""
        for member in self._alive():
            while member.unconfirmed and member.dropped is None:
                try:
                    self._check(member, void)
                except Unavailable as error:
                    with self._free:
                        self._failed(member, error, time.monotonic())
                    time.sleep(max(0.0, member.rest_until - time.monotonic()))
        if self._queued() and not self._alive():
            self._raise_nobody()

    # ------------------------------------------------------------ one thread

    def _serve(self, member: Member, ask: Ask, done: Done, void: Void) -> None:
        try:
            while (job := self._next(member, void)) is not None:
                self._one(member, job, ask, done, void)
        except BaseException as error:
            with self._free:
                self._error = self._error or error
                self._free.notify_all()

    def _next(self, member: Member, void: Void) -> int | None:
        """The next job for a member, once there is one and the member may work; None: no more."""
        while True:
            with self._free:
                if self._error is not None or member.dropped is not None:
                    return None
                if not self._queued():
                    if not any(one.flying for one in self.members):
                        self._free.notify_all()
                        return None
                    self._free.wait(1.0)
                    continue
                now = time.monotonic()
                if now < member.rest_until:
                    self._free.wait(min(1.0, member.rest_until - now))
                    continue
                overdue = now - member.last_verified > VERIFY_EVERY_S
                if not (member.doubtful or overdue):
                    job = self._take(member)
                    if job is None:
                        self._free.wait(0.2)
                        continue
                    member.flying += 1
                    return job
                if member.verifying:
                    self._free.wait(1.0)
                    continue
                member.verifying = True
            self._recheck(member, void)

    def _take(self, member: Member) -> int | None:
        """Its own next job, or the last of the server that has most beyond what it can begin."""
        if member.queue:
            return member.queue.popleft()
        victim = max(self.members, key=self._excess)
        return victim.queue.pop() if self._excess(victim) > 0 else None

    def _excess(self, member: Member) -> int:
        resting = member.doubtful or time.monotonic() < member.rest_until
        working = member.dropped is None and not resting
        return len(member.queue) - (self._concurrency - member.flying if working else 0)

    def _recheck(self, member: Member, void: Void) -> None:
        """Verify a member that failed, or that has not been looked at for long."""
        started = time.monotonic()
        try:
            self._check(member, void)
        except Unavailable as error:
            with self._free:
                self._failed(member, error, started)
        finally:
            with self._free:
                member.verifying = False
                self._free.notify_all()

    def _check(self, member: Member, void: Void) -> None:
        """Raises ``Unavailable``; a member that changed is dropped and its last answers are void.

        Answers that came while it was looked at are confirmed by the next look.
        """
        with self._free:
            seen = len(member.unconfirmed)
        try:
            self._verify(member.server)
        except Changed as error:
            with self._free:
                self._drop(member, error.reason)
                self._void(member, void)
            return
        with self._free:
            del member.unconfirmed[:seen]
            member.doubtful, member.failures, member.busy = False, 0, 0
            member.last_verified = time.monotonic()
            self._free.notify_all()

    def _one(self, member: Member, job: int, ask: Ask, done: Done, void: Void) -> None:
        started = time.monotonic()
        try:
            answer = ask(member.server, job)
        except Unavailable as error:
            with self._free:
                self._again(member, job, error.reason, counts=not error.busy)
                self._failed(member, error, started)
        except Changed as error:
            with self._free:
                self._again(member, job, error.reason, counts=False)
                self._drop(member, error.reason)
                self._void(member, void)
        except Refused as error:
            raise MismatchError(
                f"{member.name} refuses a request (HTTP {error.status}): {error.reason}",
                "look into the server's log; its version may not know what is asked for",
            ) from error
        else:
            with self._free:
                if member.dropped is not None:  # it turned out to be another meanwhile
                    self._again(member, job, member.dropped, counts=False)
                else:
                    member.failures = member.busy = 0
                    member.counts["answers"] += 1
                    member.unconfirmed.append(job)
                    self._open.discard(job)
                    done(job, member, answer)
        finally:
            with self._free:
                member.flying -= 1
                self._free.notify_all()

    # ------------------------------------------------------------ under the lock

    def _again(self, member: Member, job: int, reason: str, counts: bool) -> None:
        """Queue a job again, at the other servers first if it is theirs to try."""
        if counts:
            tried = self._attempts.setdefault(job, [])
            tried.append(f"{member.name}: {reason}")
            if len(tried) >= ATTEMPTS:
                raise MismatchError(
                    f"one request failed {len(tried)} times: {'; '.join(tried)}",
                    "look into the servers' logs; --server-timeout gives a request more time",
                )
        others = [one for one in self._alive() if one is not member]
        home = min(others, key=lambda one: len(one.queue)) if others and counts else member
        home.queue.appendleft(job)

    def _failed(self, member: Member, error: Unavailable, started: float) -> None:
        """Note a failure; those of requests sent before the last one are the same failure."""
        now = time.monotonic()
        member.counts["timeouts" if error.slow else "busy" if error.busy else "failures"] += 1
        if started < member.last_failure or member.dropped is not None:
            return
        member.last_failure = now
        if error.busy:
            member.busy += 1
        else:
            member.failures += 1
            member.doubtful = True
        if member.failures >= DROP_AFTER or member.busy >= DROP_BUSY_AFTER:
            self._drop(member, error.reason)
            return
        member.rest_until = now + rest_s(member.failures + member.busy, error.retry_after_s)

    def _drop(self, member: Member, reason: str) -> None:
        """Its queue goes to the others, or stays to be counted where there are none."""
        if member.dropped is not None:
            return
        member.dropped = reason
        self._say(f"{member.name} is dropped: {reason}")
        others = self._alive()
        for number in range(len(member.queue) if others else 0):
            others[number % len(others)].queue.append(member.queue.popleft())
        self._free.notify_all()

    def _void(self, member: Member, void: Void) -> None:
        """Answers since the last good look at a member do not count: asked for again."""
        lost = list(member.unconfirmed)
        member.unconfirmed.clear()
        if not lost:
            return
        member.counts["void"] += len(lost)
        void(lost, member)
        self._open.update(lost)
        home = next(iter(self._alive()), member)
        home.queue.extend(lost)
        self._free.notify_all()

    def _alive(self) -> list[Member]:
        return [member for member in self.members if member.dropped is None]

    def _queued(self) -> int:
        return sum(len(member.queue) for member in self.members)

    def _raise_nobody(self) -> None:
        said = "; ".join(f"{one.name}: {one.dropped}" for one in self.members)
        raise NobodyLeft(f"no server is left ({said})", "start the servers again")


class NobodyLeft(MismatchError):
    """Every server was dropped."""
