"""``manifest.json`` of a run directory: what was written, from what, and its checksum.

Every artefact is written to a temporary name, synced, renamed, and then recorded here: an artefact
that is recorded is whole. One whose bytes have changed since, or that the manifest does not list,
is refused when it is read. A directory without a manifest (files copied one by one) is read
unverified, and gets none: a list of what is written there now would refuse all that was copied.

A checksum finds accidents. Whoever edits a file on purpose can edit its entry as well: what a run
says is a claim of whoever made it (SECURITY.md).

Example of an entry::

    "scores/fsdp.parquet": {
      "sha256": "5d1c…", "bytes": 4182, "schema": "mismatch.scoring/1",
      "made_by": "0c1f9e1b2a3d",                        hash of the spec that made it
      "inputs": {"rollout.parquet": "88ab…"},           checksums of what it was made from
      "made_with": {"torch": "2.13.0", …, "weights": "9c1f…"}
    }
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NoReturn

from mismatch.errors import STORED, MismatchError
from mismatch.run.files import open_regular, parse_json, read_regular

MAKE_AGAIN = "copy the run again, or delete this file, then mismatch check --resume RUN"
# What reading code raises where a value is of another kind than it writes.
WRONG = (
    *(TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError),
    *(StopIteration, NotImplementedError),
)


@contextmanager
def damage_named(path: Path | str) -> Iterator[None]:
    """Around all that reads one file.

    Raises:
        MismatchError: its content is not what this version writes.
    """
    stored = STORED.set(True)
    try:
        yield
    except WRONG as error:
        fault = f"{path} is damaged, or of another version: {type(error).__name__}: {error}"
        raise MismatchError(fault, MAKE_AGAIN) from error
    finally:
        STORED.reset(stored)


NAME = "manifest.json"
SCHEMA = "mismatch.manifest/1"
# A run begins with the first, a copied report with the second; other artefacts come with them.
FIRST = ("rollout.parquet", "report.json")
# The package that workers import: the one link that a run may hold. Each command that starts a
# worker makes it again (mismatch/processes/launch.py).
PACKAGE_LINK = ("package", "mismatch")
Entry = dict[str, Any]


def require_no_links(run_dir: Path | str) -> None:
    """Refuse a run directory that holds symbolic links, before anything in it is read or written.

    Raises:
        MismatchError: a link, which is named.
    """
    run_dir = Path(run_dir)
    for path in run_dir.rglob("*"):  # does not follow links to directories
        if path.is_symlink() and path.parts[-2:] != PACKAGE_LINK:
            fault = f"{path} is a symbolic link, and a run directory must not hold any"
            fix = "copy the run without links (rsync --no-links, cp without -a), or delete the link"
            raise MismatchError(fault, fix)


def write_atomic(path: Path, write: Callable[[BinaryIO], object]) -> Path:
    """Call ``write(file)`` on a new file, sync and rename it: a reader sees the whole file or none.

    The temporary name is random and the file must be new, so that no link that lies in a foreign
    directory can lead the bytes elsewhere. Only its owner can read the file (mode 0600).

    Raises:
        MismatchError: the disk is full, the directory cannot be written …; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    left = f".{glob.escape(path.name)}.{'[0-9a-f]' * 16}.partial"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_dead(each for each in path.parent.glob(left) if each.is_file())
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not temporary.exists():  # another took it for a dead writer's
                return write_atomic(path, write)
            write(file)
            file.flush()
            os.fsync(descriptor)
            os.replace(temporary, path)  # while the lock holds, or another may remove it
        _sync(path.parent)
    except OSError as error:
        raise MismatchError(
            f"cannot write {path}: {error.strerror or error}",
            "free disk space or choose another directory: --out DIR; "
            "what was finished before stays: --resume",
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return path


def remove_dead(partials: Iterable[Path]) -> None:
    """Remove temporary files of dead writers, but no links; a writer at work holds a lock."""
    for path in [*partials]:
        with suppress(OSError):  # a writer is at work, or has just ended
            mode = os.O_RDONLY if path.is_dir() else os.O_RDWR  # NFS locks what can be written
            descriptor = os.open(path, mode | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            finally:
                os.close(descriptor)


def _sync(path: Path) -> None:
    """To the disk itself: a rename must never outlive the bytes that it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def entries(run_dir: Path | str) -> dict[str, Entry]:
    """Return everything recorded, by path inside the run directory; empty without a manifest.

    Raises:
        MismatchError: a manifest that is no manifest, or of another version.
    """
    path = Path(run_dir) / NAME
    require_no_links(run_dir)
    try:
        document = parse_json(read_regular(path))
        schema, artefacts = document["schema"], document["artefacts"]
        if schema == SCHEMA:
            _require_entries(artefacts)
    except FileNotFoundError:
        return {}
    except NotADirectoryError:
        fault = f"{run_dir} is a file, not a run directory"
        fix = f"name the directory that holds report.json: {Path(run_dir).parent}"
        raise MismatchError(fault, fix) from None
    except (OSError, *WRONG) as error:
        fault = f"{path} cannot be read: {error}"
        fix = "delete it to read the artefacts unverified, or make the run again"
        raise MismatchError(fault, fix) from error
    require_schema(path, schema, SCHEMA)
    recorded: dict[str, Entry] = artefacts
    return recorded


def _require_entries(artefacts: Any) -> None:
    """Raise an error of :data:`WRONG` where entries are not as :func:`record` writes them."""
    for name, entry in artefacts.items():
        for path in (name, *entry["inputs"]):
            parts = PurePosixPath(path)
            if (
                not (path.isprintable() and parts.parts)
                or parts.is_absolute()
                or ".." in parts.parts
            ):
                raise ValueError(f"{path!r} is no name of a file inside the run")
        texts = [entry["sha256"], entry["schema"], entry["made_by"], *entry["inputs"].values()]
        texts += [*entry.get("made_with", {}).values()]
        if not all(isinstance(text, str) for text in texts) or type(entry["bytes"]) is not int:
            raise TypeError(f"the entry of {name}")


def record(
    run_dir: Path | str,
    name: str,
    schema: str,
    made_by: str = "",
    inputs: Iterable[str] = (),
    made_with: dict[str, str] | None = None,
) -> None:
    """Enter an artefact that has just been written; nothing where files came without a manifest.

    Args:
        name: its path inside the run directory.
        made_by: hash of the spec that made it.
        inputs: names of the recorded artefacts that it was made from.
        made_with: versions of the packages, and the digest of the checkpoint.
    """
    run_dir = Path(run_dir)
    with _locked(run_dir):
        copied = [each for each in FIRST if each != name and (run_dir / each).exists()]
        if copied and not (run_dir / NAME).exists():
            return
        recorded = entries(run_dir)
        recorded[name] = {
            "sha256": sha256(run_dir / name),
            "bytes": (run_dir / name).stat().st_size,
            "schema": schema,
            "made_by": made_by,
            "inputs": {s: recorded[s]["sha256"] for s in inputs if s in recorded},
            **({"made_with": made_with} if made_with else {}),
        }
        _save(run_dir, recorded)


def forget(run_dir: Path, name: str) -> None:
    """Delete an artefact, and its entry if it has one."""
    with _locked(run_dir):
        (run_dir / name).unlink(missing_ok=True)
        recorded = entries(run_dir)
        if recorded.pop(name, None):
            _save(run_dir, recorded)


def verify(run_dir: Path | str, name: str) -> None:
    """Compare an artefact with what was recorded; without a manifest there is nothing to compare.

    Raises:
        MismatchError: its bytes are not those that were written, or the manifest does not list it.
    """
    run_dir = Path(run_dir)
    entry, path = entries(run_dir).get(name), run_dir / name
    if not path.exists() or not (run_dir / NAME).exists():
        return
    if entry is None:
        _refuse(
            path,
            f"is not listed in {NAME}: its writer was interrupted, or something else put it there",
        )
    size = path.stat().st_size
    if size < entry["bytes"]:
        _refuse(path, f"is truncated: {size:,} of {entry['bytes']:,} bytes")
    if size != entry["bytes"] or sha256(path) != entry["sha256"]:
        _refuse(path, "is not the file that was written: its checksum differs from manifest.json")


def is_current(
    run_dir: Path | str, name: str, made_by: str, inputs: Iterable[str] | None = None
) -> bool:
    """Return whether an artefact is whole, was made by this spec, and from what is there now.

    Args:
        inputs: the recorded artefacts among these are all that it was made from; None: any.
    """
    run_dir = Path(run_dir)
    recorded = entries(run_dir)
    entry = recorded.get(name)
    if entry is None or entry["made_by"] != made_by or not _intact(run_dir, name, entry):
        return False
    if inputs is not None and set(entry["inputs"]) != recorded.keys() & set(inputs):
        return False
    return all(
        source in recorded
        and recorded[source]["sha256"] == checksum
        and _intact(run_dir, source, recorded[source])
        for source, checksum in entry["inputs"].items()
    )


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_file(path: Path) -> None:
    if not path.exists():
        raise MismatchError(f"{path} does not exist", missing_fix(path))


def missing_fix(path: Path) -> str:
    """Return the command that makes an artefact."""
    if path.name == "rollout.parquet":
        return f"make it: mismatch rollout --model MODEL --out {path.parent}"
    if path.parent.name == "scores":
        return f"make it: mismatch score {path.parent.parent}"
    return "make it: mismatch check --model MODEL"


def require_schema(path: Path, schema: str | None, wanted: str) -> None:
    if schema != wanted:
        fault = f"{path} has schema {schema or 'none'}, this version reads {wanted}"
        raise MismatchError(fault, "make it again with this version of mismatch")


def _intact(run_dir: Path, name: str, entry: Entry) -> bool:
    path = run_dir / name
    return (
        path.exists() and path.stat().st_size == entry["bytes"] and sha256(path) == entry["sha256"]
    )


def _refuse(path: Path, what: str) -> NoReturn:
    raise MismatchError(f"{path} {what}", MAKE_AGAIN)


def _save(run_dir: Path, recorded: dict[str, Entry]) -> None:
    document = {"schema": SCHEMA, "artefacts": dict(sorted(recorded.items()))}
    text = json.dumps(document, indent=1) + "\n"
    write_atomic(run_dir / NAME, lambda file: file.write(text.encode()))


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """One writer at a time: an engine and a training world may both be at work."""
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
