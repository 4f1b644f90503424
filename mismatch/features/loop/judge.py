"""What the curves of a loop say: warnings, the fall of the reward, and where seeds agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any, Literal

import numpy as np

from mismatch.codec import to_json
from mismatch.features.loop.spec import Checked
from mismatch.types import Floats

SCHEMA = "mismatch.loop/1"
FILE = "loop.json"
WINDOW = 5  # steps that a running mean takes
FALL = 0.1  # of the reward, from the best running mean so far
Curve = tuple[float | None, ...]
Over = Literal["end", "run"]


@dataclass(frozen=True, slots=True)
class Rule:
    """When a curve counts as a warning: above a value, or by growth over its first steps."""

    column: str
    above: float | None = None
    growth: float | None = None


WARNINGS = (
    Rule("k3_kl", above=0.01),
    Rule("ess_seq_lost", above=0.5),
    Rule("log_ppl_diff_max", above=0.5),
    Rule("entropy", growth=1.5),
    Rule("grad_norm", growth=5.0),
)


@dataclass(frozen=True, slots=True)
class SeedRun:
    """One arm with one seed."""

    GONE = frozenset({"first", "last"})  # see mismatch/codec.py

    seed: int
    curves: dict[str, Curve]
    """Column -> a value for every step."""
    path: str = ""
    """Of the weight sync."""
    stopped: str = ""
    """Why it ended before its last step."""

    def curve(self, name: str) -> Floats:
        """Return [steps], NaN where nothing was measured."""
        if name == "ess_seq_lost":
            return np.asarray(1.0 - self.curve("ess_seq"), np.float64)
        values = self.curves.get(name, ())
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
    """The rewards of two arms as far as both went, over the seeds of both."""

    better: str
    worse: str
    over: Over
    """"end": the last steps; "run": the mean of all steps, which says who learns faster."""
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


def fired(run: SeedRun) -> dict[str, int | None]:
    """Warning -> the first step at which it fired, or None."""
    return {warning.column: _first(run.curve(warning.column), warning) for warning in WARNINGS}


def _first(values: Floats, warning: Rule) -> int | None:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    over = np.zeros(len(values), np.bool_)
    if warning.above is not None:
        over |= values > warning.above
    if warning.growth is not None:
        after = np.arange(len(values)) >= min(WINDOW, len(values))
        over |= after & (running(values) > warning.growth * np.nanmean(values[:WINDOW]))
    return int(np.argmax(over)) if over.any() else None


def reward_fall(run: SeedRun) -> int | None:
    """Return the first step whose running mean lies :data:`FALL` below the best one before it."""
    smooth = running(run.curve("reward"))[WINDOW - 1 :]
    if not len(smooth):
        return None
    below = np.fmax.accumulate(smooth) - smooth > FALL
    return int(np.argmax(below)) + WINDOW - 1 if below.any() else None


def at_end(run: SeedRun, column: str, end: int | None = None) -> float:
    """Return the running mean of a curve at a step; the last by default."""
    values = running(run.curve(column))[: run.steps if end is None else end]
    return float(values[-1]) if len(values) else float("nan")


def claims(report: LoopReport) -> Iterator[Claim]:
    """Compare every two arms by their reward, at the end and over all steps that both have."""
    overs: tuple[Over, ...] = ("end", "run")
    for (left, right), over in product(combinations(report.arms, 2), overs):
        runs = {run.seed: run for run in right.runs}
        pairs = [(run, runs[run.seed]) for run in left.runs if run.seed in runs]
        by_step = [steps for pair in pairs if len(steps := _ahead(*pair, over))]
        if not by_step:
            continue
        gaps = [float(np.mean(steps)) for steps in by_step]
        errors = [_error(steps) for steps in by_step]
        better, worse = left.name, right.name
        if np.mean(gaps) < 0:
            better, worse, gaps = worse, better, [-gap for gap in gaps]
        beyond = all(gap > 2 * error for gap, error in zip(gaps, errors, strict=True))
        agree = len(gaps) > 1 and beyond
        yield Claim(better, worse, over, tuple(gaps), tuple(errors), agree)


def _ahead(run: SeedRun, other: SeedRun, over: Over) -> Floats:
    """Return [steps] reward of a run less that of another, as far as both went."""
    end = min(run.steps, other.steps)
    first = max(0, end - WINDOW) if over == "end" else 0
    ahead = run.curve("reward")[first:end] - other.curve("reward")[first:end]
    return np.asarray(ahead[np.isfinite(ahead)], np.float64)


def _error(steps: Floats) -> float:
    return float(np.std(steps, ddof=1) / np.sqrt(len(steps))) if len(steps) > 1 else float("nan")


def loop_to_json(report: LoopReport) -> dict[str, Any]:
    """Return the report as JSON data, with what follows from it."""
    found = {
        arm.name: {
            str(run.seed): {"fired": fired(run), "reward_fall": reward_fall(run)}
            for run in arm.runs
        }
        for arm in report.arms
    }
    judged = {"found": found, "claims": [to_json(claim) for claim in claims(report)]}
    return {"schema": SCHEMA, **judged, **to_json(report)}
