"""Files of named arrays with a schema and a header, in the safetensors format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatch.errors import MismatchError
from mismatch.run import manifest
from mismatch.run.manifest import require_file, require_schema, write_atomic

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class ArrayFile:
    """What a file of arrays holds."""

    arrays: Arrays
    header: dict[str, Any]
    """JSON data that was kept next to the arrays."""


def save_arrays(
    run_dir: Path, name: str, arrays: Arrays, schema: str, header: dict[str, Any], **entry: Any
) -> None:
    """Write one artefact and record it; ``entry`` as :func:`mismatch.run.manifest.record` takes it.

    Equal arrays and headers make equal files.
    """
    from safetensors.numpy import save

    tensors = {key: np.ascontiguousarray(values) for key, values in arrays.items()}
    # One entry alone: the library writes several in any order.
    metadata = {"mismatch": json.dumps({"schema": schema, **header}, sort_keys=True)}
    # Not its save_file: a killed writer leaves behind the temporary file that it makes.
    data = save(tensors, metadata)
    write_atomic(run_dir / name, lambda target: target.write_bytes(data))
    manifest.record(run_dir, name, schema, **entry)


def load_arrays(run_dir: Path, name: str, schema: str) -> ArrayFile:
    """Read one artefact after comparing it with its checksum.

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
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise MismatchError(
            f"{path} cannot be read: {error}", "run the stage that makes it again"
        ) from error
    if "mismatch" in metadata:
        header = json.loads(metadata["mismatch"])
    else:  # of an earlier version: the schema, and other entries as JSON
        header = {
            key: text if key == "schema" else json.loads(text) for key, text in metadata.items()
        }
    require_schema(path, header.pop("schema", None), schema)
    return ArrayFile(arrays, header)
