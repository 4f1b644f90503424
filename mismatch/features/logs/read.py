"""Read the numbers of each step from what a framework printed or logged.

A console log, JSON lines, TRL's ``trainer_state.json``, TensorBoard's event files, or an offline
run of W&B. Both binary files are records of Protocol Buffers; the few fields that hold scalars are
read here, so that neither package is needed. The layouts were read in verl 0.9.1
(``step:N - k:value`` and FileLogger), TRL 1.16 (a dict per step), SkyRL 0.3.0 (verl's lines),
slime (``step N: {…}``), prime-rl (``Step N | Loss: …``) and NeMo-RL (``Step N/M``, then
``• Name: value``).
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError
from mismatch.run.files import open_regular, parse_json

Point = tuple[int | None, dict[str, float]]  # a step (None: the line names none), name -> value
NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf|NaN|Infinity)"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# How a line names its step: verl and SkyRL, slime, prime-rl, NeMo-RL.
STEP = re.compile(
    r"(?:\bstep:(\d+) - |\b(?:step|rollout) (\d+): \{|\bStep (\d+) \||\bStep (\d+)/\d+)"
)
DASHED = re.compile(rf"(?: - |^)([^\s:]+):(?:np\.\w+\()?({NUMBER})")
QUOTED = re.compile(rf"['\"]([^'\"]+)['\"]: (?:np\.\w+\()?['\"]?({NUMBER})")
BARRED = re.compile(rf"(?:\||•) *([A-Z][\w. ]*?): +({NUMBER})")
TEXT = (".log", ".txt", ".out", ".err")
DUMPS = {".jsonl", ".parquet", ".pt", ".dp", ".pkl"}  # suffixes, before one of compression too
LARGEST = 1 << 26  # bytes of one record: more than any step's scalars
WANDB = b":W&B"
BLOCK = 1 << 15  # bytes of W&B's blocks (LevelDB's log format)


@dataclass
class History:
    """The numbers of a run, by step."""

    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    """Step -> name -> value, the last that was logged."""
    remarks: list[str] = field(default_factory=list)
    """What was noticed while reading."""

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps that have a number of this name, in order, and the numbers."""
        held = [(step, of[name]) for step, of in sorted(self.steps.items()) if name in of]
        return [step for step, _ in held], [value for _, value in held]


def sources(path: Path) -> list[Path]:
    """Return the logs that a path names, the oldest first; [] where it names none."""
    if path.is_dir():
        if any(DUMPS.intersection(file.suffixes[-2:]) for file in path.rglob("*")):
            return []  # a folder of dumps, whatever else is in it
        found = [*path.rglob("events.out.tfevents*"), *path.rglob("run-*.wandb")]
        return sorted(found, key=lambda each: (each.stat().st_mtime_ns, each.name))
    with open_regular(path) as file:
        start = file.read(1 << 16)
    if path.suffix == ".wandb" or "tfevents" in path.name or path.suffix in TEXT:
        return [path]
    if path.suffix in (".jsonl", ".json"):  # a dump has lists in its rows, a log has numbers
        line = start.partition(b"\n")[0] if path.suffix == ".jsonl" else start
        if path.suffix == ".json":
            return [path] if b'"log_history"' in _all(path) else []
        try:
            entry = parse_json(line)
        except (ValueError, RecursionError):
            return []
        entry = entry.get("data", entry) if isinstance(entry, dict) else {}
        numbers = isinstance(entry, dict) and any(_is_number(value) for value in entry.values())
        lists = isinstance(entry, dict) and any(isinstance(value, list) for value in entry.values())
        return [path] if numbers and not lists else []
    return [path] if not path.suffix and b"\0" not in start else []


def _all(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def read_log(paths: list[Path]) -> History:
    """Return the numbers of every step.

    Steps that go back are a restart: the later numbers count, and that is said, as is a last record
    that was cut off.

    Raises:
        MismatchError: a file cannot be read.
    """
    history, latest, counted = History(), -1, 0
    for path in paths:
        for step, numbers in _points(path, history):
            if step is None:  # a line without a step: of the one before, or the next
                counted += 1
                step = counted
            if step < latest:
                history.remarks.append(
                    f"{path.name}: steps go back from {latest} to {step}: a restart or a second "
                    "run; the later numbers count"
                )
                # What was logged of later steps before is none of this run.
                for later in [each for each in history.steps if each >= step]:
                    del history.steps[later]
            latest = step
            history.steps.setdefault(step, {}).update(numbers)
    return history


def _points(path: Path, history: History) -> Iterator[Point]:
    """Yield what each record of a file says."""
    try:
        with open_regular(path) as file:
            start = file.read(4)
        if start == WANDB:
            yield from _wandb(path, history)
        elif "tfevents" in path.name:
            yield from _tensorboard(path, history)
        elif path.suffix == ".json":
            for entry in parse_json(_all(path))["log_history"]:
                yield entry.get("step"), _numbers(entry)
        else:
            yield from _lines(path, history)
    except (OSError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError,
            AttributeError, struct.error) as error:  # fmt: skip
        raise MismatchError(f"{path} cannot be read: {error}", "is it complete?") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(entry: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of an entry by name; TRL's newer releases write them as text."""
    found = {}
    for name, value in entry.items():
        if isinstance(value, str) and re.fullmatch(NUMBER, value):
            value = float(value)
        if _is_number(value):
            found[name.removeprefix("train/")] = float(value)
    return found


def _lines(path: Path, history: History) -> Iterator[Point]:
    step: int | None = None
    with open_regular(path) as file:
        for raw in iter(lambda: file.readline(LARGEST), b""):
            text = COLOUR.sub("", raw.decode("utf-8", "replace"))
            if text.lstrip().startswith('{"'):
                try:
                    entry = parse_json(raw)
                except (ValueError, RecursionError):
                    if not raw.endswith(b"\n"):
                        history.remarks.append(f"{path.name}: the last line is cut off: left out")
                        return
                else:
                    at = entry.get("step", entry.get("_step", entry.get("global_step")))
                    inner = entry.get("data", entry)
                    numbers = _numbers(inner if isinstance(inner, dict) else {})
                    if numbers:
                        yield (int(at) if _is_number(at) and math.isfinite(at) else None), numbers
                    continue
            if (named := STEP.search(text)) is not None:
                step = int(next(filter(None, named.groups())))
            found = DASHED.findall(text) if " - " in text else []
            found = found or QUOTED.findall(text) if "{" in text else found or BARRED.findall(text)
            if found and not raw.endswith(b"\n"):
                history.remarks.append(f"{path.name}: the last line is cut off: left out")
                return
            numbers = {name.removeprefix("train/"): float(value) for name, value in found}
            if numbers:
                alone = named is None and text.lstrip().startswith("{'")  # TRL names no step
                yield (None if alone else step), numbers


# ---------------------------------------------------------------- Protocol Buffers


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of every field of a message: an int, or its bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(kind)
        if size is None:
            if kind != 2:
                raise ValueError("a record is damaged")
            size, at = _varint(data, at)
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("a record is damaged")
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if not data[at - 1] & 128:
            return value, at


def _tensorboard(path: Path, history: History) -> Iterator[Point]:
    """Yield the scalars of an event file: Event.step 2, .summary 5; Value .tag 1, .simple_value 2,
    .tensor 8 with .float_val 5 or .tensor_content 4."""
    with open_regular(path) as file:
        while head := file.read(12):
            size = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else LARGEST + 1
            data = file.read(size + 4) if size <= LARGEST else b""
            if len(data) != size + 4:
                history.remarks.append(f"{path.name}: the last record is cut off: left out")
                return
            step, numbers = 0, dict[str, float]()
            for number, value in _fields(data[:size]):
                step = value if number == 2 else step
                for _, entry in _fields(value) if number == 5 else ():
                    of = dict(_fields(entry))
                    raw = of.get(2)
                    if raw is None and 8 in of:
                        tensor = dict(_fields(of[8]))
                        raw = tensor.get(5, tensor.get(4))
                    if isinstance(raw, bytes) and len(raw) == 4 and isinstance(of.get(1), bytes):
                        name = of[1].decode("utf-8", "replace").removeprefix("train/")
                        numbers[name] = struct.unpack("<f", raw)[0]
            if numbers:
                yield step, numbers


def _wandb(path: Path, history: History) -> Iterator[Point]:
    """Yield the history of an offline run: Record.history 2, HistoryRecord .item 1, .step 2 with
    .num 1, HistoryItem .key 1, .nested_key 2, .value_json 16."""
    for record in _wandb_records(path, history):
        for number, value in _fields(record):
            if number != 2:
                continue
            step, numbers = None, dict[str, float]()
            for kind, entry in _fields(value):
                if kind == 2:
                    step = int(dict(_fields(entry)).get(1, 0))
                elif kind == 1:
                    parts = list(_fields(entry))
                    names = [each for at, each in parts if at == 2] or [
                        each for at, each in parts if at == 1
                    ]
                    text = next((each for at, each in parts if at == 16), b"")
                    try:
                        held = json.loads(text)
                    except ValueError:
                        continue
                    name = ".".join(each.decode("utf-8", "replace") for each in names)
                    numbers |= _numbers({name: held})
            # A framework that logs a step has it among the numbers.
            own = next((numbers[name] for name in OWN_STEPS if name in numbers), None)
            known = {name: each for name, each in numbers.items() if not name.startswith("_")}
            if known:
                yield (int(own) if own is not None and math.isfinite(own) else step), known


OWN_STEPS = ("global_step", "step", "trainer/global_step", "rollout/step")


def _wandb_records(path: Path, history: History) -> Iterator[bytes]:
    """Yield the records of LevelDB's log format: blocks of 32 KiB, of chunks with their kind."""
    with open_regular(path) as file:
        file.read(7)
        at, parts = 7, b""
        while True:
            left = BLOCK - at % BLOCK
            if left < 7:
                at += len(file.read(left))
                continue
            head = file.read(7)
            if not head:
                return
            size, kind = struct.unpack("<HB", head[4:]) if len(head) == 7 else (0, 0)
            data = file.read(size)
            if len(head) < 7 or len(data) < size or kind not in (1, 2, 3, 4):
                if any(head):
                    history.remarks.append(f"{path.name}: the last record is cut off: left out")
                return
            at += 7 + size
            parts = data if kind in (1, 2) else parts + data
            if kind in (1, 4):
                yield parts
