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
import errno
import json
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.played_workers import Killed, Recording, digest, play
from tests.write_hooks import HOOKS, torn

FAULTS = ("ENOSPC", "EIO", "kill", "kill-worker")
CHECK = (
    *("--model", "tiny-gpt-oss", "--engine", "transformers", "--num-prompts", "4"),
    *("--samples-per-prompt", "2", "--max-tokens", "4", "--nproc-per-node", "1", "--exact-kl", "8"),
)
FIXES = ("--fix", "fp32-lm-head,fp32-router")
SCENARIOS: dict[str, tuple[str, ...]] = {
    "check": (*CHECK, "--depth", "quick"),
    "fixes": (*CHECK, "--no-noise-floor", *FIXES),
    "gradients": (*CHECK, "--no-noise-floor", "--gradients", "2"),
    "derived": (*CHECK, "--no-noise-floor", "--weights", "engine=mxfp4"),
}
TIMES = {"seconds", "timings", "peak_bytes", "run", "created", "started", "finished"}
OUTPUT: list[Any] = []  # of the commands that run in this process, the innermost last


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


def results(run: Path) -> dict[str, str]:
    """A digest of every artefact with numbers, its times left out; of the report, its judgement."""
    from mismatch.run import manifest
    from mismatch.run.tables import read_table

    data = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if path.suffix == ".parquet":
            schema = pq.read_schema(path).metadata[b"schema"].decode()
            table, _ = read_table(path, schema, set())
            data[name] = digest({key: table.column(key).to_pylist() for key in table.column_names})
        elif path.suffix == ".safetensors":
            data[name] = arrays(path)
        elif name in ("report.json", "comparison.json") or name.endswith("vocabulary.json"):
            data[name] = digest(without_times(json.loads(path.read_text())))
    for name in manifest.entries(run):
        manifest.verify(run, name)
    for directory in [run, *run.glob("fixes/*"), *run.glob("engines/*")]:
        if (directory / manifest.NAME).exists():
            for name in manifest.entries(directory):
                manifest.verify(directory, name)
    left = [path.name for path in run.rglob("*.partial")]
    assert not left, f"left behind: {left}"
    return data


def arrays(path: Path) -> str:
    from safetensors.numpy import load_file

    return digest({name: array.tolist() for name, array in load_file(path).items()})


def without_times(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: without_times(value) for key, value in data.items() if key not in TIMES}
    return [without_times(value) for value in data] if isinstance(data, list) else data


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
        folder: Path,
        wanted: Callable[[int, str, str], bool],
        report: Callable[[int, str, str, str], None],
    ) -> None:
        self.folder, self.wanted, self.report = folder, wanted, report
        self.root, self.run = folder / "disk", folder / "disk" / "run"
        self.command = ["check", *flags, "--out", str(self.run)]
        self.outcomes: dict[str, str] = {}  # of resuming a state of the disk
        self.log, self.resumed_log = folder / "fault.log", folder / "resumed.log"

    def prepare(self) -> dict[str, str]:
        """Record and play once: the results that every resumed run must have."""
        os.environ["MISMATCH_CACHE"] = str(self.root / "cache")
        recording = self.folder / "recording.pickle"
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
        shutil.rmtree(self.folder / "kept", ignore_errors=True)
        reader, writer = os.pipe()
        in_child(lambda: self.disturbed(writer))
        os.close(writer)
        with os.fdopen(reader) as lines:
            return int(lines.read() or 0)

    def disturbed(self, writer: int) -> int:
        """One run, and before each of its operations the trials."""
        HOOKS.install()
        HOOKS.root, HOOKS.at, own = str(self.root), self.trials, os.getpid()
        code = command(self.command, self.folder / "undisturbed.log")
        HOOKS.at = None
        if os.getpid() == own:  # children of trials come here too
            os.write(writer, str(HOOKS.count).encode())
        return code

    def trials(self, what: str, path: str) -> None:
        number, at = HOOKS.count, HOOKS.at
        operation = f"{what} {os.path.relpath(path, self.root)}"
        operation = re.sub(r"\.[0-9a-f]+\.partial", ".partial", operation)
        faults = [fault for fault in FAULTS if self.wanted(number, fault, operation)]
        if HOOKS.workers == 0:
            faults = [fault for fault in faults if fault != "kill-worker"]
        if not faults:
            return
        HOOKS.at = None
        # A copy for each: files that are open or locked here are others there.
        kept = self.folder / "kept"
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
            name = re.sub(r"\.[0-9a-f]+\.partial$", ".partial", str(path.relative_to(self.root)))
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
            resumed = results(self.run)
        except Exception as error:
            return f"after the resumption: {type(error).__name__}: {error}"
        names = sorted({*resumed, *self.expected})
        changed = [name for name in names if resumed.get(name) != self.expected.get(name)]
        return f"other results: {changed}" if changed else ""


def run_scenario(
    name: str,
    folder: Path,
    wanted: Callable[[int, str, str], bool],
    report: Callable[[int, str, str, str], None],
) -> int:
    """Operations of a scenario, in a process of its own; ``report`` as of :class:`Scenario`."""
    folder.mkdir(parents=True, exist_ok=True)
    reader, writer = os.pipe()

    def work() -> int:
        import torch
        import transformers

        torch.set_num_threads(1)  # others would not survive a fork
        assert transformers
        scenario = Scenario(SCENARIOS[name], folder, wanted, report)
        scenario.prepare()
        os.write(writer, str(scenario.all()).encode())
        return 0

    code = in_child(work)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        operations = pipe.read()
    if code != 0 or not operations:
        raise AssertionError(f"{name}: ended with {code}")
    return int(operations)
