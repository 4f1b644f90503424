"""One metric over the saved runs of a folder: which run moved it, from report.json alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mismatch.codec import to_json
from mismatch.errors import MismatchError
from mismatch.metrics import METRICS
from mismatch.metrics.difference import excludes_zero
from mismatch.metrics.inference import mover
from mismatch.pipeline.saved_runs import SavedRun, load_all
from mismatch.types import Estimate, Status

SCHEMA = "mismatch.history/1"


@dataclass(frozen=True, slots=True)
class Point:
    """One run.

    Attributes:
        place: its directory, from the folder.
        value: of the metric; None where the run does not have it.
        change: from the run of the same model before it that has the metric; its interval takes
            the two runs as independent.
        moved: that interval leaves 0 out.
        healthy, unfit: the levels that judged it; None where the metric was not judged.
    """

    place: str
    model: str
    engine: str
    created: str
    status: Status
    reason: str
    value: Estimate | None
    change: Estimate | None
    moved: bool
    healthy: float | None
    unfit: float | None


@dataclass(frozen=True, slots=True)
class History:
    """One metric of many runs, oldest first.

    Attributes:
        unreadable: directories whose report cannot be read, and why.
    """

    folder: str
    metric: str
    points: tuple[Point, ...]
    unreadable: tuple[tuple[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **to_json(self)}


def history(folder: Path, metric: str = "k3_kl") -> History:
    """A metric over every run below a folder.

    Raises:
        MismatchError: no such metric or folder, or no run in it.
    """
    if metric not in METRICS:
        from difflib import get_close_matches

        near = get_close_matches(metric, METRICS, n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        raise MismatchError(f"no metric {metric!r}", f"{guess}mismatch metrics lists all of them")
    runs, unreadable = load_all(folder)
    if not runs and not unreadable:
        raise MismatchError(
            f"no run in {folder}: no directory in it holds report.json",
            "name the folder that holds your runs",
        )
    return History(
        folder=folder.resolve().name,
        metric=metric,
        points=tuple(_points(runs, metric, folder)),
        unreadable=tuple((_place(path, folder), reason) for path, reason in unreadable),
    )


def _points(runs: Sequence[SavedRun], metric: str, folder: Path) -> list[Point]:
    before: dict[str, Estimate] = {}
    points = []
    for run in runs:
        value, model = run.values.get(metric), run.report.model
        change = None
        if value is not None:
            if model in before:
                change = _change(before[model], value)
            before[model] = value
        judgement = next((j for j in run.report.verdict.judgements if j.metric == metric), None)
        points.append(
            Point(
                place=_place(run.path, folder),
                model=model,
                engine=run.engine,
                created=run.created,
                status=run.report.verdict.status,
                reason=run.report.verdict.reason,
                value=value,
                change=change,
                moved=change is not None and bool(excludes_zero(change)),
                healthy=judgement.healthy if judgement else None,
                unfit=judgement.unfit if judgement else None,
            )
        )
    return points


def _place(path: Path, folder: Path) -> str:
    place = path.resolve().relative_to(folder.resolve())
    return path.resolve().name if place == Path() else place.as_posix()


def _change(before: Estimate, after: Estimate) -> Estimate:
    """after - before, the two taken as independent (MOVER)."""
    ends = mover(before, after)
    low, high = ends if ends is not None else (None, None)
    return replace(after, value=after.value - before.value, low=low, high=high)
