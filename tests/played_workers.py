"""Workers that run in this process, with what was recorded of them: of tests/write_faults.py."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.write_hooks import HOOKS

WORKERS = {
    "mismatch.processes.workers.session": "session",
    "mismatch.features.gradients.worker": "gradients",
}


class Killed(BaseException):
    """A worker that is gone: nothing of it may clean up behind it."""


class Recording:
    """Results of what takes long, by what was asked; computed where they are not there."""

    def __init__(self, path: Path) -> None:
        self.path, self.playing = path, path.exists()
        self.results: dict[str, Any] = pickle.loads(path.read_bytes()) if self.playing else {}

    def save(self) -> None:
        self.path.write_bytes(pickle.dumps(self.results))

    def of(self, key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        name = hashlib.sha256(repr(key).encode()).hexdigest()
        if name not in self.results:
            if self.playing:
                raise AssertionError(f"not recorded: {str(key)[:300]}")
            self.results[name] = compute()
        return self.results[name]


def digest(value: Any) -> str:
    return hashlib.sha256(pickle.dumps(value)).hexdigest()


class PlayedEngine:
    """An engine whose every answer is recorded; the real one is started for the recording alone."""

    def __init__(self, recording: Recording, kind: Any, *arguments: Any) -> None:
        self._recording, self._kind, self._arguments = recording, kind, arguments
        spec, *_ = arguments
        self._key = (kind.__name__, *map(repr, arguments[1:]), spec.dtype, spec.weights)
        self._engine: Any = None
        self.name = kind.name

    def __enter__(self) -> PlayedEngine:
        if not self._recording.playing:
            self._engine = self._kind(*self._arguments).__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._engine is not None:
            self._engine.__exit__(*exc)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            plain = [value for value in arguments if not callable(value)]
            key = (*self._key, name, digest(plain))
            return self._recording.of(key, lambda: getattr(self._engine, name)(*arguments))

        return call


def may_run(job: Path) -> bool:
    """Whether a worker can run in one piece: its session waits for nothing any more."""
    guided = json.loads(job.read_text()).get("guided")
    return not guided or job.with_name(f"{job.stem}-go.json").exists()


class InlineWorker:
    """Stands for ``subprocess.Popen``: runs a worker's ``main`` here, when it is first polled."""

    def __init__(self, command: list[str], *, env: dict[str, str], **rest: Any) -> None:
        self.environment, self.pid, self.code = env, os.getpid(), None
        reader, self._writer = os.pipe()
        self.stdout, self.stdin = os.fdopen(reader, "rb"), io.BytesIO()

    def poll(self) -> int | None:
        if self.code is None:
            command = json.loads(self.stdin.getvalue().splitlines()[0])["command"]
            if may_run(Path(command[-1])):
                self._end(self._run(command))
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        code = self.poll()
        return -signal.SIGTERM if code is None else code

    def terminate(self) -> None:
        self._end(-signal.SIGTERM)

    def _end(self, code: int) -> None:
        if self.code is None:
            self.code = code
            os.close(self._writer)

    def _run(self, command: list[str]) -> int:
        from mismatch.features.gradients import worker as gradients
        from mismatch.processes.workers import session

        module = next(part for part in command if part in WORKERS)
        programs = {"session": session.main, "gradients": gradients.main}
        main = programs[WORKERS[module]]
        stderr, before = sys.stderr, dict(os.environ)
        sys.stderr = io.TextIOWrapper(os.fdopen(os.dup(self._writer), "wb"), write_through=True)
        try:
            with HOOKS.worker():
                return main([command[-1]])
        except Killed:
            return -signal.SIGKILL
        finally:
            sys.stderr.close()
            sys.stderr = stderr
            os.environ.clear()
            os.environ.update(before)


def play(recording: Recording) -> None:
    """Have this process run its workers inline, with what was recorded; for its whole life."""
    from mismatch.engines import registry
    from mismatch.features.gradients import worker as gradients
    from mismatch.processes import launch
    from mismatch.processes.workers import engine, sampling, train
    from mismatch.reports import html
    from mismatch.training import distributed, score

    registry.ENGINES["toy"] = "tests.toy_engine:INFO"
    real_class, real_score, real_load = engine.engine_class, score.score_pass, train.Passes.load
    real_take = gradients.take

    def engine_class(name: str) -> Any:
        kind = real_class(name)

        def make(*arguments: Any) -> PlayedEngine:
            return PlayedEngine(recording, kind, *arguments)

        make.capabilities = kind.capabilities  # type: ignore[attr-defined]
        return make

    def load(passes: Any, pass_: Any) -> None:
        def real() -> tuple[str, str]:
            real_load(passes, pass_)
            return passes.loaded.attention.label, passes.loaded.experts

        if recording.playing:
            label, experts = recording.of(("load", repr(pass_.spec)), real)
            attention = SimpleNamespace(label=label)
            passes.loaded = SimpleNamespace(spec=pass_.spec, attention=attention, experts=experts)
        else:
            recording.results[
                hashlib.sha256(repr(("load", repr(pass_.spec))).encode()).hexdigest()
            ] = real()

    def score_pass(world: Any, loaded: Any, rollout: Any, pass_: Any, *rest: Any) -> Any:
        key = ("score", repr(pass_), digest(rollout.token_ids))
        return recording.of(key, lambda: real_score(world, loaded, rollout, pass_, *rest))

    def take(world: Any, run_dir: Any, rollout: Any, plan: Any, *rest: Any) -> Any:
        key = ("gradients", repr(plan), digest(rollout.token_ids))
        return recording.of(key, lambda: real_take(world, run_dir, rollout, plan, *rest))

    launch.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=InlineWorker, PIPE=-1, STDOUT=-2, TimeoutExpired=TimeoutError
    )
    launch.kill_tree = lambda process, tag: process.terminate()
    html.to_html = lambda *rest, **more: "<html></html>\n"  # takes longest, and is not compared
    engine.engine_class = sampling.engine_class = engine_class
    score.score_pass = train.score_pass = score_pass
    engine.LOG_DELAY_S = 0.0
    train.Passes.load = load
    gradients.take = take
    if recording.playing:
        distributed.World.start = classmethod(lambda cls: PlayedWorld())


class PlayedWorld:
    """A world of one without process groups: their threads would not survive a fork."""

    rank, size, mesh = 0, 1, None

    def __init__(self) -> None:
        import torch

        self.device = torch.device("cpu")

    def sum(self, tensor: Any) -> Any:
        return tensor

    def gather(self, part: Any) -> list[Any]:
        return [part]

    def barrier(self) -> None:
        pass

    def meet(self, stage: str) -> None:
        pass

    def close(self) -> None:
        pass
