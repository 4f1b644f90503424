"""What servers have answered so far, on disk: one line per sequence, so that a dead server, or a
dead client, costs what was in flight and no more.

``RUN/journal/rollout.jsonl``. The first line says what was asked and of whom; every other line is a
sequence, or says that earlier ones do not count. Lines are written in one piece and never changed;
a last line that was cut short is dropped.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatch.captures import Likeliest
from mismatch.engines.base import Sample
from mismatch.engines.distribution_capture import pack, unpack
from mismatch.errors import MismatchError

SCHEMA = "mismatch.journal/1"
PLACE = Path("journal") / "rollout.jsonl"


@dataclass
class Journal:
    """Append-only; made by :meth:`open`.

    Attributes:
        header: what the run asks, and who answers.
        samples: job -> its sequence, of those that count.
        answered_by: job -> address of the server.
    """

    path: Path
    header: dict[str, Any]
    samples: dict[int, Sample] = field(default_factory=dict)
    answered_by: dict[int, str] = field(default_factory=dict)

    @classmethod
    def open(cls, run_dir: Path, asked: str) -> Journal:
        """The journal of a run, with what is in it already.

        Args:
            asked: hash of what is asked for; a journal of something else begins anew.
        """
        path = run_dir / PLACE
        lines = _lines(path)
        header = lines[0] if lines else {}
        if header.get("schema") != SCHEMA or header.get("asked") != asked:
            path.unlink(missing_ok=True)
            return cls(path, {"schema": SCHEMA, "asked": asked})
        journal = cls(path, header)
        for number, line in enumerate(lines[1:], start=2):
            try:
                journal._take(line)
            except (ValueError, TypeError, KeyError, AttributeError, zlib.error) as error:
                raise MismatchError(
                    f"{path}:{number} holds no sequence",
                    "copy the run directory again, or delete this file: its sequences are sampled "
                    "anew",
                ) from error
        return journal

    @property
    def new(self) -> bool:
        """Whether nothing is on disk yet."""
        return not self.path.exists()

    def begin(self, facts: dict[str, Any]) -> None:
        """Write the header, with facts that a later process has to find again."""
        self.header |= facts
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write(self.header)

    def add(self, job: int, sample: Sample, server: str) -> None:
        """A finished sequence."""
        line = {
            "job": job,
            "server": server,
            "ids": sample.token_ids,
            "logprobs": sample.logprobs.tolist(),
            "finish": sample.finish_reason,
            "routed": _packed(sample.routed),
            "likeliest": _pair(sample.likeliest),
            "cached": sample.cached,
        }
        self._write(line)
        self._take(line)

    def void(self, jobs: list[int], reason: str) -> None:
        """These sequences do not count: their server was another one by then."""
        line = {"void": sorted(jobs), "reason": reason}
        self._write(line)
        self._take(line)

    def discard(self) -> None:
        """All is saved elsewhere."""
        self.path.unlink(missing_ok=True)
        if self.path.parent.is_dir() and not any(self.path.parent.iterdir()):
            self.path.parent.rmdir()

    def _take(self, line: dict[str, Any]) -> None:
        for job in line.get("void", ()):
            self.samples.pop(job, None)
            self.answered_by.pop(job, None)
        if "job" in line:
            self.samples[line["job"]] = Sample(
                line["ids"],
                np.asarray(line["logprobs"], np.float64),
                line["finish"],
                _unpacked(line["routed"]),
                likeliest=_likeliest(line.get("likeliest")),
                cached=line.get("cached"),
            )
            self.answered_by[line["job"]] = line["server"]

    def _write(self, line: dict[str, Any]) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                written = os.write(descriptor, data)
            finally:
                os.close(descriptor)
            if written < len(data):
                raise OSError(f"{written} of {len(data)} bytes")
        except OSError as error:
            raise MismatchError(
                f"{self.path} cannot be written: {error.strerror or error}",
                "free some space, then go on where it stopped: --resume",
            ) from error


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal; a last one that was cut short is taken off the file.

    Raises:
        MismatchError: another line is damaged: what it held cannot be known.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    lines, end = [], 0
    for number, raw in enumerate(data.splitlines(keepends=True), start=1):
        if not raw.endswith(b"\n"):
            break
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict):
            raise MismatchError(
                f"{path}:{number} is damaged",
                "copy the run directory again, or delete this file: its sequences are sampled anew",
            )
        lines.append(line)
        end += len(raw)
    if end < len(data):
        os.truncate(path, end)
    return lines


def _packed(array: NDArray[Any] | None) -> list[Any] | None:
    if array is None:
        return None
    shape, dtype, data = pack(array)
    return [shape, dtype, base64.b64encode(zlib.compress(data, 1)).decode()]


def _pair(top: Likeliest | None) -> list[Any] | None:
    return None if top is None else [_packed(top.ids), _packed(top.logprobs)]


def _likeliest(pair: list[Any] | None) -> Likeliest | None:
    return None if pair is None else Likeliest.of(*map(_unpacked, pair))


def _unpacked(packed: list[Any] | None) -> NDArray[Any] | None:
    if packed is None:
        return None
    shape, dtype, data = packed
    return unpack((shape, dtype, zlib.decompress(base64.b64decode(data))))
