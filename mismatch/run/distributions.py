"""Whole distributions on disk, ``dists/<name>.safetensors``; see mismatch.captures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mismatch.captures import Distributions
from mismatch.errors import MismatchError
from mismatch.run import manifest
from mismatch.run.tables import require_file, require_schema

SCHEMA = "mismatch.distributions/1"


# ---------------------------------------------------------------- on disk


def distributions_file(stem: str) -> str:
    """Path inside the run directory; ``stem`` is that of the scoring's other files."""
    return f"dists/{stem}.safetensors"


def save(run_dir: Path, name: str, found: Distributions) -> None:
    """Write and record one artefact; ``name`` is its path inside the run directory."""
    from safetensors.numpy import save as to_bytes

    tensors: dict[str, Any] = {"positions": found.positions, "logprobs": found.logprobs}
    if found.ids is not None and found.rest is not None:
        tensors |= {"ids": found.ids.astype(np.int32), "rest": found.rest}
    tensors["vocabulary"] = np.asarray([found.vocabulary], np.int64)
    tensors = {key: np.ascontiguousarray(value) for key, value in tensors.items()}
    # One entry alone: the library writes several in any order, and equal artefacts are equal files.
    data = to_bytes(tensors, {"schema": SCHEMA})
    manifest.write_atomic(run_dir / name, lambda target: target.write_bytes(data))
    manifest.record(run_dir, name, SCHEMA)


def load(run_dir: Path, name: str) -> Distributions:
    """Read one artefact.

    Raises:
        MismatchError: absent, damaged, or of another schema.
    """
    from safetensors import SafetensorError, safe_open

    path = run_dir / name
    require_file(path)
    manifest.verify(run_dir, name)
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise MismatchError(
            f"{path} cannot be read: {error}", "run the stage that makes it again"
        ) from error
    require_schema(path, metadata.get("schema"), SCHEMA)
    ids = tensors.get("ids")
    return Distributions(
        positions=tensors["positions"].astype(np.int64),
        logprobs=tensors["logprobs"].astype(np.float32),
        vocabulary=int(tensors["vocabulary"][0]),
        ids=None if ids is None else ids.astype(np.int64),
        rest=tensors.get("rest"),
    )
