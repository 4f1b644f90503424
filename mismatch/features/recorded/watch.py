"""`mismatch watch`: follow the dumps of a run while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from mismatch.errors import MismatchError
from mismatch.features.recorded.dumps import SUFFIXES, read_recorded
from mismatch.features.recorded.rows import row_groups
from mismatch.features.recorded.run import as_run
from mismatch.metrics.row_sums import Step
from mismatch.reports.formatting import line, number, percent
from mismatch.types import Pair, Sampling

WORSE = 3.0  # times the mean |delta| of the first steps: said to grow
FIRST = 3  # steps that the others are compared with


def follow(
    folder: Path, every_s: float, once: bool, note: Callable[[str], None], python: str | None = None
) -> Iterator[str]:
    """Yield a line for every step that is complete, as files of a dump appear.

    Args:
        once: stop after the files that are there.
        note: gets a line for every file that cannot be read. It is read again if it changes.
    """
    sizes: dict[Path, int] = {}
    seen: dict[Path, int | None] = {}  # None: read; else the size of what could not be read
    first: list[float] = []
    while True:
        now = _sizes(folder)
        # A file is complete when it has not grown since the last look.
        for path, size in now.items():
            if seen.get(path, -1) in (None, size) or not (once or sizes.get(path) == size):
                continue
            try:
                steps = list(_steps(path, python))
            except (MismatchError, OSError) as error:
                seen[path] = size
                note(f"{line(path)} was not read: {line(getattr(error, 'headline', error))}")
                continue
            seen[path] = None
            for step, rows in steps:
                usual = float(np.median(first)) if len(first) == FIRST else None
                if len(first) < FIRST:
                    first.append(step.abs_diff)
                yield _line(step, rows, usual)
        if once:
            return
        sizes = now
        time.sleep(every_s)


def _sizes(folder: Path) -> dict[Path, int]:
    """Return the files of a dump, the oldest first, and their sizes."""
    found = {}
    for path in folder.rglob("*"):
        with suppress(OSError):  # renamed or deleted meanwhile
            if path.suffix in SUFFIXES and path.is_file():
                found[path] = path.stat()
    ordered = sorted(found, key=lambda path: found[path].st_mtime_ns)
    return {path: found[path].st_size for path in ordered}


def _steps(path: Path, python: str | None) -> Iterator[tuple[Step, str]]:
    """Yield the steps of a file that holds both sides, and which of its rows are off."""
    recorded = read_recorded(path, python=python)
    run = as_run(recorded, Sampling(), {}, {})
    sums = recorded.sums
    if run.train is None or not sums.whole.tokens:
        return
    pair = Pair.of(run.rollout, run.decode, run.train)
    rows = row_groups(pair, run.rollout, run.attributes).sentence()
    for step in sums.steps() or [sums.whole.step(0)]:
        yield step, rows


def _line(step: Step, rows: str, usual: float | None) -> str:
    text = (
        f"step {step.step}: mean |delta| {number(step.abs_diff)}, k3 {number(step.k3)}, PPO clips "
        f"{percent(step.clipped)}, effective size {percent(step.ess)} ({step.tokens:,} tokens)"
    )
    if usual is not None and step.abs_diff > WORSE * usual:
        text += f"; {step.abs_diff / usual:.1f}× the first steps"
    return f"{text}; {rows}" if rows else text
