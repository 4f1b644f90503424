"""Saved runs as their report.json and tokens.parquet tell them, and where a folder holds some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch.codec import to_json
from mismatch.errors import MismatchError, did_you_mean
from mismatch.metrics import METRICS
from mismatch.metrics.difference import Sample, excludes_zero
from mismatch.metrics.inference import mover
from mismatch.pipeline.document import report_from_json
from mismatch.run import store
from mismatch.types import Comparison, Estimate, Ints, Report, Status

if TYPE_CHECKING:
    import pandas as pd


REPORT = "report.json"
NEEDED = ("sequence", "prompt", "position", "token_id", "rollout_logprob", "train_logprob")
DEPTH = 3  # folders below the one that is searched for runs


@dataclass(frozen=True, slots=True)
class SavedRun:
    """One run, without its rollout and scorings.

    Attributes:
        tokens: its tokens table; None where it was not read, is not there, or is too old to say
            which prompt a token belongs to.
    """

    path: Path
    report: Report
    tokens: pd.DataFrame | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def created(self) -> str:
        """ISO time, or ""."""
        return str(self.report.run.get("created") or "")

    @property
    def engine(self) -> str:
        """Engine and version, "" where the report does not say."""
        facts = self.facts["engine"]
        return f"{facts.get('engine') or ''} {facts.get('version') or ''}".strip()

    @property
    def comparison(self) -> Comparison | None:
        """The headline; None where nothing could be compared."""
        return self.report.comparisons[0] if self.report.comparisons else None

    @property
    def values(self) -> dict[str, Estimate]:
        """metric -> estimate of the headline."""
        first = self.comparison
        return {} if first is None else first.metrics | first.routing

    @property
    def facts(self) -> dict[str, Mapping[str, Any]]:
        """What engine, trainer and machine say of themselves."""
        first, prints = self.comparison, self.report.fingerprints
        run = self.report.run
        return {
            "engine": {} if first is None else prints.get(first.rollout, {}),
            "trainer": {} if first is None else prints.get(first.train, {}),
            "machine": {key: run[key] for key in ("platform", "environment") if run.get(key)},
        }

    @property
    def weights(self) -> str:
        """Digest of the parameters that the trainer loaded, "" where it gave none."""
        return str(self.facts["trainer"].get("weights") or "")


def load_run(run: Path, tokens: bool = True) -> SavedRun:
    """A run from its report, and its tokens where they are there.

    Raises:
        MismatchError: no report, or one that is damaged or of another version.
    """
    report = report_from_json(store.load_document(run, REPORT))
    table = store.load_tokens(run) if tokens and (run / store.TOKENS).exists() else None
    if table is not None and not set(NEEDED) <= set(table.columns):
        table = None
    if table is not None:
        finite = np.isfinite(table["rollout_logprob"]) & np.isfinite(table["train_logprob"])
        table = table[finite] if finite.any() else None
    return SavedRun(run, report, table)


def find_runs(folder: Path) -> Iterator[Path]:
    """Directories below a folder, and itself, that hold a report; by name, links not followed.

    Raises:
        MismatchError: no such folder.
    """
    if not folder.is_dir():
        raise MismatchError(f"{folder} is no directory", "name the folder that holds your runs")
    yield from _below(folder, DEPTH)


def _below(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / REPORT).is_file() and not (folder / REPORT).is_symlink():
        yield folder
    if depth:
        try:
            inside = sorted(p for p in folder.iterdir() if not p.is_symlink() and p.is_dir())
        except OSError:  # not ours to read
            return
        for path in inside:
            yield from _below(path, depth - 1)


def load_all(folder: Path) -> tuple[list[SavedRun], list[tuple[Path, str]]]:
    """Every run below a folder, oldest first, without tokens; and those that cannot be read."""
    runs, damaged = [], []
    for path in find_runs(folder):
        try:
            runs.append(load_run(path, tokens=False))
        except MismatchError as error:
            damaged.append((path, error.message))
    return sorted(runs, key=lambda run: (run.created, run.name)), damaged


# ---------------------------------------------------------------- tokens as metrics ask for them


def same_tokens(first: SavedRun, second: SavedRun) -> bool:
    """Both hold the same tokens in the same places."""
    a, b = first.tokens, second.tokens
    if a is None or b is None or len(a) != len(b):
        return False
    return all(np.array_equal(a[name], b[name]) for name in ("sequence", "position", "token_id"))


def samples(left: SavedRun, right: SavedRun) -> tuple[Sample, Sample] | None:
    """The tokens of two runs, prompts numbered alike; None without the tokens of either.

    Prompts whose texts the tables do not hold are taken as different.
    """
    a, b = left.tokens, right.tokens
    if a is None or b is None:
        return None
    if same_tokens(left, right):
        return _sample(a, _first_of_sequences(a, "prompt")), _sample(
            b, _first_of_sequences(a, "prompt")
        )
    numbers: dict[Any, int] = {}
    first, second = (
        np.array([numbers.setdefault(key, len(numbers)) for key in _prompts(table, side)])
        for side, table in enumerate((a, b))
    )
    return _sample(a, first), _sample(b, second)


def routed(run: SavedRun) -> bool:
    """Whether the tokens say in how many of the model's MoE layers their experts differ."""
    return (
        run.tokens is not None
        and "routing_flips" in run.tokens
        and bool(run.tokens["routing_flips"].notna().all())
        and _layers(run) > 0
    )


def flips(run: SavedRun) -> np.ndarray:
    """Which of L places differ, [A, L]: as many as the token has; which layers is not kept."""
    assert run.tokens is not None
    counts = run.tokens["routing_flips"].to_numpy(dtype=np.int64)
    return np.arange(_layers(run)) < counts[:, None]


def _layers(run: SavedRun) -> int:
    first = run.comparison
    return (
        0 if first is None else len(first.breakdowns.get("routing_by_layer", {}).get("layer", ()))
    )


def _sample(table: pd.DataFrame, prompt: Ints) -> Sample:
    _, sequence = np.unique(table["sequence"], return_inverse=True)
    rollout, train = (
        table[name].to_numpy(dtype=np.float64) for name in ("rollout_logprob", "train_logprob")
    )
    arrays = {"rollout": rollout, "train": train, "delta": train - rollout, "sequence": sequence}
    return Sample(arrays, sequence, prompt)


def _first_of_sequences(table: pd.DataFrame, column: str) -> Any:
    _, first = np.unique(table["sequence"], return_index=True)
    return table[column].iloc[first].to_numpy()


def _prompts(table: pd.DataFrame, side: int) -> list[Any]:
    """A key for the prompt of each sequence: its text, else a number that no other run has."""
    own = [(side, int(number)) for number in _first_of_sequences(table, "prompt")]
    if "context" not in table:
        return own
    texts = _first_of_sequences(table, "context")
    return [key if text is None or len(text) == 0 else tuple(text)
            for key, text in zip(own, texts, strict=True)]  # fmt: skip


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
        guess = did_you_mean(metric, METRICS, most=1)
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
    relative = path.resolve().relative_to(folder.resolve())
    return path.resolve().name if relative == Path() else relative.as_posix()


def _change(before: Estimate, after: Estimate) -> Estimate:
    """after - before, the two taken as independent (MOVER)."""
    ends = mover(before, after)
    low, high = ends if ends is not None else (None, None)
    return replace(after, value=after.value - before.value, low=low, high=high)
