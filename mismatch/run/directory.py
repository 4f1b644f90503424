"""Run directories: make one, find one to resume, and hold it while a command writes there."""

from __future__ import annotations

import fcntl
import hmac
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from mismatch.codec import from_json
from mismatch.errors import MismatchError
from mismatch.run import manifest, store
from mismatch.run.files import read_regular
from mismatch.run.manifest import WRONG, damage_named, remove_dead, require_no_links, sha256
from mismatch.run.provenance import now, provenance
from mismatch.run.resume import differences
from mismatch.run.trust import FLAG, seal
from mismatch.specs import CheckSpec, portable, spec_hash, to_dict

RUN, SPEC = "run.json", "spec.json"
RUN_SCHEMA = "mismatch.run/1"
DEFAULT_PARENT = Path("runs")
NEWEST = "newest"  # what --resume without a directory means
LOCK = ".lock"
TYPED = ("check", "rollout")  # commands whose spec was typed, or trusted, by who gives them


class Journal:
    """The entry of one command in ``run.json``; written again as stages end.

    Attributes:
        seconds: per stage, those of earlier commands in this run included.
        timings: per worker, the parts of its work.
    """

    def __init__(self, run_dir: Path, verb: str, spec: CheckSpec, command: str) -> None:
        self.run_dir = run_dir
        self.earlier = invocations(run_dir)
        self.entry: dict[str, Any] = {
            "verb": verb,
            "spec_hash": spec_hash(spec),
            "finished": None,
            **provenance(command, spec.rollout.prompts.file),
        }
        self.seconds: dict[str, float] = {}
        self.timings: dict[str, dict[str, float]] = {}
        for invocation in self.earlier:
            self.seconds |= invocation.get("seconds", {})
            self.timings |= invocation.get("timings", {})

    def save(self) -> None:
        entry = {**self.entry, "seconds": self.seconds, "timings": self.timings}
        document = {"schema": RUN_SCHEMA, "invocations": [*self.earlier, entry]}
        store.write_json(self.run_dir / RUN, document)


@contextmanager
def at_work(
    run_dir: Path, verb: str, spec: CheckSpec, command: str, new: bool = False
) -> Iterator[Journal]:
    """Hold a run directory while a command writes into it, and note what the command was.

    Args:
        new: the directory was made for this command; a run that is there is another's, which
            began at the same moment.

    Raises:
        MismatchError: another process is at work there, or the directory holds symbolic links.
    """
    with _lock(run_dir) as free:
        if not free or (new and (run_dir / SPEC).exists()):
            fault = f"another mismatch process is at work in {run_dir}"
            raise MismatchError(fault, "wait until it ends, or choose another directory: --out DIR")
        require_no_links(run_dir)
        remove_dead(run_dir.rglob("*.partial"))
        own = verb in TYPED or is_own(run_dir)
        written = store.write_json(run_dir / SPEC, to_dict(spec))
        journal = Journal(run_dir, verb, spec, command)
        if own:
            journal.entry["seal"] = seal(read_regular(written))
        journal.save()
        yield journal
        journal.entry["finished"] = now()
        journal.save()


def open_run(
    verb: str, spec: CheckSpec, model: str, out: Path | None, resume: str | None
) -> tuple[Path, bool]:
    """Return the directory to work in, and whether it continues an earlier run.

    Args:
        resume: a run directory, ``NEWEST``, or None for a new run.

    Raises:
        MismatchError: the run to resume is none or has another spec (the differences are named);
            the new directory is occupied or cannot be made.
    """
    if resume is None:
        return new_directory(out, model), False
    run_dir = Path(resume)
    if resume == NEWEST:
        here = out if out is not None and (out / SPEC).exists() else None
        newest = newest_unfinished(DEFAULT_PARENT, verb, spec) if out is None else here
        if newest is None:
            return new_directory(out, model), False
        run_dir = newest
    require_same_spec(run_dir, spec)
    require_same_prompts(run_dir, spec)
    return run_dir, True


def new_directory(out: Path | None, model: str) -> Path:
    """Make a new, empty directory for its owner alone: ``out``, or runs/TIME-MODEL.

    Raises:
        MismatchError: it is not empty, or cannot be made or written.
    """
    if out is not None:
        require_new(out)
    stem = out or DEFAULT_PARENT / f"{datetime.now():%Y%m%d-%H%M%S}-{Path(model).name or 'model'}"
    folder, number = stem, 1
    while True:
        new = not folder.exists()
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=out is not None)  # one that was there keeps its mode
            (folder / LOCK).touch(0o600)
            return folder
        except OSError as error:
            if isinstance(error, FileExistsError) and out is None and folder.is_dir():
                number += 1  # of two commands that begin in one second each gets another
                folder = stem.with_name(f"{stem.name}-{number}")
                continue
            if new and folder.is_dir():
                folder.rmdir()
            fault = f"cannot create {folder}: {error.strerror}"
            raise MismatchError(fault, "choose a writable directory: --out DIR") from error


def require_new(out: Path) -> None:
    """Refuse a directory that holds anything.

    Raises:
        MismatchError: it does, or is no directory.
    """
    # The lock, and what a command left before its first file, do not count.
    if out.exists() and (
        not out.is_dir()
        or any(path.name != LOCK and not path.name.endswith(".partial") for path in out.iterdir())
    ):
        fix = "choose another --out, or delete it"
        if (out / SPEC).exists():
            fix = f"it holds another run: choose another --out, or continue it: --resume {out}"
        raise MismatchError(f"{out} exists and is not empty", fix)


def load_spec(run_dir: Path) -> CheckSpec:
    """Return the spec of a run.

    Raises:
        MismatchError: no run there, or one of a version with other settings.
    """
    path = run_dir / SPEC
    require_no_links(run_dir)
    if not path.exists():
        fault = f"no run in {run_dir}: it has no {SPEC}"
        fix = "give a run directory, or make one: mismatch rollout --model MODEL --out DIR"
        # A command was killed before it wrote what it was to do.
        if (run_dir / LOCK).exists() and not (run_dir / store.ROLLOUT).exists():
            fault = f"nothing was done yet in {run_dir}: it has no {SPEC}"
            fix = "start again with the same command"
        raise MismatchError(fault, fix)
    data = store.read_json(path)
    try:
        return from_json(CheckSpec, data)
    except WRONG as error:
        fault = f"{path} is no spec that this version knows: {error}"
        fix = "read the run with the version of mismatch that made it"
        raise MismatchError(fault, fix) from error


def is_own(run_dir: Path) -> bool:
    """Return whether a command of this user wrote the spec of a run (:func:`trust.seal`)."""
    try:
        mark = seal(read_regular(run_dir / SPEC))
    except OSError:
        return False
    seals = [str(entry.get("seal", "")) for entry in invocations(run_dir)]
    return bool(mark) and any(hmac.compare_digest(mark, each) for each in seals)


def require_same_spec(run_dir: Path, spec: CheckSpec) -> None:
    """Resuming with other settings would mix two runs in one directory.

    Raises:
        MismatchError: it names every setting that differs.
    """
    recorded = load_spec(run_dir)
    # Fixes, experiments and features add to a run; what is there stays what it is.
    recorded = replace(
        recorded,
        fixes=spec.fixes,
        budget_minutes=spec.budget_minutes,
        verdict=spec.verdict,
        explain=spec.explain,
        extras=spec.extras,
    )
    if spec_hash(recorded) == spec_hash(spec):
        return
    lines = differences(portable(to_dict(recorded)), portable(to_dict(spec)))
    raise MismatchError(
        f"{run_dir} was made with other settings:\n    " + "\n    ".join(lines),
        "resume with the same flags (or with none: --resume RUN), or start a new run without "
        "--resume",
    )


def require_same_prompts(run_dir: Path, spec: CheckSpec) -> None:
    """Refuse other prompts: the file of prompts is part of what was asked.

    Raises:
        MismatchError: its content is not what the run began with.
    """
    file = spec.rollout.prompts.file
    sums = [entry["prompts_sha256"] for entry in invocations(run_dir) if "prompts_sha256" in entry]
    if file is not None and sums and not (file.is_file() and sha256(file) == sums[-1]):
        fault = f"{file} has changed since {run_dir} was begun"
        raise MismatchError(fault, "put the old file back, or start a new run without --resume")


def require_known_prompts(run_dir: Path, spec: CheckSpec) -> None:
    """Refuse prompts that a stored spec names and that the run does not know by their content.

    Whoever wrote the spec may never have seen them: what a file, or a data set that this user's
    token can read, holds would be copied into the run.

    Raises:
        MismatchError: no command of the run noted the file's checksum, or it has changed; a folder,
            or a data set of a hub, of which no checksum is noted.
    """
    prompts = spec.rollout.prompts
    if prompts.path is None and prompts.dataset is None:
        return
    file = prompts.file
    noted = any("prompts_sha256" in entry for entry in invocations(run_dir))
    unknown = file is None or (file.exists() and not (noted and file.is_file()))
    if unknown and not is_own(run_dir):
        fault = (
            f"the spec of {run_dir} names {prompts.dataset or prompts.path}, and the run holds no "
            "checksum of it"
        )
        fix = f"if that is yours: {FLAG}; or give the flags of the run again, with --resume"
        raise MismatchError(fault, fix)
    if file is not None and file.exists():
        require_same_prompts(run_dir, spec)


def newest_unfinished(parent: Path, verb: str, spec: CheckSpec) -> Path | None:
    """Return the newest run of this verb and spec that did not end and is not at work."""
    candidates = sorted(parent.glob(f"*/{RUN}"), key=lambda p: p.stat().st_mtime_ns, reverse=True)
    for path in candidates:
        try:
            last = invocations(path.parent)[-1]
        except (MismatchError, IndexError):
            continue
        same = (last["verb"], last["spec_hash"]) == (verb, spec_hash(spec))
        if same and last["finished"] is None:
            with _lock(path.parent) as free:
                if free:
                    return path.parent
    return None


def invocations(run_dir: Path) -> list[dict[str, Any]]:
    """Return what worked in a run directory so far, oldest first.

    Raises:
        MismatchError: a ``run.json`` of another version.
    """
    require_no_links(run_dir)
    if not (run_dir / RUN).exists():
        return []
    document = store.read_json(run_dir / RUN)
    with damage_named(run_dir / RUN):
        manifest.require_schema(run_dir / RUN, document["schema"], RUN_SCHEMA)
        kept: list[dict[str, Any]] = list(document["invocations"])
        for entry in kept:
            needed = [entry["verb"], entry["spec_hash"], entry["command"]]
            needed += [entry["prompts_sha256"]] if "prompts_sha256" in entry else []
            parts = (entry.get("seconds", {}), entry.get("timings", {}))
            if not all(isinstance(text, str) for text in needed):
                raise TypeError("an invocation")
            if entry["finished"] is not None and not isinstance(entry["finished"], str):
                raise TypeError("finished")
            if not all(isinstance(part, dict) for part in parts):
                raise TypeError("seconds")
    return kept


@contextmanager
def _lock(run_dir: Path) -> Iterator[bool]:
    """Whether nobody else holds the directory; the kernel lets go of it when a process dies."""
    try:
        descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        fault = f"cannot write in {run_dir}: {error.strerror}"
        raise MismatchError(fault, "copy the run to a directory that can be written") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            free = False
        yield free
    finally:
        os.close(descriptor)
