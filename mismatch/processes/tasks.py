"""What a worker is asked for: a file of typed tasks.

One program runs them all, ``python -m mismatch.processes.workers.session SESSION.json``: an engine
or a training world, alive for as long as it has tasks. A guided training world starts before the
tokens are there, and waits for one more file before it scores.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from mismatch.codec import from_json, to_json
from mismatch.errors import MismatchError
from mismatch.run import store
from mismatch.specs import Pass, RolloutSpec

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
    passes: tuple[Pass, ...]
    guided: bool = False
    """What cannot run is refused at once, then the passes wait for :func:`let_score`."""
    load_first: bool = False
    """Load the first pass's weights before that; else no GPU is touched until then."""
    resident_report: bool = False
    """Measure the peak memory of loading."""
    same_on_all_ranks: bool = False
    """The ranks worked this session out for themselves, and must agree on it."""
    label: str = "train"


Session = EngineSession | TrainerSession


@dataclass(frozen=True, slots=True)
class Go:
    """What a guided world waits for."""

    allowed_s: float | None = None  # that its optional passes may take; None: no limit


def write_session(session: Session) -> Path:
    """Leave a session for its worker; what an earlier world was told does not count for it."""
    if isinstance(session, TrainerSession):
        go_path(session).unlink(missing_ok=True)
    return store.write_json(session.run_dir / "jobs" / f"{session.label}.json", to_json(session))


def read_session(path: Path) -> Session:
    """Return what :func:`write_session` left."""
    session: Session = from_json(Session, store.read_json(path))  # type: ignore[arg-type]
    return session


def go_path(session: TrainerSession) -> Path:
    """Return the file whose presence lets a guided world score."""
    return session.run_dir / "jobs" / f"{session.label}-go.json"


def let_score(session: TrainerSession, allowed_s: float | None = None) -> None:
    """Let a guided world score: the tokens of its passes are there."""
    store.write_json(go_path(session), to_json(Go(allowed_s)))


def allowed(session: TrainerSession) -> float | None:
    """Wait, in the worker, until a guided world may score; return what :func:`let_score` allows."""
    wait_for(go_path(session))
    return from_json(Go, store.read_json(go_path(session))).allowed_s


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
