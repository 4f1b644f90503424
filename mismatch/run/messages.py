"""What a worker tells the process that started it: lines on its output, error files in the run.

Lines that begin with one of these words are for the parent, all others go to ``logs/<label>.log``::

    progress rollout 12/64 sequences …      shown while the stage runs
    ready                                   weights are loaded, work begins
    timing generate 12.31                   seconds of one part of the work
    error {"message": …, "fix": …}          where no error file could be written
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import NoReturn

from mismatch.errors import MismatchError, OutOfMemory, WrongAnswer
from mismatch.run.files import parse_json, read_regular
from mismatch.run.provenance import redact

PROGRESS, READY, TIMING, ERROR = "progress ", "ready", "timing ", "error "
SAMPLED = "sampled"  # timing of an engine that goes on with its prefill: the tokens are saved
TIMING_LINE = re.compile(TIMING + r"(\S+) (\d+\.\d+)")
KINDS = {"out-of-memory": OutOfMemory, "wrong-answer": WrongAnswer}  # of errors in files
OUT_OF_MEMORY = (
    "a killed process is often out of memory: "
    "lower --num-prompts, --max-tokens or --micro-batch-tokens"
)
# What libraries write where the system refuses something, and what helps; case is ignored.
LIMITS = (
    ("too many open files", "allow more open files: ulimit -n 4096"),
    ("allocate memory", "free memory, or lower --num-prompts, --max-tokens, --micro-batch-tokens"),
    ("could not create a primitive", "free memory, or lower --num-prompts and --max-tokens"),
    ("bad_alloc", "free memory, or lower --num-prompts, --max-tokens, --micro-batch-tokens"),
    ("creating shared memory", "in a container: docker run --shm-size=2g (or --ipc=host)"),
    ("no space left on device", "free space, or --out DIR and TMPDIR on another disk"),
)


# What the engines' libraries write while nothing else can be said of a worker, and what that means.
PHASES = (
    ("Loading safetensors", "loading weights"),
    ("Starting to load", "loading weights"),
    ("Load weight begin", "loading weights"),
    ("vLLM's torch.compile", "compiling"),  # "disabling torch.compile" is no phase
    ("Compiling a graph", "compiling"),
    ("Capturing", "capturing graphs"),
    ("Capture cuda graph begin", "capturing graphs"),
    ("Initializing a V1 LLM engine", "starting the engine"),
    ("KV cache size", "starting the engine"),
)
PROGRESS_INTERVAL_S = 0.5
LEAST_SHARE, LEAST_S = 0.1, 5.0  # done, and seconds, before a time left is said


def error_path(run_dir: Path | str, label: str) -> Path:
    return Path(run_dir) / "errors" / f"{label}.json"


def pass_label(name: str) -> str:
    """Under which the reason of an optional pass that failed is left."""
    return f"pass-{name.replace(':', '-').replace('/', '-')}"


def remedy(said: str, fix: str) -> str:
    """Return what helps where the system refused something, else ``fix``."""
    return next((helps for sign, helps in LIMITS if sign in said.lower()), fix)


def read_error(run_dir: Path | str, label: str) -> MismatchError | None:
    """Return what :func:`write_error` left, or None."""
    with contextlib.suppress(OSError):
        return error_in(read_regular(error_path(run_dir, label)).decode(errors="replace"))
    return None


def write_error(run_dir: Path | str, label: str, error: MismatchError) -> None:
    """Leave a worker's error, which the parent will raise."""
    document = {"message": error.message, "fix": remedy(error.message, error.fix)}
    for kind, of_it in KINDS.items():
        if isinstance(error, of_it):
            document["kind"] = kind
    text = redact(json.dumps(document))
    path = error_path(run_dir, label)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError:  # a full disk: the reason itself, perhaps
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        say(f"{ERROR}{text}")


def say(line: str) -> None:
    """Write one whole line of a worker, which no other process on the same pipe can split.

    ``print`` writes its line end apart when Python is unbuffered, as workers are.
    """
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def left(done: int, total: int, elapsed_s: float) -> str:
    """Return the time left, from when it can be told: after a tenth, and after 5 s.

    >>> left(8, 64, 12.0), left(4, 64, 12.0), left(32, 64, 3.0)
    (', eta 84 s', '', '')
    """
    if done < LEAST_SHARE * total or elapsed_s < LEAST_S:
        return ""
    return f", eta {elapsed_s * (total - done) / max(done, 1):.0f} s"


class Reporter:
    """Writes ``progress`` lines for the parent, a few per second.

    Example: ``progress fsdp:grad 4096/7200 tokens, 812 tok/s, eta 4 s``.
    """

    def __init__(self, what: str, unit: str = "sequences") -> None:
        self.what, self.unit = what, unit
        self.start = time.monotonic()
        self.last = 0.0

    def __call__(self, done: int, total: int, tokens: int) -> None:
        now = time.monotonic()
        if now - self.last < PROGRESS_INTERVAL_S and done < total:
            return
        self.last = now
        elapsed = max(now - self.start, 1e-9)
        rate = f"{tokens / elapsed:.0f} tok/s{left(done, total, elapsed)}"
        say(f"{PROGRESS}{self.what} {done}/{total} {self.unit}, {rate}")


def exit_worker(code: int) -> NoReturn:
    """End a worker at once: all is saved, and tearing torch down takes seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def report_ready() -> None:
    """Tell the parent that a worker's start-up is over."""
    say(READY)


def report_timing(name: str, seconds: float) -> None:
    """Tell the parent how long one part of a worker's work took."""
    say(f"{TIMING}{name} {seconds:.3f}")


def clear_errors(run_dir: Path, label: str) -> None:
    for path in error_files(run_dir, label):
        path.unlink()


def error_in(text: str) -> MismatchError | None:
    """Return the error that :func:`write_error` put there; None if it is cut short, or not one."""
    try:
        fields = parse_json(text.encode())
        kind = KINDS.get(str(fields.get("kind")), MismatchError)
        return kind(str(fields["message"]), str(fields["fix"]))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def error_files(run_dir: Path, label: str) -> list[Path]:
    """Of a worker and of its ranks: ``<label>.json``, ``<label>-rank0.json`` …"""
    return [*(run_dir / "errors").glob(f"{label}.json"), *(run_dir / "errors").glob(f"{label}-*")]
