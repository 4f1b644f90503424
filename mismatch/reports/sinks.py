"""Send a report's numbers to an experiment tracker, through the tracker's own client.

The client decides where they go: ``WANDB_PROJECT``, ``WANDB_MODE``, ``MLFLOW_TRACKING_URI``,
``TRACKIO_PROJECT`` and the like are respected. Our names are ``mismatch/METRIC``, with the interval
in ``…_low`` and ``…_high``; ``--names`` adds a framework's own names of the same numbers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mismatch.errors import MismatchError
from mismatch.metrics import framework_names
from mismatch.pipeline.document import headline_of, jq_name
from mismatch.reports.summary import headline, model_name
from mismatch.run.provenance import redact
from mismatch.types import Report

PROJECT = "mismatch"  # where the client's environment names none
LONGEST = 250  # characters of a setting: what every tracker takes
# Tracker -> module of its client; the extra that installs it has the tracker's name.
CLIENTS = {
    "wandb": "wandb",
    "tensorboard": "tensorboardX",
    "mlflow": "mlflow",
    "trackio": "trackio",
}
# The command line, the packages and the repository may say more than a report does.
WANDB_SILENT = {
    "console": "off",
    "disable_git": True,
    "save_code": False,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


@dataclass(frozen=True, slots=True)
class Record:
    """What is sent: settings say what was measured, and the verdict."""

    name: str
    directory: Path
    """For files that a client writes."""
    settings: dict[str, str]
    numbers: dict[str, float]


def require_clients(trackers: Iterable[str]) -> None:
    """Refuse a tracker whose client is not installed; nothing is imported.

    Raises:
        MismatchError: it names the package to install; or there is no tracker of that name.
    """
    for tracker in trackers:
        fault = f"--log-to {tracker}: "
        if tracker not in CLIENTS:
            raise MismatchError(f"{fault}no such tracker", f"use one of {', '.join(CLIENTS)}")
        if find_spec(CLIENTS[tracker]) is None:
            fault += f"its client, {CLIENTS[tracker]}, is not installed"
            raise MismatchError(fault, f"pip install 'train-infer-mismatch[{tracker}]'")


def send(
    trackers: Iterable[str], report: Report, run_dir: Path | None, framework: str | None
) -> list[str]:
    """Send a report to trackers; return a sentence for each that failed."""
    record = record_of(report, run_dir, framework)
    failed = []
    for tracker in trackers:
        try:
            _log(import_module(CLIENTS[tracker]), tracker, record)
        except Exception as error:  # of foreign code: a network, a login, a full disk
            failed.append(f"--log-to {tracker} failed: {type(error).__name__}: {error}")
    return failed


def record_of(report: Report, run_dir: Path | None, framework: str | None) -> Record:
    """Return the headline comparison as numbers by name, and what was measured as texts."""
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
    numbers: dict[str, float | None] = {"mismatch/exit_code": flat.exit_code}
    for metric, estimate in {**first.metrics, **first.routing}.items():
        name = f"mismatch/{jq_name(metric)}"
        numbers[name] = estimate.value
        numbers[f"{name}_low"], numbers[f"{name}_high"] = estimate.low, estimate.high
        for alias in framework_names.of(metric, framework) if framework else ():
            if not alias.differs:  # the framework's charts may have only the framework's number
                numbers[alias.name] = estimate.value
    return Record(
        name=model_name(report) if run_dir is None else directory.name,
        directory=directory,
        settings={key: redact(text)[:LONGEST] for key, text in settings.items()},
        # Trackers differ in what they make of NaN and infinity.
        numbers={
            name: float(value)
            for name, value in numbers.items()
            if value is not None and math.isfinite(value)
        },
    )


def _log(client: Any, tracker: str, record: Record) -> None:
    if tracker == "tensorboard":
        with client.SummaryWriter(str(record.directory / "tensorboard")) as writer:
            for name, value in record.numbers.items():
                writer.add_scalar(name, value, 0)
            for name, text in record.settings.items():
                writer.add_text(name, text, 0)
    elif tracker == "mlflow":
        if "MLFLOW_TRACKING_URI" not in os.environ and find_spec("sqlalchemy") is None:
            # mlflow-skinny's default store needs sqlalchemy; its store of files has to be allowed.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            client.set_tracking_uri((Path.cwd() / "mlruns").as_uri())
        if not os.environ.keys() & {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"}:
            client.set_experiment(PROJECT)
        with client.start_run(run_name=record.name):
            client.log_params(record.settings)
            client.log_metrics(record.numbers)
    else:
        more: dict[str, Any] = {}
        if tracker == "wandb":
            more["dir"] = str(record.directory)
            more["settings"] = client.Settings(**WANDB_SILENT)
        project = os.environ.get(f"{tracker.upper()}_PROJECT", PROJECT)
        client.init(project=project, name=record.name, config=record.settings, **more)
        try:
            client.log(record.numbers)
        finally:
            client.finish()
