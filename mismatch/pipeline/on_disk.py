"""Which side holds other weights than its checkpoint: asked only where the two sides' differ."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from operator import ne
from pathlib import Path
from typing import Any

from mismatch.analysis.diagnosis.loaded_weights import NOT_OF_CHECKPOINT, Difference, comparable
from mismatch.errors import MismatchError
from mismatch.keys import TRAIN, Key
from mismatch.models.config import find_config
from mismatch.models.derived import open_tensors
from mismatch.models.digests import OF_EXPERTS, Digest, combine, digest_tensor
from mismatch.processes.stages import Stages
from mismatch.run import manifest, store
from mismatch.types import Scoring, SideFacts

FILE, SCHEMA = "weights-on-disk.json", "mismatch.weights-on-disk/1"
MATRICES = {"gate_up_proj": "gate|up", "down_proj": "down"}  # of each expert, in the files


def compare_with_disk(stages: Stages) -> None:
    """Leave the names of those parameters that a side holds otherwise than its checkpoint.

    Only parameters in which the two sides differ are read, and nothing where they are equal.
    """
    run_dir, spec = stages.run_dir, stages.spec
    engine = spec.rollout.engine
    if engine.adapter or spec.train.adapter:  # neither side holds its checkpoint's values
        return
    names = Key.of(engine.engine, "decode"), TRAIN
    prints = [store.scoring_header(run_dir, name)["fingerprint"] for name in names]
    held = comparable(*prints)
    differ = () if held is None else Difference.of(*held).differ
    if not differ or manifest.is_current(run_dir, FILE, ""):
        return
    checkpoints = (engine.model, engine.revision), (spec.train.model, spec.train.revision)
    sides = zip(prints, checkpoints, strict=True)
    try:
        found = [not_of_checkpoint(side, *checkpoint, differ) for side, checkpoint in sides]
    except (MismatchError, ImportError) as error:  # costs this answer, never the check
        return stages.narrator.note(f"the checkpoint was not compared: {error}")
    off = {name: each for name, each in zip(names, found, strict=True) if each is not None}
    inputs = [store.scoring_file(name) for name in names]
    store.save_document(run_dir, FILE, {"schema": SCHEMA, **off}, schema=SCHEMA, inputs=inputs)


def not_of_checkpoint(
    side: SideFacts, model: str, revision: str | None, names: Collection[str]
) -> list[str] | None:
    """Return which of these parameters a side holds otherwise than its checkpoint's files do.

    None where a name is not in the files: it is quantised, tied, of an adapter, or fused.

    Raises:
        MismatchError: no such checkpoint, or one that cannot be read.
    """
    directory = find_config(model, revision).weights
    with ExitStack() as stack:
        files = open_tensors(directory, stack) if directory else {}
        stored = {name: stored_digest(files, name) or () for name in names}
    if not all(stored.values()):
        return None
    return [name for name, sums in stored.items() if any(map(ne, side["weights"][name], sums))]


def stored_digest(files: Mapping[str, Any], name: str) -> Digest | None:
    """Return the digest of a parameter in files, which may have a matrix for each expert."""
    layer, _, leaf = name.rpartition(".")
    pattern = rf"{re.escape(layer)}\.(\d+)\.({MATRICES.get(leaf, '-')})_proj\.weight"
    matrices = () if name in files else filter(None, map(re.compile(pattern).fullmatch, files))
    first: dict[str, Sequence[int]] = {each[0]: (int(each[1]),) for each in matrices}
    digests: list[Digest] = []
    for part in first or {name} & files.keys():
        tensor = files[part].get_tensor(part)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            return None
        digests.append(digest_tensor(tensor[None] if first else tensor, first.get(part, ())))
    return combine(digests)[: OF_EXPERTS if first else None] if digests else None


def with_disk(run_dir: Path, *scorings: Scoring) -> tuple[Scoring, ...]:
    """Return scorings whose fingerprints say what :func:`compare_with_disk` found."""
    found = store.load_document(run_dir, FILE) if manifest.is_current(run_dir, FILE, "") else {}
    return tuple(
        replace(scoring, fingerprint=scoring.fingerprint | {NOT_OF_CHECKPOINT: found[scoring.name]})
        if scoring.name in found
        else scoring
        for scoring in scorings
    )
