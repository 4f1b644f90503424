"""Work shared among servers: nothing lost, nothing counted twice, whatever a server does."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from mismatch.engines.servers import http, scheduler
from mismatch.engines.servers.http import Refused, Unavailable, backoff_s
from mismatch.engines.servers.scheduler import (
    JobCallbacks,
    NoServerLeft,
    Scheduler,
    ServerChanged,
    ServerState,
)
from mismatch.errors import MismatchError

LOST = Unavailable("the connection was lost")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(http, "LONGEST_BACKOFF_S", 0.02)


class Fake:
    """A server that answers ``(name, job)``; ``act`` may raise, or take its time."""

    def __init__(self, name: str, act: Callable[[int], Any] = lambda job: None) -> None:
        self.name = name
        self.act = act
        self.asked: list[int] = []
        self.verified = 0
        self.now = 0
        self.most = 0
        self.verify_with: Callable[[], None] = lambda: None


class Bench:
    """Fakes under one scheduler, and what came of its jobs."""

    def __init__(self, *fakes: Fake, concurrency: int = 4) -> None:
        self.fakes = fakes
        self.got: dict[int, str] = {}
        self.counted: Counter[int] = Counter()
        self.voided: list[int] = []
        self.said: list[str] = []
        states = [ServerState(fake.name, fake) for fake in fakes]
        self.scheduler = Scheduler(states, self.verify, concurrency, self.said.append)
        self._lock = threading.Lock()

    def verify(self, fake: Fake) -> None:
        fake.verified += 1
        fake.verify_with()

    def ask(self, fake: Fake, job: int) -> str:
        with self._lock:
            fake.asked.append(job)
            fake.now += 1
            fake.most = max(fake.most, fake.now)
        try:
            fake.act(job)
        finally:
            with self._lock:
                fake.now -= 1
        return fake.name

    def done(self, job: int, state: ServerState, answer: str) -> None:
        assert job not in self.got, "an answer counted twice"
        self.got[job] = answer
        self.counted[job] += 1

    def void(self, jobs: list[int], state: ServerState) -> None:
        for job in jobs:
            del self.got[job]
        self.voided += jobs

    def run(self, jobs: int = 40) -> Bench:
        self.scheduler.run(range(jobs), JobCallbacks(self.ask, self.done, self.void))
        assert sorted(self.got) == list(range(jobs))
        return self


def server(bench: Bench, number: int) -> ServerState:
    return bench.scheduler.states[number]


def sometimes(error: Exception, every: int) -> Callable[[int], None]:
    """Fails at the first try of every n-th job."""
    failed: set[int] = set()

    def act(job: int) -> None:
        if job % every == 0 and job not in failed:
            failed.add(job)
            raise error

    return act


def test_neighbouring_jobs_go_to_the_same_server() -> None:
    bench = Bench(
        Fake("a", lambda _: time.sleep(0.002)), Fake("b", lambda _: time.sleep(0.002))
    ).run(40)
    first, second = (set(fake.asked) for fake in bench.fakes)
    assert len(first & set(range(10))) == 10  # its own end is stolen last
    assert len(second & set(range(20, 30))) == 10


def test_nothing_is_stolen_from_a_server_that_is_about_to_do_it() -> None:
    fakes = Fake("a", lambda _: time.sleep(0.02)), Fake("b", lambda _: time.sleep(0.02))
    Bench(*fakes, concurrency=32).run(24)
    assert [len(fake.asked) for fake in fakes] == [12, 12]


def test_an_idle_server_steals_from_a_slow_one() -> None:
    slow, fast = Fake("slow", lambda _: time.sleep(0.1)), Fake("fast")
    Bench(slow, fast, concurrency=1).run(20)
    assert len(fast.asked) >= 15
    assert len(slow.asked) + len(fast.asked) == 20  # no request is sent twice


def test_no_server_gets_more_at_once_than_allowed() -> None:
    fakes = Fake("a", lambda _: time.sleep(0.01)), Fake("b", lambda _: time.sleep(0.01))
    Bench(*fakes, concurrency=3).run(30)
    assert max(fake.most for fake in fakes) == 3


@pytest.mark.parametrize(
    "error", [LOST, Unavailable("late", kind="slow"), Unavailable("HTTP 429", kind="busy")]
)
def test_what_fails_once_is_asked_again(error: Unavailable) -> None:
    bench = Bench(Fake("a", sometimes(error, every=7))).run(30)
    assert bench.counted == Counter(range(30))
    counts = server(bench, 0).counts
    assert counts["answers"] == 30
    assert counts["failures"] + counts["timeouts"] + counts["busy"] >= 1


def test_a_server_that_lost_a_connection_is_looked_at_before_it_goes_on() -> None:
    fake = Fake("a", sometimes(LOST, every=1000))
    bench = Bench(fake, concurrency=1).run(5)
    assert fake.verified == 2  # after the loss, and at the end
    assert not server(bench, 0).unconfirmed
    busy = Fake("b", sometimes(Unavailable("HTTP 429", kind="busy"), every=1000))
    Bench(busy, concurrency=1).run(5)
    assert busy.verified == 1  # it was there all the time


def test_retry_after_is_honoured() -> None:
    fake = Fake("a", sometimes(Unavailable("HTTP 429", retry_after_s=0.4, kind="busy"), every=1000))
    began = time.monotonic()
    Bench(fake, concurrency=2).run(4)
    assert 0.4 <= time.monotonic() - began < 2


def test_rests_grow_and_are_spread() -> None:
    rests = [[backoff_s(failures, None) for _ in range(200)] for failures in (1, 2, 30)]
    first, longest = http.FIRST_BACKOFF_S, http.LONGEST_BACKOFF_S
    for waits, middle in zip(rests, (first, 2 * first, longest), strict=True):
        assert middle / 2 <= min(waits) < max(waits) <= 1.5 * middle
        assert max(waits) > 1.2 * min(waits)
    assert backoff_s(1, 10_000.0) <= 1.1 * http.LONGEST_RETRY_AFTER_S
    assert backoff_s(9, 2.0) >= 2.0


def dies(after: int) -> Callable[[int], None]:
    served = iter(range(10**6))

    def act(job: int) -> None:
        if next(served) >= after:
            raise Unavailable("connection refused")

    return act


def test_the_others_do_the_work_of_a_dead_server() -> None:
    dead, alive = Fake("dead", dies(after=5)), Fake("alive", lambda _: time.sleep(0.005))
    dead.verify_with = lambda: dead.act(-1)
    bench = Bench(dead, alive).run(60)
    assert server(bench, 0).dropped == "connection refused"
    assert Counter(bench.got.values()) == {"dead": 5, "alive": 55}  # what it answered counts
    assert len(server(bench, 0).unconfirmed) == 5
    assert bench.said == [f"dead is dropped: {server(bench, 0).dropped}"]


def test_one_loss_of_many_requests_is_one_failure() -> None:
    barrier = threading.Barrier(8)
    lost: set[int] = set()

    def act(job: int) -> None:
        if job < 8 and job not in lost:
            lost.add(job)
            barrier.wait(5)
            raise LOST

    bench = Bench(Fake("a", act), concurrency=8).run(20)
    assert server(bench, 0).counts["failures"] == 8
    assert server(bench, 0).dropped is None  # DROP_AFTER is less than 8


def test_without_any_server_left_it_ends() -> None:
    fakes = Fake("a", dies(2)), Fake("b", dies(3))
    for fake in fakes:
        fake.verify_with = lambda fake=fake: fake.act(-1)  # type: ignore[misc]
    with pytest.raises(NoServerLeft, match=r"a: connection.*b: connection"):
        Bench(*fakes).run(30)


def test_a_request_that_always_fails_does_not_go_round_for_ever() -> None:
    def act(job: int) -> None:
        if job == 3:
            raise Unavailable("HTTP 500: out of cheese")

    with pytest.raises(MismatchError, match=r"\b4 times.*of cheese"):
        Bench(Fake("a", act), Fake("b", act)).run(10)


def test_a_refusal_is_final() -> None:
    def act(job: int) -> None:
        raise Refused(400, "logprobs must be -1")

    with pytest.raises(MismatchError, match=r"\ba .*HTTP 400.*-1"):
        Bench(Fake("a", act)).run(3)


def test_a_wrong_key_ends_everything_at_once() -> None:
    def act(job: int) -> None:
        raise MismatchError("no access", "set the key")

    bench = Bench(Fake("a", act), Fake("b", act), concurrency=1)
    with pytest.raises(MismatchError, match="no access"):
        bench.run(50)
    assert sum(len(fake.asked) for fake in bench.fakes) <= 2


def swapped(fake: Fake, after: int) -> None:
    """From its n-th answer on a server has other weights; it loses a connection then."""
    served = iter(range(10**6))
    state = {"other": False}

    def act(job: int) -> None:
        if next(served) == after:
            state["other"] = True
            raise LOST

    def verify() -> None:
        if state["other"]:
            raise ServerChanged("other weights")

    fake.act, fake.verify_with = act, verify


def test_a_server_restarted_with_other_weights_is_caught_and_its_work_redone() -> None:
    bad, good = Fake("bad"), Fake("good", lambda _: time.sleep(0.002))
    swapped(bad, after=5)
    bench = Bench(bad, good, concurrency=1).run(30)
    assert set(bench.got.values()) == {"good"}
    assert len(bench.voided) == 5
    assert server(bench, 0).counts["void"] == 5
    assert server(bench, 0).dropped == "other weights"


def test_weights_changed_without_any_loss_are_caught_at_the_end() -> None:
    bad, good = Fake("bad"), Fake("good")
    bad.verify_with = lambda: (_ for _ in ()).throw(ServerChanged("other weights"))  # type: ignore[assignment]
    bench = Bench(bad, good).run(30)
    assert set(bench.got.values()) == {"good"}
    assert sorted(bench.counted.elements()) == sorted([*range(30), *bench.voided])


def test_weights_changed_everywhere_are_an_error() -> None:
    fake = Fake("a")
    swapped(fake, after=3)
    with pytest.raises(NoServerLeft, match="other weights"):
        Bench(fake).run(10)


def test_long_runs_are_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "VERIFY_EVERY_S", 0.05)
    fake = Fake("a", lambda _: time.sleep(0.02))
    Bench(fake, concurrency=2).run(40)
    assert fake.verified >= 4


def test_a_server_that_answers_as_another_is_dropped_at_once() -> None:
    other, changed = Fake("other"), "it answers as x, not y"

    def act(job: int) -> None:
        if len(other.asked) > 3:
            raise ServerChanged(changed)

    other.act = act  # looking at it would tell nothing
    bench = Bench(other, Fake("good"), concurrency=1).run(20)
    assert server(bench, 0).dropped == changed
    assert set(bench.got.values()) == {"good"}
    assert len(bench.said) == 1


def test_a_second_run_leaves_out_what_was_dropped() -> None:
    dead, alive = Fake("dead", dies(after=1)), Fake("alive", lambda _: time.sleep(0.005))
    dead.verify_with = lambda: dead.act(-1)
    bench = Bench(dead, alive).run(40)
    asked = len(dead.asked)
    bench.got.clear()
    bench.run(10)
    assert len(dead.asked) == asked
