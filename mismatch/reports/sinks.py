"""A report's numbers sent to an experiment tracker, through the tracker's own client.

Where they go is the client's business: ``WANDB_PROJECT``, ``WANDB_MODE``, ``MLFLOW_TRACKING_URI``,
``TRACKIO_PROJECT`` and the like are respected. Ours are ``mismatch/METRIC``, with the interval in
``…_low`` and ``…_high``; ``--names`` adds a framework's own names, valued by its conventions.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch.errors import MismatchError
from mismatch.pipeline.document import headline_of, jq_name
from mismatch.reports.summary import headline, model_name
from mismatch.run.provenance import redact
from mismatch.types import Report

if TYPE_CHECKING:
    from mismatch.reports.framework_values import FrameworkValues

PROJECT = "mismatch"  # where the client's environment names none
PACKAGE = "train-infer-mismatch"
LONGEST = 250  # characters of a setting: what every tracker takes


@dataclass(frozen=True, slots=True)
class Record:
    """What is sent.

    Attributes:
        name: of the run.
        directory: for files that a client writes.
        settings: what was measured, and the verdict.
    """

    name: str
    directory: Path
    settings: dict[str, str]
    numbers: dict[str, float]


def _wandb(record: Record) -> None:
    wandb = import_module("wandb")
    # The command line, the packages and the repository may say more than a report does.
    settings = wandb.Settings(
        console="off",
        disable_git=True,
        save_code=False,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    with wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=record.name,
        dir=str(record.directory),
        config=record.settings,
        settings=settings,
    ) as run:
        run.log(record.numbers)


def _tensorboard(record: Record) -> None:
    client = import_module("tensorboardX")
    with client.SummaryWriter(str(record.directory / "tensorboard")) as writer:
        for name, value in record.numbers.items():
            writer.add_scalar(name, value, 0)
        for name, text in record.settings.items():
            writer.add_text(name, text, 0)


def _mlflow(record: Record) -> None:
    mlflow = import_module("mlflow")
    if not os.environ.keys() & {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"}:
        mlflow.set_experiment(PROJECT)
    with mlflow.start_run(run_name=record.name):
        mlflow.log_params(record.settings)
        mlflow.log_metrics(record.numbers)


def _trackio(record: Record) -> None:
    trackio = import_module("trackio")
    trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", PROJECT),
        name=record.name,
        config=record.settings,
    )
    try:
        trackio.log(record.numbers)
    finally:
        trackio.finish()


# Tracker -> module of its client, and what sends; the extra has the tracker's name.
CLIENTS: dict[str, tuple[str, Callable[[Record], None]]] = {
    "wandb": ("wandb", _wandb),
    "tensorboard": ("tensorboardX", _tensorboard),
    "mlflow": ("mlflow", _mlflow),
    "trackio": ("trackio", _trackio),
}


def require_clients(trackers: Iterable[str]) -> None:
    """Every tracker's client is installed; nothing is imported.

    Raises:
        MismatchError: it names the package to install; or no such tracker.
    """
    for tracker in trackers:
        if tracker not in CLIENTS:
            raise MismatchError(
                f"--log-to {tracker}: no such tracker", f"one of {', '.join(CLIENTS)}"
            )
        module, _ = CLIENTS[tracker]
        if find_spec(module) is None:
            raise MismatchError(
                f"--log-to {tracker}: its client, {module}, is not installed",
                f"pip install '{PACKAGE}[{tracker}]'",
            )


def send(
    trackers: Iterable[str], report: Report, run_dir: Path | None, elsewhere: FrameworkValues | None
) -> list[str]:
    """Send a report to trackers; what went wrong, one sentence each: the report is made already."""
    record = record_of(report, run_dir, elsewhere)
    failed = []
    for tracker in trackers:
        try:
            CLIENTS[tracker][1](record)
        except Exception as error:  # of foreign code: a network, a login, a full disk
            failed.append(f"--log-to {tracker} failed: {type(error).__name__}: {error}")
    return failed


def record_of(report: Report, run_dir: Path | None, elsewhere: FrameworkValues | None) -> Record:
    """The headline comparison as numbers by name, and what was measured as texts."""
    directory = Path.cwd() if run_dir is None else run_dir.resolve()
    first, flat = headline(report), headline_of(report)
    engine = report.fingerprints.get(first.rollout, {})
    settings = {
        "model": model_name(report),
        "engine": f"{engine.get('engine') or ''} {engine.get('version') or ''}".strip(),
        "verdict": flat.status,
        "reason": flat.reason,
        "best_fix": flat.best_fix or "",
        "created": str(report.run.get("created") or ""),
    }
    name = model_name(report) if run_dir is None else directory.name
    texts = {key: redact(text)[:LONGEST] for key, text in settings.items()}
    return Record(name, directory, texts, _numbers(report, elsewhere))


def _numbers(report: Report, elsewhere: FrameworkValues | None) -> dict[str, float]:
    """Finite ones alone: trackers differ in what they make of the others."""
    first = headline(report)
    numbers: dict[str, Any] = {"mismatch/exit_code": headline_of(report).exit_code}
    for metric, estimate in {**first.metrics, **first.routing}.items():
        ours = f"mismatch/{jq_name(metric)}"
        numbers |= {
            ours: estimate.value,
            f"{ours}_low": estimate.low,
            f"{ours}_high": estimate.high,
        }
    if elsewhere is not None and elsewhere.measured:
        for row, other in elsewhere.rows(report):
            numbers[other.name] = row.estimate.value if other.value is None else other.value
    return {
        name: float(value)
        for name, value in numbers.items()
        if value is not None and math.isfinite(value)
    }
