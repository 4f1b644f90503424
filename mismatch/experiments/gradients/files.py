"""Gradients in a run directory: ``gradients/batch.json`` and one file per pass.

What is equal by construction is written once: a pass with the settings of another, such as the
reference, is kept as its name.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mismatch.codec import from_json
from mismatch.errors import MismatchError
from mismatch.experiments.gradients.analysis import check_gradients
from mismatch.experiments.gradients.types import GradientBatch, GradientCheck, Gradients
from mismatch.run import manifest
from mismatch.run.arrays import load_arrays, save_arrays
from mismatch.run.messages import pass_label, read_error
from mismatch.types import NotTested


def check_of_run(
    run_dir: Path | str, *, asked: bool = False
) -> tuple[GradientCheck | None, list[NotTested]]:
    """The check, and what it could not see.

    None where no gradient was asked for, or where none can be compared; then the reason is among
    that. Gradients never keep a report from being made.

    Args:
        asked: the run was to take gradients, so that there must be a word about them.
    """
    try:
        batch = load_batch(run_dir)
        if batch is None:
            reasons = gradient_failures(run_dir, [ALL_PASSES])
            missing = [NotTested(GRADIENTS, reason) for reason in reasons.values()]
            none = NotTested(GRADIENTS, "none were taken", "mismatch check --gradients --resume")
            return None, missing or [none] * asked
        check = check_gradients(load_gradients(run_dir), batch)
    except MismatchError as error:
        return None, [NotTested(GRADIENTS, error.message, error.fix)]
    return check, [NotTested(GRADIENTS, reason) for reason in check.not_tested]


GRADIENTS = "gradients"  # what is not tested without any
BATCH = "gradients/batch.json"
BATCH_SCHEMA = "mismatch.gradient-batch/2"
SCHEMA = "mismatch.gradients/2"
ARRAYS = ("squared_norm", "dot", "squared_norm_reference", "sketches", "prompts")
ALL_PASSES = "gradients"  # under which a reason is left that holds for every pass


def gradients_file(name: str) -> str:
    """Return the path inside the run directory, e.g. ``gradients/fix-fp32.safetensors``."""
    return f"gradients/{name.replace(':', '-').replace('/', '-')}.safetensors"


def failure_label(name: str) -> str:
    """Under which a gradient pass leaves its reason in ``errors``."""
    return pass_label(name if name == ALL_PASSES else f"gradients:{name}")


def save_gradients(
    run_dir: Path | str,
    gradients: Gradients,
    made_by: str,
    inputs: tuple[str, ...],
    facts: dict[str, Any],
) -> Path:
    """Write one pass's gradient; ``facts`` are kept beside it."""
    run_dir = Path(run_dir)
    arrays = {name: values for name in ARRAYS if (values := getattr(gradients, name)) is not None}
    header = {
        "name": gradients.name,
        "groups": list(gradients.groups),
        "seconds": gradients.seconds,
        "peak_bytes": gradients.peak_bytes,
        **facts,
    }
    name = gradients_file(gradients.name)
    save_arrays(run_dir, name, arrays, SCHEMA, {"header": header}, made_by=made_by, inputs=inputs)
    return run_dir / name


def read_gradients(run_dir: Path | str, name: str) -> Gradients:
    """One artefact.

    Raises:
        MismatchError: absent, damaged, or of another schema.
    """
    file = load_arrays(Path(run_dir), gradients_file(name), SCHEMA)
    header = file.header["header"]
    held: dict[str, Any] = {name: each for name, each in file.arrays.items() if name in ARRAYS}
    kept = {name: header[name] for name in ("name", "seconds", "peak_bytes")}
    absent = dict.fromkeys(("dot", "squared_norm_reference"))
    return Gradients(**{**absent, **held, **kept, "groups": tuple(header["groups"])})


def gradient_facts(run_dir: Path | str, name: str) -> dict[str, Any]:
    """What was noted beside one artefact: spec, loss scale, world size …"""
    facts: dict[str, Any] = load_arrays(Path(run_dir), gradients_file(name), SCHEMA).header[
        "header"
    ]
    return facts


def save_batch(
    run_dir: Path | str,
    batch: GradientBatch,
    work: list[dict[str, str]],
    made_by: str,
    inputs: tuple[str, ...],
    *,
    finished: bool,
) -> Path:
    """Write ``gradients/batch.json``.

    Args:
        work: every gradient by ``name``, with ``made_by`` as recorded, or ``same_as``, the name
            of the pass whose gradient it is.
        finished: nothing is left to be taken.
    """
    from mismatch.run.store import write_json

    document = {"schema": BATCH_SCHEMA, "finished": finished, **asdict(batch), "work": work}
    path = write_json(Path(run_dir) / BATCH, document)
    manifest.record(run_dir, BATCH, BATCH_SCHEMA, made_by, inputs)
    return path


def is_finished(run_dir: Path | str, made_by: str) -> bool:
    """Whether all gradients of a plan are there, taken of the scorings that are there now."""
    run_dir = Path(run_dir)
    if not manifest.is_current(run_dir, BATCH, made_by):
        return False
    data = _document(run_dir)
    return bool(data["finished"]) and all(
        _is_there(run_dir, entry) for entry in data["work"] if "made_by" in entry
    )


def load_batch(run_dir: Path | str) -> GradientBatch | None:
    """What the gradients were taken of; None where none were asked for, or none could be.

    Raises:
        MismatchError: a damaged file.
    """
    run_dir = Path(run_dir)
    if not (run_dir / BATCH).exists():
        return None
    data = _document(run_dir)
    fields = {key: data[key] for key in data if key not in ("schema", "finished", "work")}
    batch = from_json(GradientBatch, fields)
    names = [ALL_PASSES, *(trainer.name for trainer in batch.trainers)]
    return replace(batch, failed=gradient_failures(run_dir, names))


def load_gradients(run_dir: Path | str) -> list[Gradients]:
    """Every gradient of a run, the reference's first; empty where there is none.

    Raises:
        MismatchError: a damaged file.
    """
    run_dir = Path(run_dir)
    if not (run_dir / BATCH).exists():
        return []
    gradients: list[Gradients] = []
    work = _document(run_dir)["work"]
    there = {entry["name"] for entry in work if "made_by" in entry and _is_there(run_dir, entry)}
    for entry in work:
        source = entry.get("same_as", entry["name"])
        if source not in there:
            continue  # its pass failed, and said why
        taken = read_gradients(run_dir, source)
        gradients.append(taken if source == entry["name"] else _alias(taken, entry["name"]))
    return gradients


def gradient_failures(run_dir: Path | str, names: list[str]) -> dict[str, str]:
    """Pass -> why it has no gradient."""
    reasons = {name: read_error(run_dir, failure_label(name)) for name in names}
    return {
        name: f"{reason.message} ({reason.fix})" if reason.fix else reason.message
        for name, reason in reasons.items()
        if reason is not None
    }


def _is_there(run_dir: Path, entry: dict[str, str]) -> bool:
    """Whether a gradient is there, and of this batch: one of an earlier batch may be left."""
    name = gradients_file(entry["name"])
    recorded = manifest.entries(run_dir).get(name)
    made_by = entry["made_by"] if recorded is None else recorded["made_by"]
    return (run_dir / name).exists() and made_by == entry["made_by"]


def _alias(taken: Gradients, name: str) -> Gradients:
    return replace(
        taken,
        name=name,
        # The reference has no dot with itself: its own squared norm is that.
        dot=taken.squared_norm if taken.dot is None else taken.dot,
        squared_norm_reference=(
            taken.squared_norm
            if taken.squared_norm_reference is None
            else taken.squared_norm_reference
        ),
        seconds=None,
        peak_bytes=None,
        same_as=taken.name,
    )


def _document(run_dir: Path) -> dict[str, Any]:
    from mismatch.run.store import load_document

    data: dict[str, Any] = load_document(run_dir, BATCH)
    if data.get("schema") != BATCH_SCHEMA:
        raise MismatchError(
            f"{run_dir / BATCH} has schema {data.get('schema')}, this version reads {BATCH_SCHEMA}",
            "read the run with the version of mismatch that made it",
        )
    return data
