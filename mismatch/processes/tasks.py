"""What a worker is asked for: a file of typed tasks, and the order of passes while it runs.

One program runs them all, ``python -m mismatch.processes.workers.session SESSION.json``: an engine
or a training world, alive for as long as it has tasks. The process that started it decides what
comes next: it hands a guided training world one pass after the other, by numbered files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from mismatch.codec import from_json, to_json
from mismatch.errors import MismatchError
from mismatch.experiments.jobs import Job
from mismatch.run import store
from mismatch.specs import RolloutSpec

POLL_S = 0.05
FLOAT32_ENGINE = "float32-engine"  # label of the session that scores a run's tokens in float32


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample, save the rollout, and rescore its tokens; what is there is not made again."""


@dataclass(frozen=True, slots=True)
class Score:
    """Score the run's tokens by prefill; the engine need not have sampled them."""

    name: str
    """Of the scoring."""
    folder: str = ""
    """Within the run directory, whose tokens are scored; "": the run's own."""


@dataclass(frozen=True, slots=True)
class ScoreLong:
    """After sampling, score one long sequence of what was sampled; the run goes on where it fails.

    See mismatch.experiments.beyond.
    """

    name: str
    """Of the scoring."""
    tokens: int
    """At most."""


@dataclass(frozen=True, slots=True)
class ReadCache:
    """Continue some of the run's prompts with the prefix cache unread and read."""

    file: str
    """Document of the pairs (CachePair), or of the reason why there are none."""


EngineTask = Sample | Score | ScoreLong | ReadCache


@dataclass(frozen=True, slots=True)
class EngineSession:
    """An engine's process."""

    run_dir: Path
    rollout: RolloutSpec
    tasks: tuple[EngineTask, ...] = (Sample(),)
    label: str = "engine"
    """Of its log, and of the file in ``errors`` where it fails."""


@dataclass(frozen=True, slots=True)
class TrainerSession:
    """A training world."""

    run_dir: Path
    passes: tuple[Job, ...]
    guided: bool = False
    """What cannot run is refused at once, then every pass waits until it is handed on."""
    load_first: bool = False
    """Load the first pass's weights before it is handed on; else no GPU is touched until then."""
    resident_report: bool = False
    """Measure the peak memory of loading."""
    same_on_all_ranks: bool = False
    """The ranks worked this session out for themselves, and must agree on it."""
    label: str = "train"


Session = EngineSession | TrainerSession


@dataclass(frozen=True, slots=True)
class Next:
    """The number of the pass that comes next; None: there is none."""

    number: int | None


def write_session(session: Session) -> Path:
    """Leave a session for its worker; passes handed on to an earlier one are forgotten."""
    for path in (session.run_dir / "jobs").glob(f"{session.label}-[0-9]*.json"):
        path.unlink()
    return store.write_json(session.run_dir / "jobs" / f"{session.label}.json", to_json(session))


def read_session(path: Path) -> Session:
    """Return what :func:`write_session` left."""
    session: Session = from_json(Session, store.read_json(path))  # type: ignore[arg-type]
    return session


class Guide:
    """Hands on the passes of a guided training world."""

    def __init__(self, session: TrainerSession) -> None:
        self.session, self.count = session, 0

    def hand_on(self, number: int | None) -> None:
        """Have the world run this pass next; None: it may end."""
        store.write_json(turn_path(self.session, self.count), to_json(Next(number)))
        self.count += 1


def turn_path(session: TrainerSession, turn: int) -> Path:
    """Return the file that says which pass comes at a turn, once that is decided."""
    return session.run_dir / "jobs" / f"{session.label}-{turn:04d}.json"


def turns(session: TrainerSession) -> Iterator[int]:
    """Yield the numbers of passes as they are handed on, in the worker."""
    for turn in count():
        path = turn_path(session, turn)
        wait_for(path)
        number = from_json(Next, store.read_json(path)).number
        if number is None:
            return
        yield number


def wait_for(path: Path) -> None:
    """Sleep until a file appears.

    Raises:
        MismatchError: the process that started this process is gone.
    """
    parent = os.getppid()
    while not path.exists():
        if os.getppid() != parent:
            fault = f"the parent process has exited, so that {path} will not appear"
            raise MismatchError(fault, "start the run again: --resume")
        time.sleep(POLL_S)
