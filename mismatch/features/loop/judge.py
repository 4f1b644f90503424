"""What the curves of a loop say: where the reward falls, and where seeds agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from mismatch.codec import to_json
from mismatch.features.loop.spec import Checked
from mismatch.types import Floats

SCHEMA = "mismatch.loop/1"
WINDOW = 5  # steps that a running mean takes
FALL = 0.1  # of the reward, from the best running mean so far
Curve = tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class SeedRun:
    """One arm with one seed."""

    seed: int
    curves: dict[str, Curve]
    """Column -> a value for every step."""
    stopped: str = ""
    """Why it ended before its last step."""

    def curve(self, name: str) -> Floats:
        """Return [steps], NaN where nothing was measured."""
        values = self.curves.get(name, [np.nan] * self.steps)
        return np.asarray([np.nan if v is None else v for v in values], np.float64)

    @property
    def steps(self) -> int:
        return len(self.curves.get("step", ()))


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm over its seeds."""

    name: str
    runs: tuple[SeedRun, ...]


@dataclass(frozen=True, slots=True)
class LoopReport:
    """A whole loop; the settings are LoopSpec as data, as all arms share it."""

    model: str
    engine: str
    arms: tuple[Arm, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    checked: Checked | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """The rewards of two arms over the last steps that both made, over the seeds of both."""

    better: str
    worse: str
    differences: tuple[float, ...]
    """Reward of ``better`` less that of ``worse``, a value a seed."""
    errors: tuple[float, ...]
    """Standard error of each over its steps, as if those were independent; NaN for one step."""
    agree: bool
    """There are several seeds, and with each ``better`` leads by over twice the error."""


def running(values: Floats, window: int = WINDOW) -> Floats:
    """Mean of each step and those before it, at most ``window``; NaNs are left out.

    >>> running(np.array([1.0, 3.0, 5.0]), 2).tolist()
    [1.0, 2.0, 4.0]
    """
    parts = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return np.asarray(
        [p[np.isfinite(p)].mean() if np.isfinite(p).any() else np.nan for p in parts], np.float64
    )


def reward_fall(run: SeedRun) -> int | None:
    """Return the first step whose running mean lies :data:`FALL` below the best one before it."""
    smooth = running(run.curve("reward"))
    smooth[: WINDOW - 1] = np.nan
    fallen = np.fmax.accumulate(smooth) - smooth > FALL
    return int(np.argmax(fallen)) if fallen.any() else None


def at_end(run: SeedRun, column: str, end: int | None = None) -> float:
    """Return the mean of a curve over the steps before ``end``, by default over the last."""
    return float(running(run.curve(column)[:end])[-1])


def claims(report: LoopReport) -> Iterator[Claim]:
    """Compare every two arms by their reward over the last steps that both have."""
    for left, right in combinations(report.arms, 2):
        others = {run.seed: run for run in right.runs}
        gaps, errors = [], []
        for run in (run for run in left.runs if run.seed in others):
            end = min(run.steps, others[run.seed].steps)  # as far as both went
            last = slice(max(0, end - WINDOW), end)
            ahead = run.curve("reward")[last] - others[run.seed].curve("reward")[last]
            if count := int(np.isfinite(ahead).sum()):
                gaps.append(float(np.nanmean(ahead)))
                spread = np.nanstd(ahead, ddof=1) if count > 1 else np.nan
                errors.append(float(spread / np.sqrt(count)))
        if not gaps:
            continue
        better, worse = left.name, right.name
        if np.mean(gaps) < 0:
            better, worse, gaps = worse, better, [-gap for gap in gaps]
        beyond = all(gap > 2 * error for gap, error in zip(gaps, errors, strict=True))
        yield Claim(better, worse, tuple(gaps), tuple(errors), len(gaps) > 1 and beyond)


def loop_to_json(report: LoopReport) -> dict[str, Any]:
    """Return the report as JSON data, with what follows from it."""
    found = {
        arm.name: {str(run.seed): {"reward_fall": reward_fall(run)} for run in arm.runs}
        for arm in report.arms
    }
    judged = {"found": found, "claims": [to_json(claim) for claim in claims(report)]}
    return {"schema": SCHEMA, **judged, **to_json(report)}
