"""Fail every write of a run in turn, and see that going on gives the numbers of a run left alone.

The argument is SQLite's: a run is done once with every opening for writing, write, fsync, rename,
copy and new directory counted. Before operation N the process forks; the child has that operation
fail (``FAULTS``), a third process resumes what the child left, and its results are compared with
those of the undisturbed run. So each operation costs a resumption, not a run. What workers compute
is recorded beforehand (``record``) and played back in one process: hundreds of operations take
minutes. ``python -m benchmarks.write_faults`` runs all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import signal
import stat
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FAULTS = ("ENOSPC", "EIO", "kill", "kill-worker")
CHECK = (
    *("--model", "tiny-gpt-oss", "--engine", "transformers", "--num-prompts", "4"),
    *("--samples-per-prompt", "2", "--max-tokens", "4", "--nproc-per-node", "1", "--exact-kl", "8"),
)
FIXES = ("--fix", "fp32-lm-head,fp32-router")
SCENARIOS: dict[str, tuple[str, ...]] = {
    "check": (*CHECK, "--quick"),
    "fixes": (*CHECK, "--no-noise-floor", *FIXES),
    "gradients": (*CHECK, "--no-noise-floor", "--gradients", "--gradient-prompts", "2"),
    "two engines": (*CHECK, "--no-noise-floor", "--engine", "toy", "--dtype", "fp32"),
    "derived": (*CHECK, "--no-noise-floor", "--rollout-weights", "mxfp4"),
}
TIMES = {"seconds", "timings", "peak_bytes", "run", "created", "started", "finished"}
WORKERS = {
    "mismatch.processes.workers.engine": "engine",
    "mismatch.processes.workers.train": "train",
}


class Killed(BaseException):
    """A worker that is gone: nothing of it may clean up behind it."""


# ---------------------------------------------------------------- workers, played in this process


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
            plain = [one for one in arguments if not callable(one)]
            key = (*self._key, name, digest(plain))
            return self._recording.of(key, lambda: getattr(self._engine, name)(*arguments))

        return call


class InlineWorker:
    """Stands for ``subprocess.Popen``: runs a worker's ``main`` here, when it is first polled."""

    def __init__(self, command: list[str], *, env: dict[str, str], **rest: Any) -> None:
        self.environment, self.pid, self.code = env, os.getpid(), None
        reader, self._writer = os.pipe()
        self.stdout, self.stdin = os.fdopen(reader, "rb"), io.BytesIO()

    def poll(self) -> int | None:
        if self.code is None:
            command = json.loads(self.stdin.getvalue().splitlines()[0])["command"]
            job = json.loads(Path(command[-1]).read_text())
            if "wait_for" not in job or Path(job["wait_for"]).exists():
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
        from mismatch.processes.workers import engine, train

        module = next(part for part in command if part in WORKERS)
        main = {"engine": engine.main, "train": train.main}[WORKERS[module]]
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
    from mismatch.processes import launch
    from mismatch.processes.workers import engine, gradient_check, sampling, train
    from mismatch.reports import html
    from mismatch.training import distributed, score
    from mismatch.training import gradients as batch

    registry.ENGINES["toy"] = "tests.toy_engine:INFO"
    real_class, real_score, real_load = engine.engine_class, score.score_pass, train._Passes.load
    real_gradient = batch.batch_gradient

    def engine_class(name: str) -> Any:
        kind = real_class(name)

        def make(*arguments: Any) -> PlayedEngine:
            return PlayedEngine(recording, kind, *arguments)

        make.capabilities = kind.capabilities  # type: ignore[attr-defined]
        return make

    def load(passes: Any, one: Any) -> None:
        def real() -> tuple[str, str]:
            real_load(passes, one)
            return passes.loaded.attention.label, passes.loaded.experts

        if recording.playing:
            label, experts = recording.of(("load", repr(one.spec)), real)
            attention = SimpleNamespace(label=label)
            passes.loaded = SimpleNamespace(spec=one.spec, attention=attention, experts=experts)
        else:
            recording.results[
                hashlib.sha256(repr(("load", repr(one.spec))).encode()).hexdigest()
            ] = real()

    def score_pass(world: Any, loaded: Any, rollout: Any, one: Any, *rest: Any) -> Any:
        key = ("score", repr(one), digest(rollout.token_ids))
        return recording.of(key, lambda: real_score(world, loaded, rollout, one, *rest))

    def batch_gradient(world: Any, loaded: Any, rollout: Any, job: Any, total: Any) -> Any:
        def real() -> Any:
            result = real_gradient(world, loaded, rollout, job, total)
            totals[job.coefficients] = result.total
            return dataclass_without_total(result)

        totals: dict[str, Any] = {}
        values = [digest(job.values), digest(job.prompts)]
        found = recording.of(("gradient", repr(job.scoring), job.coefficients, *values), real)
        kept = totals.get(job.coefficients) or SimpleNamespace(on_host=lambda: None)
        return SimpleNamespace(**found, total=kept)

    def dataclass_without_total(result: Any) -> dict[str, Any]:
        return {
            field.name: getattr(result, field.name)
            for field in dataclasses.fields(result)
            if field.name != "total"
        }

    launch.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=InlineWorker, PIPE=-1, STDOUT=-2, TimeoutExpired=TimeoutError
    )
    launch.kill_tree = lambda process, tag: process.terminate()
    html.to_html = lambda *rest, **more: "<html></html>\n"  # takes longest, and is not compared
    engine.engine_class = sampling.engine_class = engine_class
    score.score_pass = score_pass
    engine.LOG_DELAY_S = 0.0
    train._Passes.load = load
    batch.batch_gradient = batch_gradient
    if recording.playing:
        batch.require_memory = lambda *rest: None
        distributed.World.start = classmethod(lambda cls: PlayedWorld())
    assert gradient_check  # its functions import what they use when they are called


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

    def meet(self, place: str) -> None:
        pass

    def close(self) -> None:
        pass


# ---------------------------------------------------------------- operations


class Hooks:
    """Sees every operation that changes a file below ``root``, and calls ``at`` before it."""

    def __init__(self) -> None:
        self.root, self.at, self.count = "", None, 0  # type: ignore[assignment]
        self.workers, self.dead = 0, False
        self.installed = False

    @contextlib.contextmanager
    def worker(self) -> Iterator[None]:
        self.workers += 1
        try:
            yield
        finally:
            self.workers -= 1
            self.dead = False

    def see(self, what: str, path: Any) -> None:
        if self.at is None or isinstance(path, int):
            return
        name = os.path.abspath(os.fsdecode(path))
        if name.startswith(self.root):
            self.count += 1
            self.at(what, name)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.at is None:
            return
        if event == "open":
            path, _, flags = arguments
            if path is not None and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self.see("open", path)
        elif event in ("os.rename", "shutil.copyfile"):
            self.see(event.partition(".")[2], arguments[1])
        elif event == "os.mkdir":
            self.see("mkdir", arguments[0])

    def install(self) -> None:
        import pyarrow.parquet as pq
        import safetensors.torch as st

        if self.installed:
            return
        self.installed = True
        sys.addaudithook(self.audit)
        fsync, unlink, write = os.fsync, os.unlink, os.write
        write_text, write_table, save_file = Path.write_text, pq.write_table, st.save_file

        def seen_fsync(descriptor: int) -> None:
            self.see("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
            fsync(descriptor)

        def seen_write(descriptor: int, data: bytes) -> int:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if path.startswith("/"):
                self.see("write", path)
            return write(descriptor, data)

        def seen_text(path: Path, text: str, *rest: Any, **more: Any) -> int:
            written = write_text(path, text, *rest, **more)
            self.see("write", path)
            return written

        def seen_table(table: Any, path: Any, *rest: Any, **more: Any) -> None:
            self.see("open", path)
            write_table(table, path, *rest, **more)

        def seen_tensors(tensors: Any, path: Any, *rest: Any, **more: Any) -> None:
            self.see("open", path)
            save_file(tensors, path, *rest, **more)
            self.see("write", path)

        def dead_unlink(path: Any, **more: Any) -> None:
            if not self.dead:  # the dead tidy nothing up
                unlink(path, **more)

        os.fsync, os.unlink, os.remove, os.write = seen_fsync, dead_unlink, dead_unlink, seen_write
        Path.write_text = seen_text  # type: ignore[method-assign]
        pq.write_table, st.save_file = seen_table, seen_tensors


HOOKS = Hooks()
OUTPUT: list[Any] = []  # of the commands that run in this process, the innermost last


def torn(what: str, path: str) -> None:
    """Half of what was written and not yet synced is lost."""
    if what not in ("fsync", "write"):
        return
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.stat(path).st_mode):
            os.truncate(path, os.path.getsize(path) // 2)


# ---------------------------------------------------------------- commands, each in a process


def command(arguments: list[str], log: Path) -> int:
    """``mismatch ARGUMENTS`` in this process; its exit code, output in ``log``."""
    from mismatch.cli.main import main

    sys.argv = ["mismatch", *arguments]
    stdout, stderr = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = log.open("w")
    OUTPUT.append(sys.stdout)
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        OUTPUT.pop().close()
        sys.stdout, sys.stderr = stdout, stderr


def in_child(work: Callable[[], int]) -> int:
    """Run ``work`` in a fork; its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        HOOKS.at = None
        code = 99
        try:
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ---------------------------------------------------------------- what has to be equal


def results(run: Path) -> dict[str, str]:
    """A digest of every artefact with numbers, its times left out; of the report, its judgement."""
    from mismatch.run import manifest
    from mismatch.run.tables import read_table, schema_of

    found = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if path.suffix == ".parquet":
            table, _ = read_table(path, schema_of(path) or "", set())
            found[name] = digest({key: table.column(key).to_pylist() for key in table.column_names})
        elif path.suffix == ".safetensors":
            found[name] = arrays(path)
        elif name in ("report.json", "comparison.json") or name.endswith("vocabulary.json"):
            found[name] = digest(without_times(json.loads(path.read_text())))
    for name in manifest.entries(run):
        manifest.verify(run, name)
    for place in [run, *run.glob("fixes/*"), *run.glob("engines/*")]:
        if (place / manifest.NAME).exists():
            for name in manifest.entries(place):
                manifest.verify(place, name)
    left = [path.name for path in run.rglob("*.partial")]
    assert not left, f"left behind: {left}"
    return found


def arrays(path: Path) -> str:
    from mismatch.run.tables import read_arrays

    return digest({name: array.tolist() for name, array in read_arrays(path)[0].items()})


def without_times(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: without_times(value) for key, value in data.items() if key not in TIMES}
    return [without_times(value) for value in data] if isinstance(data, list) else data


# ---------------------------------------------------------------- one scenario


class Scenario:
    """All operations of one command, each with each fault.

    Args:
        place: a directory for the recording, the run and the logs.
        wanted: whether a trial ``(number, fault, operation)`` is to be run.
        report: called with every trial: number, fault, operation, and "" or what was wrong.
    """

    def __init__(
        self,
        flags: tuple[str, ...],
        place: Path,
        wanted: Callable[[int, str, str], bool],
        report: Callable[[int, str, str, str], None],
    ) -> None:
        self.place, self.wanted, self.report = place, wanted, report
        self.root, self.run = place / "disk", place / "disk" / "run"
        self.command = ["check", *flags, "--out", str(self.run)]
        self.outcomes: dict[str, str] = {}  # of resuming a state of the disk
        self.log, self.resumed_log = place / "fault.log", place / "resumed.log"

    def prepare(self) -> dict[str, str]:
        """Record and play once: the results that every resumed run must have."""
        os.environ["MISMATCH_CACHE"] = str(self.root / "cache")
        recording = self.place / "recording.pickle"
        if not recording.exists():
            self.fresh()
            assert in_child(lambda: self.record(recording)) in (0, 1), self.words()
        play(Recording(recording))
        self.fresh()
        self.code = command(self.command, self.log)  # here: what it imports serves all trials
        assert self.code in (0, 1, 2), self.words()
        self.expected = results(self.run)
        assert self.expected.keys() >= {"report.json", "comparison.json", "rollout.parquet"}
        errors = [path.read_text() for path in self.run.rglob("errors/*.json")]
        assert not errors, errors  # what failed before any fault says nothing
        return self.expected

    def record(self, path: Path) -> int:
        recording = Recording(path)
        play(recording)
        code = command(self.command, self.log)
        if code in (0, 1):
            recording.save()
        return code

    def fresh(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)

    def words(self, log: Path | None = None) -> str:
        log = log or self.log
        return log.read_text()[-2500:] if log.exists() else ""

    def all(self) -> int:
        """Run every trial that is wanted; how many operations there are."""
        self.fresh()
        shutil.rmtree(self.place / "kept", ignore_errors=True)
        reader, writer = os.pipe()
        in_child(lambda: self.disturbed(writer))
        os.close(writer)
        with os.fdopen(reader) as lines:
            return int(lines.read() or 0)

    def disturbed(self, writer: int) -> int:
        """One run, and before each of its operations the trials."""
        HOOKS.install()
        HOOKS.root, HOOKS.at, own = str(self.root), self.trials, os.getpid()
        code = command(self.command, self.place / "undisturbed.log")
        HOOKS.at = None
        if os.getpid() == own:  # children of trials come here too
            os.write(writer, str(HOOKS.count).encode())
        return code

    def trials(self, what: str, path: str) -> None:
        number, at = HOOKS.count, HOOKS.at
        operation = f"{what} {os.path.relpath(path, self.root)}"
        operation = re.sub(r"\.\d+\.partial", ".partial", operation)
        faults = [fault for fault in FAULTS if self.wanted(number, fault, operation)]
        if HOOKS.workers == 0:
            faults = [fault for fault in faults if fault != "kill-worker"]
        if not faults:
            return
        HOOKS.at = None
        # A copy for each: files that are open or locked here are others there.
        kept = self.place / "kept"
        shutil.copytree(self.root, kept)
        for fault in faults:
            shutil.rmtree(self.root)
            shutil.copytree(kept, self.root)
            self.log.write_text("")
            OUTPUT[-1].flush()
            child = os.fork()
            if child == 0:
                self.fail(fault, what, path)
                return  # a fault that lets the operation go on
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            wrong = self.after(fault, code)
            with contextlib.redirect_stdout(sys.__stdout__):
                self.report(number, fault, operation, wrong)
        shutil.rmtree(self.root)
        kept.rename(self.root)
        HOOKS.at = at

    def fail(self, fault: str, what: str, path: str) -> None:
        """In the child: fail, and let the command come to its end, as it does in reality."""
        os.dup2(os.open(self.log, os.O_WRONLY), OUTPUT[-1].fileno())
        torn(what, path)
        if fault == "kill":
            os._exit(137)
        if fault == "kill-worker":
            HOOKS.dead = True
            raise Killed
        number = getattr(errno, fault)
        raise OSError(number, os.strerror(number), path)

    def after(self, fault: str, code: int) -> str:
        """Resume what a disturbed command left; what is wrong, or ""."""
        words = self.words()
        if fault != "kill" and ("Traceback" in words or code not in (0, 1, 2)):
            return f"the command ended with {code}: {words}"
        state = self.state()
        if state not in self.outcomes:
            self.outcomes[state] = self.resume()
        return self.outcomes[state]

    def state(self) -> str:
        """A digest of the disk, but for logs, times and the names of errors and processes."""
        files = {}
        for path in sorted(self.root.rglob("*")):
            name = re.sub(r"\.\d+\.partial$", ".partial", str(path.relative_to(self.root)))
            if path.is_file() and "/logs/" not in name:
                data = path.read_bytes()
                if path.name == "run.json":
                    data = re.sub(rb"\d", b"0", data)
                for number in (errno.ENOSPC, errno.EIO):
                    data = data.replace(os.strerror(number).encode(), b"")
                files[name] = data
        return digest(files)

    def resume(self) -> str:
        """What is wrong after going on with what is there, or ""."""
        resume = ["check", "--resume", str(self.run)]
        if not (self.run / "spec.json").exists():  # nothing to go on with: the same command again
            resume = self.command
        again = in_child(lambda: command(resume, self.resumed_log))
        if again != self.code:
            return f"resumed: {again}, not {self.code}: {self.words(self.resumed_log)}"
        try:
            found = results(self.run)
        except Exception as error:
            return f"after the resumption: {type(error).__name__}: {error}"
        names = sorted({*found, *self.expected})
        changed = [name for name in names if found.get(name) != self.expected.get(name)]
        return f"other results: {changed}" if changed else ""


def run_scenario(
    name: str,
    place: Path,
    wanted: Callable[[int, str, str], bool],
    report: Callable[[int, str, str, str], None],
) -> int:
    """Operations of a scenario, in a process of its own; ``report`` as of :class:`Scenario`."""
    place.mkdir(parents=True, exist_ok=True)
    reader, writer = os.pipe()

    def work() -> int:
        import torch
        import transformers

        torch.set_num_threads(1)  # others would not survive a fork
        assert transformers
        scenario = Scenario(SCENARIOS[name], place, wanted, report)
        scenario.prepare()
        os.write(writer, str(scenario.all()).encode())
        return 0

    code = in_child(work)
    os.close(writer)
    with os.fdopen(reader) as said:
        operations = said.read()
    if code != 0 or not operations:
        raise AssertionError(f"{name}: ended with {code}")
    return int(operations)
