"""`mismatch watch`: follow the dumps of a run while it trains."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mismatch.features.recorded.dumps import SUFFIXES, read_recorded
from mismatch.features.recorded.rows import row_groups
from mismatch.features.recorded.run import as_run
from mismatch.metrics.row_sums import Step
from mismatch.reports.formatting import number, percent
from mismatch.types import Pair, Sampling

WORSE = 3.0  # times the mean |delta| of the first steps: said to grow
FIRST = 3  # steps that the others are compared with


def follow(folder: Path, every_s: float, once: bool, python: str | None = None) -> Iterator[str]:
    """Yield a line for every step that is complete, as files of a dump appear.

    Args:
        once: stop after the files that are there.
    """
    sizes: dict[Path, int] = {}
    seen: set[Path] = set()
    first: list[float] = []
    while True:
        files = [path for path in folder.rglob("*") if path.suffix in SUFFIXES]
        files.sort(key=lambda path: path.stat().st_mtime)
        now = {path: path.stat().st_size for path in files if path not in seen}
        # A file is complete when it has not grown since the last look.
        for path in [path for path, size in now.items() if once or sizes.get(path) == size]:
            seen.add(path)
            for step, rows in _steps(path, python):
                usual = float(np.median(first)) if len(first) == FIRST else None
                if len(first) < FIRST:
                    first.append(step.abs_diff)
                yield _line(step, rows, usual)
        if once:
            return
        sizes = now
        time.sleep(every_s)


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
