"""Which side holds other weights than its checkpoint: asked only where the two sides' differ."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from mismatch.analysis.diagnosis.loaded_weights import NOT_OF_CHECKPOINT, Difference, comparable
from mismatch.errors import MismatchError
from mismatch.models.config import find_config
from mismatch.models.derived import open_tensors
from mismatch.processes.stages import Stages
from mismatch.run import manifest, store
from mismatch.run.store import TRAIN
from mismatch.types import Fingerprint, Scoring

FILE, SCHEMA = "weights-on-disk.json", "mismatch.weights-on-disk/1"


def compare_with_disk(stages: Stages) -> None:
    """Leave the names of those parameters that a side holds otherwise than its checkpoint.

    Only parameters in which the two sides differ are read, and nothing where they are equal.
    """
    run_dir, spec = stages.run_dir, stages.spec
    engine = spec.rollout.engine
    if engine.adapter or spec.train.adapter:  # neither side holds its checkpoint's values
        return
    names = f"{engine.engine}:decode", TRAIN
    prints = [store.scoring_header(run_dir, name)["fingerprint"] for name in names]
    held = comparable(*prints)
    differ = () if held is None else Difference.of(*held).differ
    if not differ or manifest.is_current(run_dir, FILE, ""):
        return
    off: dict[str, list[str]] = {}
    checkpoints = (engine.model, engine.revision), (spec.train.model, spec.train.revision)
    for name, side, checkpoint in zip(names, prints, checkpoints, strict=True):
        try:
            found = not_of_checkpoint(side, *checkpoint, differ)
        except (MismatchError, ImportError) as error:  # costs this answer, never the check
            stages.narrator.note(f"the checkpoint was not compared: {error}")
            return
        if found is not None:
            off[name] = found
    inputs = [store.scoring_file(name) for name in names]
    store.save_document(run_dir, FILE, {"schema": SCHEMA, **off}, schema=SCHEMA, inputs=inputs)


def not_of_checkpoint(
    side: Fingerprint, model: str, revision: str | None, names: Collection[str]
) -> list[str] | None:
    """Return which of these parameters a side holds otherwise than its checkpoint's files do.

    None where a name is not in the files: it is fused, quantised, tied, or of an adapter.

    Raises:
        MismatchError: no such checkpoint, or one that cannot be read.
    """
    from mismatch.models.digests import digest_tensor

    directory = find_config(model, revision).weights
    if directory is None:
        return None
    off = []
    with ExitStack() as stack:
        files = open_tensors(directory, stack)
        if not set(names) <= files.keys():
            return None
        for name in names:
            tensor = files[name].get_tensor(name)
            if not tensor.is_floating_point():
                return None
            own, disk = side["weights"][name], digest_tensor(tensor)
            if list(own) != list(disk[: len(own)]):
                off.append(name)
    return off


def with_disk(run_dir: Path, *scorings: Scoring) -> tuple[Scoring, ...]:
    """Return scorings whose fingerprints say what :func:`compare_with_disk` found."""
    if not manifest.is_current(run_dir, FILE, ""):
        return scorings
    found: dict[str, Any] = store.load_document(run_dir, FILE)
    return tuple(
        replace(each, fingerprint=each.fingerprint | {NOT_OF_CHECKPOINT: found[each.name]})
        if each.name in found
        else each
        for each in scorings
    )
